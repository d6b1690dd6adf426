"""Parse and format sizes such as `64K`, `20B` and `8e6`.

K, M, B and T are powers of 1024, as in ProLong, so that `64K` is 65,536 tokens.
"""

import re
from typing import Annotated, Any

from pydantic import BeforeValidator

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "B": 1 << 30, "T": 1 << 40}
LARGEST = 1 << 53
_SIZE = re.compile(r"([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)")


def parse_size(value: Any) -> int:
    """Parse a size: `'64K'` → 65536, `'8e6'` → 8000000, 12 → 12; ValueError if it is not a size."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("write a size such as 64K, 20B, 8e6 or 4096")
    match = _SIZE.fullmatch(str(value).strip().replace("_", ""))
    if not match:
        raise ValueError("write a size such as 64K, 20B, 8e6 or 4096")
    number, unit = match.groups()
    if unit.upper() not in UNITS:
        raise ValueError(f"unit {unit!r} is not known; units are K, M, B and T (powers of 1024)")
    size = float(number) * UNITS[unit.upper()]
    # Above this limit a float cannot represent every whole number.
    if not 1 <= size <= LARGEST:
        raise ValueError(f"a size must be between 1 and {format_size(LARGEST)}")
    if size != int(size):
        raise ValueError(f"{value} is not a whole number")
    return int(size)


def format_size(size: int) -> str:
    """Format a size exactly, as short as possible: 65536 → `64K`, 1000 → `1000`."""
    for unit, factor in reversed(UNITS.items()):
        if unit and size >= factor and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


def format_count(count: float) -> str:
    """Format a count rounded to three digits, in powers of ten: 15_230_000 → `15.2M`."""
    for unit, factor in (("", 1.0), ("K", 1e3), ("M", 1e6), ("B", 1e9), ("T", 1e12)):
        rounded = f"{count / factor:.3g}"
        # Rounding can reach the next unit: 999_999 is `1M`, not `1000K`.
        if float(rounded) < 1000:
            return rounded + unit
    return f"{count / 1e12:.0f}T"


Size = Annotated[int, BeforeValidator(parse_size, json_schema_input_type=int | float | str)]
