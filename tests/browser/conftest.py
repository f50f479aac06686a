"""A headless Chromium for the tests of pages; any request beyond this machine and any script error fails.

Where no browser is installed the tests are skipped, unless ZBSOLVE_NEED_BROWSER is set (as in ``.ci/run``).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser for one module of tests."""
    needed = bool(os.environ.get("ZBSOLVE_NEED_BROWSER"))
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        assert not needed, "playwright is missing: pip install playwright"
        pytest.skip("needs playwright: pip install playwright")
    if path is None:
        assert not needed, "no browser: install chromium, or name one in CHROMIUM"
        pytest.skip("needs a browser: install chromium, or name one in CHROMIUM")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=OPTIONS)
        yield browser
        browser.close()


class Pages:
    """Opens pages and remembers what went wrong on them."""

    def __init__(self, browser: Any) -> None:
        self.browser = browser
        self.open_pages: list[Any] = []
        self.errors: list[str] = []

    def new(self, width: int = 1280, height: int = 900, **options: Any) -> Any:
        page = self.browser.new_page(viewport={"width": width, "height": height}, **options)
        page.on("pageerror", lambda error: self.errors.append(f"script error: {error}"))
        page.on("request", lambda request: self._check(request.url))
        self.open_pages.append(page)
        return page

    def open_file(self, path: Path, width: int = 1280, height: int = 900, **options: Any) -> Any:
        """A page file, drawn."""
        page = self.new(width, height, **options)
        page.goto(path.as_uri())
        page.wait_for_function("zbsolveViewer.current.chart.drawTimes.length > 0")
        return page

    def _check(self, url: str) -> None:
        if not url.startswith(("file:", "data:", "blob:", "http://127.0.0.1:", "http://localhost:")):
            self.errors.append(f"a request left this machine: {url}")


@pytest.fixture
def pages(browser: Any) -> Iterator[Pages]:
    """Pages of one test; afterwards nothing may have gone wrong on any of them."""
    opened = Pages(browser)
    yield opened
    for page in opened.open_pages:
        page.close()
    assert opened.errors == []
