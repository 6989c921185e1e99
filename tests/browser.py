"""A real Chromium for tests of pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from selenium import webdriver

REQUIRE = "DFLOW_REQUIRE_CHROMIUM"
NAMES = ("chromium", "google-chrome", "chromium-browser")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")


@contextmanager
def chromium() -> Iterator[webdriver.Chrome]:
    """The browser, its console kept; the test is skipped where there is none, unless REQUIRE insists."""
    binary = next((path for name in NAMES if (path := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        assert os.environ.get(REQUIRE) != "1", "no chromium with chromedriver on PATH"
        pytest.skip(f"no chromium with chromedriver on PATH (apt-get install chromium-driver); {REQUIRE}=1 insists")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with webdriver.Chrome(options, webdriver.ChromeService(driver)) as browser:
        yield browser


def show(browser: webdriver.Chrome, url: str, width: int, dark: bool) -> None:
    """Open a page as someone with this screen and colour scheme sees it."""
    for log in ("browser", "performance"):
        browser.get_log(log)  # what an earlier page left
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    browser.get(url)
