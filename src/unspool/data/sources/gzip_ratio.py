"""Filter documents by how well gzip compresses them.

A document's ratio is the number of its UTF-8 bytes divided by the bytes that zlib needs at level 6. Repetitive text
(tables of contents, forms, boilerplate) has a high ratio; noise (OCR errors, random strings) has a low one. Olmo 3
drops the 20% of its long PDFs with the highest and the 20% with the lowest ratios.
"""

import math
import zlib
from typing import NamedTuple

import numpy as np
from pydantic import Field, model_validator

from unspool.core.config import Config

# zlib's default, also of the command `gzip`.
LEVEL = 6
TOO_LOW, TOO_HIGH = "gzip_ratio_low", "gzip_ratio_high"


class Bounds(NamedTuple):
    """Documents with a ratio from `low` to `high` are kept, including both."""

    low: float
    high: float

    def reason_to_drop(self, ratio: float) -> str | None:
        if ratio < self.low:
            return TOO_LOW
        return TOO_HIGH if ratio > self.high else None

    def describe(self) -> str:
        if self.high == math.inf:
            return f"of at least {self.low:.3g}"
        return f"of at most {self.high:.3g}" if not self.low else f"from {self.low:.3g} to {self.high:.3g}"


class GzipRatio(Config):
    """Keep documents whose gzip ratio lies in the middle of the source, or between two bounds."""

    middle: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Share of documents to keep, those with the middle ratios: 0.6 drops the fifth with the lowest and "
        "the fifth with the highest ratios. The source is read twice.",
    )
    min: float | None = Field(None, gt=0, description="Smallest ratio to keep. Not with `middle`.")
    max: float | None = Field(None, gt=0, description="Largest ratio to keep. Not with `middle`.")

    @model_validator(mode="after")
    def _check_bounds(self) -> "GzipRatio":
        bounded = self.min is not None or self.max is not None
        if bounded == (self.middle is not None):
            raise ValueError("set either middle, such as {middle: 0.6}, or min and max, such as {min: 1.5, max: 4}")
        if self.min is not None and self.max is not None and self.min >= self.max:
            raise ValueError(f"min {self.min:g} must be below max {self.max:g}")
        return self

    @property
    def given_bounds(self) -> Bounds | None:
        """Return the bounds; None if they depend on the ratios of all documents."""
        if self.middle is not None:
            return None
        return Bounds(0.0 if self.min is None else self.min, math.inf if self.max is None else self.max)


def gzip_ratio(text: str) -> float:
    """Return the bytes of a text ÷ its compressed bytes; about 0.1 for a single character."""
    data = text.encode("utf-8", "surrogatepass")
    return len(data) / len(zlib.compress(data, LEVEL))


def middle_bounds(ratios: np.ndarray, middle: float) -> Bounds:
    """Return bounds that drop (1 − `middle`) / 2 of the documents at either end, rounded down.

    Documents whose ratio equals a bound are kept, so the result does not depend on the order of documents.
    """
    if not len(ratios):
        return Bounds(0.0, math.inf)
    ends = math.floor(len(ratios) * (1 - middle) / 2 + 1e-9)
    in_order = np.sort(ratios)
    return Bounds(float(in_order[ends]), float(in_order[len(ratios) - 1 - ends]))
