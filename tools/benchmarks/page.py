"""Report pages in Chromium: size, and the time from opening one until it answers."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

# The first frame in which the page is read and every plot is drawn.
_WATCH = """
const look = () => {
  const plots = typeof Bokeh === "undefined" ? [] : Bokeh.documents;
  if (document.readyState === "complete" && plots.every((each) => each.is_idle)) {
    performance.mark("ready");
  } else requestAnimationFrame(look);
};
requestAnimationFrame(look);
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("pages", type=Path, nargs="+", metavar="PAGE.html")
    parser.add_argument("--repeats", type=int, default=5, help="each in a browser of its own")


def run(arguments: argparse.Namespace) -> None:
    """Open each page in fresh browsers, and print the median and the range of the times."""
    print("cold: a new browser with an empty profile; again: the page once more in it")
    for page in arguments.pages:
        found = [_open_twice(page) for _ in range(arguments.repeats)]
        print(f"{page}: {page.stat().st_size / 1e6:.2f} MB")
        for name, times in zip(("cold", "again"), zip(*found, strict=True), strict=True):
            print(f"  {name:6}{_text('answers after', times, 0)}; {_text('CPU', times, 1)}")


def _text(what: str, times: Any, column: int) -> str:
    values = [each[column] for each in times]
    median = statistics.median(values)
    return f"{what} {median:.2f} s ({min(values):.2f} to {max(values):.2f})"


def _open_twice(page: Path) -> list[tuple[float, float]]:
    """Seconds until the page answers, and CPU seconds of its main thread until then."""
    from tests.support.browser import resize, start

    with tempfile.TemporaryDirectory() as profile:
        browser = start(profile)
        try:
            resize(browser, 1280)
            browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": _WATCH})
            browser.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
            return [_open(browser, page) for _ in range(2)]
        finally:
            browser.quit()


def _open(browser: Any, page: Path) -> tuple[float, float]:
    browser.get("about:blank")
    before = _cpu(browser)
    browser.get(page.resolve().as_uri())
    script = "return performance.getEntriesByName('ready').map(each => each.startTime)[0]"
    while (ready := browser.execute_script(script)) is None:
        time.sleep(0.01)
    return ready / 1000, _cpu(browser) - before


def _cpu(browser: Any) -> float:
    metrics = browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    return float(next(each["value"] for each in metrics if each["name"] == "TaskDuration"))
