"""The page in a real browser: what no parser can promise."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from look_factory import save_run

from unspool.inspect.page import render
from unspool.inspect.place import find_place
from unspool.inspect.rows import Rows
from unspool.inspect.tokenizer import find_tokenizer
from unspool.inspect.views import Item, Part, Show, Span

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason=f"{CHROMIUM} is not installed (apt install chromium)")

UNBROKEN = "x" * 4000


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tangled rows, and text that would burst a page."""
    run_dir = save_run(tmp_path_factory.mktemp("runs") / "small")
    place = find_place(run_dir / "rows" / "tangled")
    rows = Rows(place, find_tokenizer(place, None, lambda name: str(run_dir / name)))
    wide = Part(title=UNBROKEN, length=9, facts=[UNBROKEN], spans=[Span(f"<b>{UNBROKEN}\nשלום", "text")])
    ids = Part(title="ids", length=9, spans=[Span(UNBROKEN, "text", True, (7,))])
    odd = Item(index=1, name="row 1", among="of 0–1", facts=[UNBROKEN], parts=[wide, ids])
    path = run_dir / "look.html"
    path.write_text(render(rows.summary(), [rows.item(0, Show()), odd]))
    return path


@pytest.fixture(scope="module")
def browser() -> "Iterator[sync_api.BrowserContext]":
    with sync_api.sync_playwright() as playwright, tempfile.TemporaryDirectory() as profile:
        context = playwright.chromium.launch_persistent_context(
            profile, executable_path=str(CHROMIUM), args=FLAGS, offline=True
        )
        yield context
        context.close()


@pytest.mark.parametrize("width", [1200, 390, 320])
def test_the_page_is_quiet_and_nothing_scrolls_sideways(browser, page_file, width):
    page = browser.new_page()
    events: list[str] = []
    page.on("console", lambda message: events.append(message.text))
    page.on("pageerror", lambda error: events.append(str(error)))
    page.on("request", lambda request: events.append(request.url))
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(page_file.as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")

    assert [event for event in events if event != page_file.as_uri() and "data:," not in event] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.close()


def test_a_band_leads_to_its_text_and_next_to_the_next_row(browser, page_file):
    page = browser.new_page()
    page.goto(page_file.as_uri())
    page.locator("svg.bands a").nth(1).click()
    assert page.url.endswith("#item0-1")
    page.get_by_role("link", name="next →").click()
    assert page.url.endswith("#item1")
    page.close()
