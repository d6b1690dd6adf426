"""The page in a real browser: what no parser can promise."""

import base64
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from inspection_factory import pieced_row, save_rows, save_run
from unspool.data.distances import doublings
from unspool.inspection.detokenize import FoundTokenizer, find_tokenizer
from unspool.inspection.distance_view import count_distances, read_text, render_distances
from unspool.inspection.items import Item, Part, Show, Span
from unspool.inspection.packed_rows import Rows
from unspool.inspection.run_paths import find_data
from unspool.inspection.viewer_page import render

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
MILLISECONDS = 300_000  # per command; a busy machine starts the browser slowly
pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason=f"{CHROMIUM} is not installed (apt install chromium)")

UNBROKEN = "x" * 4000


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tangled rows, and text that would burst a page."""
    run_dir = save_run(tmp_path_factory.mktemp("runs") / "small")
    place = find_data(run_dir / "datasets" / "tangled")
    rows = Rows(place, find_tokenizer(place, None, lambda name: str(run_dir / name)))
    wide = Part(title=UNBROKEN, length=9, facts=[UNBROKEN], spans=[Span(f"<b>{UNBROKEN}\nשלום", "text")])
    ids = Part(title="ids", length=9, spans=[Span(UNBROKEN, "text", True, (7,))])
    odd = Item(index=1, name="row 1", among="of 0–1", facts=[UNBROKEN], parts=[wide, ids])
    path = run_dir / "look.html"
    path.write_text(render([(rows.summary(), [rows.item(0, Show()), odd])]))
    return path


@pytest.fixture(scope="module")
def browser() -> "Iterator[sync_api.BrowserContext]":
    with sync_api.sync_playwright() as playwright, tempfile.TemporaryDirectory() as profile:
        context = playwright.chromium.launch_persistent_context(
            profile, executable_path=str(CHROMIUM), args=FLAGS, offline=True, timeout=MILLISECONDS
        )
        context.set_default_timeout(MILLISECONDS)
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
    page.locator(".bands a").nth(1).click()
    page.wait_for_url("**#set0-item0-1")
    page.get_by_role("link", name="next →").click()
    page.wait_for_url("**#set0-item1")
    page.close()


@pytest.fixture(scope="module")
def many_documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two pieces of each of twelve documents, as `interleave` puts them."""
    row = pieced_row([40] * 24, [*range(12), *range(12)])
    folder = save_rows(tmp_path_factory.mktemp("cip") / "rows", [row], cip={"pieces": 2})
    rows = Rows(find_data(folder), FoundTokenizer())
    path = folder / "look.html"
    path.write_text(render([(rows.summary(), [rows.item(0, Show())])]))
    return path


def painted(page: "sync_api.Page", selector: str) -> list[tuple[int, int, int]]:
    """The color at each element's upper edge, where no text is, as a screenshot of the whole page shows it."""
    places = page.locator(selector).evaluate_all(
        "all => all.map(one => { const b = one.getBoundingClientRect();"
        " return [b.left + b.width / 2 + scrollX, b.top + 3 + scrollY].map(Math.floor); })"
    )
    shot = base64.b64encode(page.screenshot(full_page=True)).decode()
    # The browser itself reads its picture, in a page whose policy allows that.
    reader = page.context.new_page()
    pixels = reader.evaluate(
        """async ([shot, places]) => {
            const image = new Image();
            image.src = "data:image/png;base64," + shot;
            await image.decode();
            const canvas = new OffscreenCanvas(image.width, image.height).getContext("2d");
            canvas.drawImage(image, 0, 0);
            return places.map(([x, y]) => Array.from(canvas.getImageData(x, y, 1, 1).data).slice(0, 3));
        }""",
        [shot, places],
    )
    reader.close()
    return [(red, green, blue) for red, green, blue in pixels]


def distance(one: tuple[int, int, int], other: tuple[int, int, int]) -> int:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 390])
def test_a_screenshot_shows_pieces_in_the_colors_of_their_documents(browser, many_documents, scheme, width):
    page = browser.new_page()
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(many_documents.as_uri())
    bands = painted(page, ".bands rect")
    backs = painted(page, ".part")

    for colors, apart in ((bands, 40), (backs, 3)):
        assert len(colors) == 24
        assert colors[:12] == colors[12:]
        pairs = [(one, other) for one in range(12) for other in range(one)]
        assert min(distance(colors[one], colors[other]) for one, other in pairs) >= apart
    assert page.locator(".doc").all_inner_texts() == [str(number + 1) for number in [*range(12), *range(12)]]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.close()


def test_a_screenshot_of_a_tangled_row_shows_colored_pieces_knots_and_masked_tokens(browser, page_file):
    page = browser.new_page()
    page.goto(page_file.as_uri())

    def style(selector: str, name: str) -> str:
        return page.locator(selector).first.evaluate(f"one => getComputedStyle(one).{name}")

    pieces = painted(page, "#set0-item0 .part")
    assert pieces[0] == pieces[2] != pieces[1], "two halves of a document around another one"
    knots = painted(page, "#set0-item0 .text .knot")
    assert len(knots) > 5
    assert all(distance(knot, piece) > 3 for knot in knots for piece in pieces)
    assert page.locator(".text .knot").first.is_visible()
    assert "<|knot:D|>" in page.locator(".text .knot").first.inner_text()
    assert style(".text .knot", "backgroundColor") not in (style(".part", "backgroundColor"), "rgba(0, 0, 0, 0)")
    assert (
        len(
            {
                style(selector, "color")
                for selector in (".text .knot", ".text .label", ".text .silent:not([class*=' '])", ".text")
            }
        )
        == 4
    )
    page.close()


def test_the_page_of_distances_shows_a_curve_for_each_set(browser, tmp_path):
    sets = []
    for name, docs in (("plain", [0, 0, 1, 1]), ("cip", [0, 1, 0, 1])):
        folder = save_rows(tmp_path / name, [pieced_row([40] * 4, docs)], cip={"pieces": 2})
        text = read_text(Rows(find_data(folder), FoundTokenizer()), name)
        sets.append(count_distances(text, doublings(text.reach), [64]))
    (tmp_path / "distances.html").write_text(render_distances(sets, [64]))
    for width, scheme in ((1200, "light"), (390, "dark")):
        page = browser.new_page()
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 900})
        page.goto((tmp_path / "distances.html").as_uri())
        curves = page.locator("svg.chart .line")
        assert curves.count() == 4  # two charts of two sets
        boxes = [curves.nth(number).bounding_box() for number in range(4)]
        assert all(box and box["width"] > 150 and box["height"] > 10 for box in boxes)
        colors = curves.evaluate_all("all => all.map(one => getComputedStyle(one).stroke)")
        assert len(set(colors[:2])) == 2
        assert page.get_by_role("rowheader", name="64 and more").first.is_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.close()
