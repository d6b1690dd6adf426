"""The page of attention maps in a real browser: pictures are shown, nothing scrolls sideways, nothing is fetched."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from unspool.inspection.attention.input_text import Text
from unspool.inspection.attention.map_page import render_attention
from unspool.inspection.attention.maps import render_figure
from unspool.inspection.attention.measure import Attention, AttentionSettings, HeadStats, ModelRef

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
MILLISECONDS = 300_000  # per command; a busy machine starts the browser slowly
pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason=f"{CHROMIUM} is not installed (apt install chromium)")

LENGTH, CELL = 2000, 16
UNBROKEN = "<b>" + "x" * 300


@pytest.fixture(scope="module")
def browser() -> "Iterator[sync_api.BrowserContext]":
    with sync_api.sync_playwright() as playwright, tempfile.TemporaryDirectory() as profile:
        context = playwright.chromium.launch_persistent_context(
            profile, executable_path=str(CHROMIUM), args=FLAGS, offline=True, timeout=MILLISECONDS
        )
        context.set_default_timeout(MILLISECONDS)
        yield context
        context.close()


def made_up(names: tuple[str, ...]) -> Attention:
    """Maps by chance, which only have to be drawn."""
    rng = np.random.default_rng(0)
    cells = -(-LENGTH // CELL)
    heads = ((3, 1), (0, 2))
    seen = [
        HeadStats(
            far=rng.random((4, 8)).tolist(),
            same=rng.random((4, 8)).tolist(),
            first=rng.random((4, 8)).tolist(),
            maps={head: np.tril(rng.random((cells, cells)) ** 6).astype(np.float32) for head in heads},
        )
        for _ in names
    ]
    text = Text(
        tokens=np.zeros(LENGTH, dtype=np.uint32),
        piece_lens=(600, 900, 500),
        chunk_ids=(0, 1, 0),
        doc_names=(UNBROKEN, "second.txt"),
        origin=UNBROKEN,
        notes=[UNBROKEN],
    )
    values = {"num_hidden_layers": 4, "num_attention_heads": 8, "max_position_embeddings": 1024}
    return Attention(
        text=text,
        settings=AttentionSettings(attention="full", beyond=1000, first=4, cell=CELL),
        block=16,
        models=[ModelRef(name=name, ref=f"models/{name}", values=values) for name in names],
        stats=seen,
        named=False,
    )


@pytest.mark.parametrize("names", [("base",), ("base", UNBROKEN)])
@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (390, "dark")])
def test_the_page_is_quiet_shows_its_maps_and_fits_its_window(browser, tmp_path, names, width, scheme):
    path = tmp_path / "maps.html"
    path.write_text(render_attention(made_up(names)))
    page = browser.new_page()
    events: list[str] = []
    page.on("console", lambda message: events.append(message.text))
    page.on("request", lambda request: events.append(request.url))
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(path.as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")

    assert [event for event in events if event != path.as_uri() and not event.startswith("data:")] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    maps = page.locator("svg.map")
    assert maps.count() == 2 * (1 if len(names) == 1 else 3)
    boxes = [maps.nth(at).bounding_box() for at in range(maps.count())]
    assert all(box and box["width"] >= 250 for box in boxes)
    # The browser has decoded each picture, and has words for it.
    sizes = page.evaluate(
        "Promise.all([...document.querySelectorAll('svg.map image')].map(async one => {"
        " const image = new Image(); image.src = one.getAttribute('href');"
        " await image.decode(); return image.width; }))"
    )
    assert sizes == [125] * maps.count()
    assert all(maps.nth(at).get_attribute("aria-label") for at in range(maps.count()))
    page.close()


def test_the_figure_opens_by_itself(browser, tmp_path):
    (tmp_path / "maps.svg").write_text(render_figure(made_up(("base", "extended"))))
    page = browser.new_page()
    page.goto((tmp_path / "maps.svg").as_uri())
    assert page.evaluate("document.documentElement.tagName") == "svg"
    assert page.evaluate("document.querySelectorAll('image').length") == 8
    page.close()
