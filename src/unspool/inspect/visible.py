"""Text as something a terminal or a page can show: nothing invisible, nothing that moves other text about."""

import re

NEWLINE = "↵"
SPACE = "␣"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_TAB = "⇥   "
# C1 controls, line separators, zero-width spaces, marks that turn the direction of writing, and tags, which spell
# text that nobody sees. Joiners stay: words of Persian, Hindi and many emoji need them.
_UNSEEN = re.compile(
    "[\u0080-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)


def visible(text: str) -> str:
    """Line breaks stay; tabs and other control characters get a sign, what cannot be seen its number."""
    text = text.replace("\t", _TAB)
    text = _CONTROL.sub(lambda found: "\u2421" if found[0] == "\x7f" else chr(0x2400 + ord(found[0])), text)
    return _UNSEEN.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", text)


def one_line(text: str) -> str:
    return visible(text).replace("\n", NEWLINE)


def raw_bytes(data: bytes) -> str:
    r"""Bytes that are no text of their own: `\xe2\x80`."""
    return "".join(f"\\x{byte:02x}" for byte in data)
