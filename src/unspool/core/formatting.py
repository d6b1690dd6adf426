"""Format numbers, lists and untrusted text for pages, tables and the terminal."""

import re
from collections.abc import Sequence
from typing import Any

MISSING = "–"
NEWLINE = "↵"
_TAB = "⇥   "
# Characters that are replaced: control characters except tabs and line breaks; C1 controls; line separators; zero-width
# spaces; marks that change the writing direction; tags, which spell invisible text; unpaired surrogates, which no
# encoding has. Joiners are kept, because words of Persian and Hindi and many emoji need them.
UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f\ud800-\udfff]"
)


def printable(text: str) -> str:
    """Replace control characters with signs and invisible ones with their code points; keep newlines and tabs."""
    return UNPRINTABLE.sub(lambda found: _sign(found[0]), text)


def _sign(character: str) -> str:
    code = ord(character)
    return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else f"⟨U+{code:04X}⟩"


def visible(text: str) -> str:
    """Replace tabs as well as the characters of `printable`; keep line breaks."""
    return printable(text.replace("\t", _TAB))


def one_line(text: str) -> str:
    return visible(text).replace("\n", NEWLINE)


def excerpt(text: str, limit: int = 240) -> str:
    """Return the beginning of an untrusted text, printable, with the number of omitted characters."""
    text = text.strip()
    shown = printable(text[:limit])
    return f"{shown}… (+{len(text) - limit:,} characters)" if len(text) > limit else shown


def clip(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def join_words(parts: Sequence[str]) -> str:
    """Join as `a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]])) if parts else ""


def format_percent(value: float | None) -> str:
    """Format as whole percents, with a digit where rounding would give 0% or 100%."""
    if value is None:
        return MISSING
    rounded = f"{100 * value:.0f}%"
    return f"{100 * value:.1f}%" if rounded in ("0%", "100%") and value not in (0, 1) else rounded


def format_share(share: float | None, *, two_digits_below: float = 0.01) -> str:
    """Format as percents with one or two decimals; a share above 0 never becomes 0."""
    if share is None:
        return MISSING
    if 0 < share < 0.0001:
        return "<0.01%"
    return f"{100 * share:.1f}%" if share >= two_digits_below or not share else f"{100 * share:.2f}%"


def format_signed(value: float, digits: int) -> str:
    """Format a difference with its sign, `+12` or `−0.05`, with a real minus sign."""
    return f"{value:+.{digits}f}".replace("-", "−")


def format_exponent(value: float) -> str:
    """Format `2.5e-4` rather than `0.00025`."""
    if value == 0:
        return "0"
    digits, exponent = f"{value:.1e}".split("e")
    return f"{digits.removesuffix('.0')}e{int(exponent)}"


def format_duration(seconds: float) -> str:
    if seconds < 59.95:  # 59.95 and above would round to 60.0 s
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def format_bytes(size: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def format_manifest_count(value: Any, name: str = "") -> str:
    """Format an entry of `counts`: `{"tail": 12, "short": 3}` becomes `tail 12, short 3`, a list its length."""
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{excerpt(str(key))} {format_manifest_count(part)}" for key, part in value.items()) or "none"
    if isinstance(value, list):
        return f"{len(value)}"
    if name.endswith("_rate") and isinstance(value, int | float):
        return format_percent(value)
    if isinstance(value, float):
        return f"{value:,.4g}"
    return f"{value:,}" if isinstance(value, int) else excerpt(str(value))
