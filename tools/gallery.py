"""Draws the pictures of docs/gallery.md and of README.md from the two runs of `make demo`.

make demo && make check && .venv/bin/python tools/gallery.py     needs chromium and chromedriver
"""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

from PIL import Image
from selenium import webdriver

ROOT = Path(__file__).parents[1]
DEMO, IMAGES = ROOT / "runs" / "demo", ROOT / "docs" / "images"
FIGURES = {
    "reliability": DEMO / "comparison/figures/reliability.png",
    "confidence": DEMO / "nll/eval/figures/confidence_histogram.png",
    "risk": DEMO / "comparison/figures/risk_coverage.png",
    "classes": DEMO / "nll/eval/figures/classwise_reliability.png",
}
SECTIONS = ("reliability", "thresholds", "classes", "shift", "find", "pixels")
WIDTH = 1280
# What a section has beyond this height can be scrolled to on the page.
HEIGHT = 1000


def browser() -> webdriver.Chrome:
    """A headless browser."""
    options = webdriver.ChromeOptions()
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "hide-scrollbars"):
        options.add_argument(f"--{flag}")
    chrome = webdriver.Chrome(options=options)
    size: dict[str, Any] = {"width": WIDTH, "height": 1085, "deviceScaleFactor": 1, "mobile": False}
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    return chrome


def photograph(chrome: webdriver.Chrome, section: str | None) -> bytes:
    """PNG of the top of the page that is open, or of one of its sections."""
    top, height = 0.0, 1085.0
    if section is not None:
        box = "const box = document.getElementById(arguments[0]).getBoundingClientRect();"
        script = f"{box} return [box.top + window.scrollY, box.height]"
        top, height = chrome.execute_script(script, section)
    clip = {"x": 0, "y": top, "width": WIDTH, "height": min(height, HEIGHT), "scale": 1}
    asked = {"clip": clip, "captureBeyondViewport": True}
    return base64.b64decode(chrome.execute_cdp_cmd("Page.captureScreenshot", asked)["data"])


def write(name: str, png: bytes) -> None:
    """A picture with 256 colours, a third of the size."""
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    picture.quantize(256, dither=Image.Dither.NONE).save(IMAGES / f"{name}.png", optimize=True)
    print(f"docs/images/{name}.png")


if __name__ == "__main__":
    for name, path in FIGURES.items():
        write(name, path.read_bytes())
    overlays = sorted((DEMO / "nll/eval/overlays").glob("test*.png"))
    write("overlay", overlays[0].read_bytes())
    chrome = browser()
    chrome.get((DEMO / "comparison/report.html").as_uri())
    chrome.implicitly_wait(5)
    write("page", photograph(chrome, None))
    for section in SECTIONS:
        write(f"page-{section}", photograph(chrome, section))
    chrome.quit()
