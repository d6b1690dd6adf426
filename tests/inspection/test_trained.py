"""With a loss mask, every view marks the trained tokens, also without colors."""

import io

import pytest

from unspool.core.console import PlainConsole
from unspool.inspection.items import Item, Part, Span, Summary, item_values
from unspool.inspection.terminal import print_item
from unspool.inspection.viewer_page import render

SPANS = [
    Span("user: why?\n", "text", loss=False),
    Span("because", "text"),
    Span("<|end|>", "control"),
    Span("9 tokens hidden", "hidden"),
    Span("of it", "text"),
]


def item(trained: int | None) -> Item:
    part = Part(title="document 1 of 1", length=20, spans=SPANS, trained=trained)
    return Item(index=0, name="row 0", among="", facts=[], parts=[part])


def printed(trained: int | None) -> str:
    out = io.StringIO()
    print_item(PlainConsole(file=out, width=80), item(trained), full=True)
    return out.getvalue()


def page(tmp_path, trained: int | None) -> str:
    summary = Summary(path=tmp_path, kind="rows", headline="1 row", facts=[], part="document")
    return render([(summary, [item(trained)])])


def test_the_terminal_puts_brackets_around_what_is_trained_on():
    shown = printed(3)
    assert "⟦because<|end|>⟧" in shown and "⟦of it⟧" in shown
    assert "⟦…⟧ is trained on" in shown
    assert "⟦" not in printed(None)


def test_the_page_marks_what_is_trained_on(tmp_path):
    shown = page(tmp_path, 3)
    assert '<mark class="trained">because<span class="control">&lt;|end|&gt;</span></mark>' in shown
    assert '<mark class="trained">of it</mark>' in shown and "trained on</li>" in shown
    assert "<mark" not in page(tmp_path, None)


@pytest.mark.parametrize("trained", [3, None])
def test_json_counts_it(trained):
    (part,) = item_values(item(trained))["parts"]
    assert part["trained"] == trained
    assert [span["loss"] for span in part["spans"]] == [False, True, True, True, True]
