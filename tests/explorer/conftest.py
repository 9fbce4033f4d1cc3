"""A real browser for the tests of the page, Debian's Chromium or another one on the path."""

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
SKIPPED = os.environ.get("BROWSER") == "skip"
REQUIRED = os.environ.get("BROWSER") == "required"


@pytest.fixture(scope="session")
def browser():
    """Start the browser; without one the tests are skipped, or fail if the environment has BROWSER=required."""
    if SKIPPED:
        pytest.skip("BROWSER=skip")
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        end = pytest.fail if REQUIRED else pytest.skip
        end(f"no browser: none of {', '.join(NAMES)} is on the path; Debian's package is chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture(scope="session")
def context(browser):
    """Share what pages are opened in, without a network."""
    made = browser.new_context(offline=True)
    yield made
    made.close()


@dataclass
class Opened:
    """A page, and everything that it complained about or tried to load."""

    page: Any
    complaints: list[str] = field(default_factory=list)

    def steps(self) -> list[str]:
        """Names of the steps of the round."""
        return self.page.eval_on_selector_all("[data-step]", "found => found.map(each => each.dataset.step)")

    def go(self, step: str) -> None:
        """Choose a step of the round."""
        self.page.click(f"[data-step='{step}']")

    def text(self, selector: str) -> str:
        """Text of the first element."""
        return self.page.text_content(selector)

    def texts(self, selector: str) -> list[str]:
        """Texts of all elements."""
        return self.page.eval_on_selector_all(selector, "found => found.map(each => each.textContent)")

    def values(self, selector: str, name: str) -> list[str]:
        """Values of a data attribute."""
        return self.page.eval_on_selector_all(selector, f"found => found.map(each => each.dataset.{name})")


@pytest.fixture
def open_page(context, tmp_path):
    """Open pages; each must load nothing but itself and print nothing to the console."""
    opened: list[Opened] = []

    def open_one(source: Any, width: int = 1280, scheme: str = "light", settled: str = "[aria-current]") -> Opened:
        path = tmp_path / f"page{len(opened)}.html"
        if isinstance(source, Path):
            path = source
        else:
            source.write_html(path)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.set_viewport_size({"width": width, "height": 800})
        page.emulate_media(color_scheme=scheme)
        found = Opened(page)
        page.on("console", lambda message: found.complaints.append(message.text))
        page.on("pageerror", lambda error: found.complaints.append(str(error)))
        page.on("dialog", lambda dialog: (found.complaints.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: request.url == path.as_uri() or found.complaints.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_selector(f".specsim-explorer {settled}")
        opened.append(found)
        return found

    yield open_one
    for found in opened:
        found.page.close()
        assert found.complaints == []
