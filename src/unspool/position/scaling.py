"""Position methods, one class each: from a model's rotary shape to its new frequencies.

Out: `inv_freq` of shape [1, d/2] where all heads share a base, [KV heads, d/2] where each
has its own. Frequencies are computed in float64 and rounded to float32 once, at the end.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, model_validator

from unspool.base.config import Config
from unspool.base.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RopeShape:
    """What a position method needs to know of a model."""

    rotary_dim: int
    num_kv_heads: int
    base: float


def frequencies(bases: np.ndarray, rotary_dim: int) -> np.ndarray:
    """base^(−2i/d) for i < d/2, one line per base."""
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim
    table: np.ndarray = np.asarray(bases, dtype=np.float64)[:, None] ** -exponents[None, :]
    return table.astype(np.float32)


class Unchanged(Config):
    """The model's own positions: continued training (CT), or training from scratch."""

    method: Literal["unchanged"] = "unchanged"

    def bases(self, rope: RopeShape) -> np.ndarray:
        return np.array([rope.base])


class Abf(Config):
    """Adjusted base frequency: one larger base for every head (Xiong et al.; ProLong)."""

    method: Literal["abf"]
    base: float = Field(gt=1)

    def bases(self, rope: RopeShape) -> np.ndarray:
        return np.array([self.base])


class Harpe(Config):
    """HARPE: a base per head, spread evenly from `low` to `high`.

    Query heads that share a KV head must share its base, because keys are rotated once; so there
    are as many bases as KV heads. Descending is the default: the paper's ablation has it ahead of
    ascending (85.3 against 84.3), and neither needs the search that its text cannot reproduce.
    """

    method: Literal["harpe"]
    low: float = Field(gt=1)
    high: float = Field(gt=1)
    order: Literal["descending", "ascending"] = "descending"

    @model_validator(mode="after")
    def _range(self) -> "Harpe":
        if self.low > self.high:
            raise ValueError(f"low must not exceed high, here {self.low:g} and {self.high:g}")
        return self

    def bases(self, rope: RopeShape) -> np.ndarray:
        if rope.num_kv_heads == 1:
            raise ConfigError("position harpe: this model has a single KV head, so only one base; use method abf.")
        spread = np.linspace(self.low, self.high, rope.num_kv_heads)
        return spread if self.order == "ascending" else spread[::-1].copy()


Position = Annotated[Unchanged | Abf | Harpe, Field(discriminator="method")]
