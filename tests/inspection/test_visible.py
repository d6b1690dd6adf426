"""Nothing that is shown can hide, move or command."""

import pytest

from unspool.core.formatting import one_line, visible
from unspool.inspection.items import raw_bytes


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\nlines", "plain\nlines"),
        ("a\tb", "a⇥   b"),
        ("\x1b[31m\x00\r\x7f", "␛[31m␀␍␡"),
        ("\x9b31m\x85", "⟨U+009B⟩31m⟨U+0085⟩"),
        ("\u202eevil\u2066", "⟨U+202E⟩evil⟨U+2066⟩"),
        ("zero\u200bwidth\ufeff", "zero⟨U+200B⟩width⟨U+FEFF⟩"),
        ("hidden\U000e0041", "hidden⟨U+E0041⟩"),
        ("שלום 日本 👩‍👧 e\u0301", "שלום 日本 👩‍👧 e\u0301"),
    ],
)
def test_what_cannot_be_seen_gets_a_sign_and_the_rest_stays(text, shown):
    assert visible(text) == shown


def test_one_line_is_one_line():
    assert one_line("a\nb\r\n\u2028c") == "a↵b␍↵⟨U+2028⟩c"


def test_bytes_are_spelled():
    assert raw_bytes(b"\xe2\x80") == "\\xe2\\x80"
