"""A real browser for the tests of the page."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from horizon_plugin_pytorch.analysis.profile.document import Document
from horizon_plugin_pytorch.analysis.profile.page import page_of

# Screenshots of every run, to be looked at.
SCREENSHOTS = Path(__file__).resolve().parents[4] / "out" / "profiler-page"
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --force-color-profile=srgb"
).split()
REQUIRED = "BROWSER_TESTS"  # "required" in the environment: without a browser the tests fail


def _without(reason: str) -> None:
    text = f"{reason}: the profiler's page is not tested. `make browser` installs what is missing, if it may."
    if os.environ.get(REQUIRED) == "required":
        pytest.fail(text)
    pytest.skip(text)


# Not for the session: while playwright runs, no other test of the process could use asyncio.
@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """Debian's Chromium, or what CHROMIUM names; one for all tests of the page."""
    names = [os.environ["CHROMIUM"]] if "CHROMIUM" in os.environ else ["chromium", "google-chrome"]
    path = next((found for name in names if (found := shutil.which(name))), None)
    if path is None:
        _without("There is no Chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _without("playwright is not installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


class Opened:
    """A page in the browser, with what it said on the console."""

    def __init__(self, page: Any, complaints: list[str]) -> None:
        self.page, self.complaints = page, complaints

    def values(self, inside: str) -> list[float]:
        """The numbers that elements of the page carry, with all their digits."""
        found = self.page.locator(f"{inside} [data-value]").evaluate_all("all => all.map(e => e.dataset.value)")
        return [float(value.replace("Infinity", "inf")) for value in found]

    def names(self) -> list[str]:
        """The operators in the rows of the table that are in view."""
        return self.page.locator(".virtual tbody tr[data-key]").evaluate_all("rows => rows.map(row => row.dataset.key)")

    def go(self, view: str, operator: str | None = None) -> None:
        """Follow a link to a view."""
        address = f"#view={view}" + (f"&op={quote(operator)}" if operator is not None else "")
        self.page.evaluate("address => { location.hash = address }", address)
        self.page.wait_for_selector(f"nav a[aria-current][data-view='{view}']")

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def screenshot(self, name: str) -> None:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=str(SCREENSHOTS / f"{name}.png"))


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Opened]]:
    """Opens documents as a user does, from a file; nothing may be said on the console, or fetched."""
    contexts: list[Any] = []
    opened: list[Opened] = []

    def open_it(
        documents: Document | Sequence[Document], address: str = "", locale: str = "en-US", scheme: str = "light",
        width: int = 1440, height: int = 900,
    ) -> Opened:  # fmt: skip
        documents = [documents] if isinstance(documents, Document) else documents
        path = tmp_path / f"profiler{len(opened)}.html"
        path.write_text(page_of(documents), encoding="utf-8")
        context = browser.new_context(
            viewport={"width": width, "height": height}, locale=locale, color_scheme=scheme, reduced_motion="reduce"
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(15_000)
        complaints: list[str] = []
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: (complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on(
            "request",
            lambda request: None if re.match("file:|data:|blob:", request.url) else complaints.append(request.url),
        )
        page.goto(path.as_uri() + address)
        page.wait_for_selector("main > *", state="attached")
        opened.append(Opened(page, complaints))
        return opened[-1]

    yield open_it
    for context in contexts:
        context.close()
    assert [complaint for page in opened for complaint in page.complaints] == []
