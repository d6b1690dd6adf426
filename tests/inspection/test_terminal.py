"""What is printed."""

from io import StringIO

from unspool.core.console import PlainConsole
from unspool.inspection.items import Item, Part, Span
from unspool.inspection.terminal import print_item, styled


def printed(item: Item, *, full: bool = False, width: int = 80, colors: bool = False) -> str:
    out = StringIO()
    console = PlainConsole(file=out, width=width, force_terminal=colors)
    print_item(console, item, full=full)
    return out.getvalue()


def item_of(*parts: Part) -> Item:
    return Item(index=3, name="row 3", among="of 0–9", facts=["16 tokens"], parts=list(parts))


def part_of(*spans: Span, number: int = 1, count: int = 2) -> Part:
    return Part(title=f"document {number} of {count}", length=812, facts=["cut at the start"], spans=list(spans))


def test_every_document_has_its_border_line():
    shown = printed(item_of(part_of(Span("one", "text")), part_of(Span("two", "text"), number=2)))
    assert shown.splitlines() == [
        "",
        "━━ row 3 of 0–9 · 16 tokens",
        "",
        "── document 1 of 2 · 812 tokens · cut at the start ──",
        "one",
        "",
        "── document 2 of 2 · 812 tokens · cut at the start ──",
        "two",
    ]


def test_without_a_terminal_there_are_no_colors_and_with_one_silence_is_dim(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    item = item_of(part_of(Span("quiet ", "text", False), Span("loud", "text")))
    assert "\x1b" not in printed(item)
    assert "\x1b[2mquiet" in printed(item, colors=True)


def test_pieces_of_one_document_have_border_lines_of_one_color(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    parts = [Part(title=f"piece {number}", length=3, group=group) for number, group in enumerate([0, 1, 0, 12])]
    lines = [line for line in printed(item_of(*parts), colors=True).splitlines() if "piece" in line]
    colors = [line.partition("──")[0] for line in lines]
    assert colors[0] == colors[2] == colors[3] != colors[1]


def test_text_can_neither_control_the_terminal_nor_act_as_markup():
    shown = printed(item_of(part_of(Span("\x1b[2J[bold]x[/bold] :smile:\u202e", "text"))), colors=True)
    assert "␛[2J[bold]x[/bold] :smile:⟨U+202E⟩" in shown


def test_wide_characters_wrap_within_the_width():
    shown = printed(item_of(part_of(Span("日本語" * 20, "text"))), width=30)
    lines = [line for line in shown.splitlines() if "日" in line]
    assert len(lines) == 4
    assert max(map(len, lines)) == 15


def test_a_title_from_a_file_stays_on_one_line():
    part = Part(title="a\nb\x1b.jsonl:1", length=3, facts=["x"], spans=[])
    assert "── a↵b␛.jsonl:1 · 3 tokens · x ──" in printed(item_of(part))


def test_hidden_tokens_have_a_separate_line():
    spans = [Span("head", "text"), Span("1,234 tokens hidden", "hidden"), Span("tail", "text")]
    assert styled(spans).plain == "head\n… 1,234 tokens hidden …\ntail"


def test_tokens_are_shown_with_ids_and_borders():
    spans = [Span("the", "text", True, (12,)), Span("\\xe2", "text", True, (7,)), Span("", "text", True, (99,))]
    assert styled(spans).plain == "12⟨the⟩ 7⟨\\xe2⟩ 99"


def test_of_many_documents_those_in_the_middle_are_counted_unless_all_are_wanted():
    parts = [part_of(Span("text", "text"), number=number, count=30) for number in range(1, 31)]
    shown = printed(item_of(*parts))
    assert "── … 20 more, 16,240 tokens; show them with full … ──" in shown
    assert shown.count("document ") == 10
    assert printed(item_of(*parts), full=True).count("document ") == 30
