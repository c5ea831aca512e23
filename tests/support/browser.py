"""Chromium for tests of pages: one session a module."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver


def start(profile: str | Path) -> webdriver.Chrome:
    """A headless browser that logs its console and what it fetches; skips if there is none."""
    paths = [shutil.which("chromium"), shutil.which("chromedriver")]
    if paths[0] is None or paths[1] is None:
        pytest.skip("chromium and chromedriver are not installed (Debian: chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = paths[0]
    for flag in (
        *("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run"),
        *("disable-background-networking", "disable-component-update", "disable-sync"),
        f"user-data-dir={profile}",
    ):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(paths[1]))


def resize(browser: webdriver.Chrome, width: int) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def set_scheme(browser: webdriver.Chrome, scheme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def fetched(browser: webdriver.Chrome, page: Path) -> list[str]:
    """The addresses that a page asked for since the last call."""
    messages = [json.loads(line["message"])["message"] for line in browser.get_log("performance")]
    sent = [each["params"] for each in messages if each["method"] == "Network.requestWillBeSent"]
    return [each["request"]["url"] for each in sent if each["documentURL"] == page.as_uri()]


def complaints(browser: webdriver.Chrome) -> list[dict[str, Any]]:
    """What the console says of errors and warnings."""
    return [line for line in browser.get_log("browser") if line["level"] in ("SEVERE", "WARNING")]
