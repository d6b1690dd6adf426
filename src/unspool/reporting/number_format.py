"""How numbers and texts read on the page and in the terminal."""

import re

from unspool.core.sizes import format_size
from unspool.reporting.run_results import LOSS, Cell

MISSING = "–"
# Control and direction-changing characters would hide or reorder what a model wrote.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_DIRECTION = re.compile("[\u0080-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")

_SUITES = {
    "niah": "Needle recall",
    "key_value": "Key-value recall",
    LOSS: "Loss",
    "ruler": "RULER",
    "helmet": "HELMET",
    "lveval": "LV-Eval",
    "infbench": "∞Bench",
    "nocha": "Claims about books",
    "short": "Short tasks",
}


def suite_title(suite: str) -> str:
    name, colon, task = suite.partition(":")
    return _SUITES.get(name, name) + colon + task


def show_percent(value: float | None) -> str:
    """Whole percents, except where rounding would claim all or nothing."""
    if value is None:
        return MISSING
    rounded = f"{100 * value:.0f}%"
    return f"{100 * value:.1f}%" if rounded in ("0%", "100%") and value not in (0, 1) else rounded


def show_value(cell: Cell | None) -> str:
    if cell is None or cell.value is None:
        return MISSING
    return f"{cell.value:.2f}" if cell.suite == LOSS else show_percent(cell.value)


def show_interval(cell: Cell | None) -> str:
    """`±0.09` for a loss, `71–93` (percent) for a recall, nothing where there is no interval."""
    if cell is None or cell.value is None or cell.low is None or cell.high is None:
        return ""
    if cell.suite == LOSS:
        return f"±{(cell.high - cell.low) / 2:.2f}"
    return f"{100 * cell.low:.0f}–{100 * cell.high:.0f}"


def show_full(cell: Cell | None) -> str:
    """Value and interval, for a sentence: `84% (71–93)`, `3.70 ±0.09`."""
    interval = show_interval(cell)
    if cell is None or not interval:
        return show_value(cell)
    return f"{show_value(cell)} {interval}" if cell.suite == LOSS else f"{show_value(cell)} ({interval})"


def show_n(cell: Cell) -> str:
    return f"n = {cell.n:,} tokens" if cell.suite == LOSS else f"n = {cell.n:,}"


def show_gain(value: float | None, *, is_loss: bool) -> str:
    """A difference with its sign: `+12`, in points of percent; `−0.05`, in nats."""
    if value is None:
        return MISSING
    if value == 0:
        return "0"
    # Whole points, except where rounding would claim that there is no difference.
    shown = f"{value:+.3f}" if is_loss else f"{100 * value:+.{1 if abs(value) < 0.005 else 0}f}"
    return shown.replace("-", "−")


def show_gain_range(low: float | None, high: float | None, *, is_loss: bool) -> str:
    if low is None or high is None:
        return ""
    return f"{show_gain(low, is_loss=is_loss)} to {show_gain(high, is_loss=is_loss)}"


def show_small(value: float) -> str:
    """`2.5e-4` rather than `0.00025`."""
    if value == 0:
        return "0"
    digits, exponent = f"{value:.1e}".split("e")
    return f"{digits.removesuffix('.0')}e{int(exponent)}"


def show_span(start: int, stop: int) -> str:
    return f"{format_size(start)}–{format_size(stop)}"


def show_duration(seconds: float) -> str:
    if seconds < 59.95:  # what rounds to 60.0 is a minute
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def show_bytes(size: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def listing(parts: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]])) if parts else ""


def inside_sentence(title: str) -> str:
    """`needle recall at 2K`, but `RULER at 64K`."""
    is_name = len(title) > 1 and title[1].isupper()
    return title if is_name else title[:1].lower() + title[1:]


def unbroken(line: str) -> str:
    """Keep `1K–2K`, `n = 40` and `3.70 ±0.09` each on one line when a page wraps."""
    joined = line.replace("–", "\u2060–\u2060").replace(" = ", "\u00a0=\u00a0").replace(" ±", "\u00a0±")
    return joined.replace("→ ", "→\u00a0")


def visible(text: str, limit: int = 240) -> str:
    """Text of models and data as something a page can show: clipped, with nothing that hides or moves other text."""
    text = text.strip()
    shown = plain_text(text[:limit])
    return f"{shown}… (+{len(text) - limit:,} characters)" if len(text) > limit else shown


def clipped(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def plain_text(text: str) -> str:
    """Control and direction-changing characters made visible; line breaks and tabs stay."""
    shown = _CONTROL.sub(lambda found: chr(0x2400 + ord(found[0])) if found[0] != "\x7f" else "\u2421", text)
    return _DIRECTION.sub("\ufffd", shown)
