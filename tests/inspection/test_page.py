"""The page: complete, escaped, folded, and quiet."""

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from inspection_factory import save_run
from unspool.inspection.detokenize import find_tokenizer
from unspool.inspection.input_documents import Corpus
from unspool.inspection.items import Item, Part, Show, Span, Summary
from unspool.inspection.packed_rows import Rows
from unspool.inspection.run_paths import find_data
from unspool.inspection.viewer_page import COLORS, fold, length_chart, render, render_page

SCRIPT = "<script>document.title = 'x'</script>"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_run(tmp_path_factory.mktemp("runs") / "small")


def opened(run_dir: Path, box: str) -> Rows | Corpus:
    place = find_data(run_dir / box)
    found_tokenizer = find_tokenizer(place, None, lambda name: str(run_dir / name))
    return Rows(place, found_tokenizer) if place.kind == "dataset" else Corpus(place, found_tokenizer)


def page_with(*spans: Span, title: str = "document 1 of 1", name: str = "row 0") -> str:
    summary = Summary(path=Path("runs/x"), kind="rows", headline="1 row", facts=[("sources", SCRIPT)], notes=[SCRIPT])
    part = Part(title=title, length=3, facts=[SCRIPT], spans=list(spans))
    return render([(summary, [Item(index=0, name=name, among="", facts=[SCRIPT], parts=[part, part])])])


class _Reader(HTMLParser):
    """Collect tags, anchors, links and unclosed tags."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        if tag not in ("meta", "link"):
            self.open.append(tag)
        self.ids += [given["id"] or ""] if "id" in given else []
        self.links += [given["href"] or ""] if tag == "a" else []

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(page: str) -> _Reader:
    reader = _Reader()
    reader.feed(page)
    assert reader.open == []
    return reader


@pytest.mark.parametrize("box", ["datasets/short", "datasets/tangled", "corpus/books"])
@pytest.mark.parametrize("tokens", [False, True])
def test_every_link_leads_to_an_anchor_and_every_tag_is_closed(box, tokens, run_dir):
    collection = opened(run_dir, box)
    reader = parsed(render_page([(collection, list(range(len(collection))))], tokens=tokens, full=False))
    assert len(reader.ids) == len(set(reader.ids))
    assert reader.links
    assert {link.removeprefix("#") for link in reader.links} <= set(reader.ids)


def test_nothing_from_a_file_becomes_markup():
    page = page_with(Span(SCRIPT, "text"), Span(SCRIPT, "knot", False, (3,)), title=SCRIPT, name=SCRIPT)
    assert "script" not in parsed(page).tags
    assert page.count("&lt;script&gt;") >= 7


def test_the_page_loads_nothing_and_forbids_scripts():
    page = page_with(Span("text", "text"))
    assert "default-src 'none'" in page
    assert not re.search(r"(?:src|href)=\"(?!#|data:,)", page)


def test_directions_and_controls_are_made_visible():
    page = page_with(Span("\u202eevil\x1b", "text"))
    assert "⟨U+202E⟩evil␛" in page
    assert "\u202e" not in page


def test_parts_of_one_document_have_one_color_and_bands_to_scale(run_dir):
    rows = opened(run_dir, "datasets/tangled")
    page = render([(rows.summary(), [rows.item(0, Show())])])
    assert re.findall(r'class="part (c\d)"', page) == ["c0", "c1", "c0"]
    bands = re.findall(r'<rect class="(c\d)" x="([\d.]+)"', page)
    assert [color for color, _ in bands] == ["c0", "c1", "c0"]
    starts = [float(x) / 1000 * sum(part.length for part in rows.item(0, Show()).parts) for _, x in bands]
    assert np.allclose(starts, [part.start for part in rows.item(0, Show()).parts], atol=0.01)


def test_color_is_not_all_that_tells_documents_apart(run_dir):
    rows = opened(run_dir, "datasets/tangled")
    page = render([(rows.summary(), [rows.item(0, Show())])])
    assert re.findall(r'<b class="doc" title="document (\d+)">', page) == ["1", "2", "1"]
    assert re.findall(r'<b style="left:[\d.]+%">(\d*)</b>', page) == ["1", "2", "1"]


def test_further_documents_start_over_with_the_colors_and_the_sheet_has_them_all():
    parts = [Part(title=f"piece {group}", length=3, group=group) for group in range(COLORS + 1)]
    summary = Summary(path=Path("x"), kind="rows", headline="1 row", facts=[])
    page = render([(summary, [Item(index=0, name="row 0", among="", facts=[], parts=parts)])])
    shown = re.findall(r'class="part (c\d+)"', page)
    assert shown == [*(f"c{group}" for group in range(COLORS)), "c0"]
    assert all(page.count(f"--{color}: #") == 2 and f".{color} {{" in page for color in shown)


def test_several_sets_share_a_page_and_no_anchor(run_dir):
    sets = [(opened(run_dir, box), [0]) for box in ("datasets/short", "datasets/tangled")]
    reader = parsed(render_page(sets, tokens=False, full=False))
    assert len(reader.ids) == len(set(reader.ids))
    assert {link.removeprefix("#") for link in reader.links} <= set(reader.ids)
    assert reader.tags.count("h1") == 2


def test_a_row_with_a_loss_mask_marks_what_has_no_loss(run_dir):
    rows = opened(run_dir, "datasets/tangled")
    page = render([(rows.summary(), [rows.item(0, Show())])])
    assert '<span class="knot silent">&lt;|knot:D|&gt;</span><span class="label silent">Ab12Cd</span>' in page


def test_long_text_is_folded_after_some_lines_and_nothing_is_lost():
    spans = [Span("the old mill\n" * 40, "text"), Span("<|end|>", "control")]
    shown, folded = fold(spans)
    assert "".join(span.text for span in shown) == "the old mill\n" * 10
    assert "".join(span.text for span in [*shown, *folded]) == "".join(span.text for span in spans)


@pytest.mark.parametrize("text", ["x" * 5000, "word " * 1000, "a\n" * 2000, "日本" * 900])
def test_folding_keeps_every_character(text):
    spans = [Span("start ", "knot"), Span(text, "text"), Span("end", "control")]
    shown, folded = fold(spans)
    assert folded
    assert "".join(span.text for span in [*shown, *folded]) == f"start {text}end"


def test_short_text_is_not_folded():
    spans = [Span("a few words\n" * 3, "text"), Span("<|end|>", "control")]
    assert fold(spans) == (spans, [])


def test_the_chart_gives_both_shares_of_every_bin():
    lengths = {"at_least": [4, 8, 16], "documents": [3, 0, 1], "tokens": [12, 0, 20]}
    chart = length_chart(lengths)
    heights = [float(height) for height in re.findall(r'class="bar-\w+"[^>]* height="([\d.]+)"', chart)]
    assert len(heights) == 6
    assert heights[0] == max(heights)
    assert heights[2:4] == [0, 0]
    assert "16 to 32 tokens: 1 documents, 20 tokens" in chart


def test_no_documents_give_no_chart():
    assert length_chart({"at_least": [], "documents": [], "tokens": []}) == ""
