"""HARPE: a RoPE base per head (arXiv 2412.07171), with three ways to choose the bases and a control.

Query heads that share a KV head must share its base, because keys are rotated once. So there are as many bases as KV
heads. The paper does not specify its search completely; `search_bases` documents our choices.
"""

from typing import ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from unspool.core.errors import ConfigError
from unspool.core.sizes import Size
from unspool.rope.tables import RopeMethod, RopeSettings, RopeShape, format_base, one_base, plain_frequencies

# Table 2 of the paper, in units of 10,000: head 1 to head 32.
PRINTED = (
    *(100, 115, 130, 145, 217, 220, 223, 247, 250, 265, 268, 271, 274, 280, 283, 292),
    *(301, 304, 310, 313, 316, 322, 343, 346, 361, 388, 409, 415, 439, 445, 451, 454),
)
# Value in the code of the method that the paper cites.
NUM_EXTREMA = 6
MAX_POINTS = 8192
# The paper's range is 1M to 5M; its upper end is the base of a stage with a single base.
SUGGESTED_RATIO = 5.0


class HARPE(RopeMethod):
    """A base per KV head.

    By default bases are evenly spaced and descending: in the paper's ablation, this scores higher than ascending (85.3
    against 84.3), and it needs no search.

    Example:
        >>> import unspool
        >>> model, tokenizer = unspool.load("asset:tiny-base")
        >>> model = unspool.extend(model, "2K", rope=unspool.HARPE(low=4e3, high=2e4))
        >>> model.config.head_bases[0], model.config.head_bases[-1]
        (20000.0, 4000.0)
    """

    method: Literal["harpe"] = "harpe"
    needs_weights: ClassVar[bool] = True

    bases: Literal["uniform", "printed", "search"] = Field(
        default="uniform",
        description="Choice of bases: `uniform` spaces them evenly from `low` to `high`, `printed` takes the "
        "paper's list for 32 KV heads, `search` runs the paper's search.",
    )
    low: float | None = Field(
        default=None,
        gt=1,
        description="Smallest RoPE base. Required, except with `bases: printed`, which does not accept it.",
    )
    high: float | None = Field(
        default=None,
        gt=1,
        description="Largest RoPE base. Required, except with `bases: printed`, which does not accept it.",
    )
    order: Literal["descending", "ascending"] | None = Field(
        default=None,
        description="Order of the bases from the first head to the last. Default: `descending` with `bases: uniform`, "
        "otherwise `ascending`.",
    )
    step: Size = Field(
        default=30_000, description="Distance between candidate bases in the search. Used only with `bases: search`."
    )
    rotate_by_layer: bool = Field(
        default=False, description="Shift the bases by one KV head from each layer to the next."
    )
    shared: bool = Field(
        default=False, description="Use one base for all heads: the mean of the set. This is the control arm for HARPE."
    )

    @model_validator(mode="after")
    def _range(self) -> "HARPE":
        if self.bases == "printed":
            if self.low is not None or self.high is not None:
                raise ValueError("bases printed is a fixed list; remove low and high")
        elif self.low is None or self.high is None:
            raise ValueError(f"bases {self.bases} needs low and high, such as low: 1e6, high: 5e6")
        elif self.low > self.high:
            raise ValueError(f"low {self.low:g} exceeds high {self.high:g}; it must be at most high")
        if self.shared and self.rotate_by_layer:
            raise ValueError("rotate_by_layer has no effect with shared, where all heads have one base; remove it")
        return self

    def resolve(self, rope: RopeShape, context_len: int) -> RopeSettings:
        bases = self.head_bases(rope, context_len)
        max_positions = max(context_len, rope.max_positions)
        if self.shared:
            return RopeSettings(parameters=one_base(bases.mean()), max_positions=max_positions)
        return RopeSettings(head_bases=bases, rotate_by_layer=self.rotate_by_layer, max_positions=max_positions)

    @classmethod
    def suggest(cls, rope: RopeShape, context_len: int, base: float) -> Self | None:
        if rope.num_kv_heads == 1:
            return None
        return cls(method="harpe", low=float(format_base(base / SUGGESTED_RATIO)), high=base)

    def head_bases(self, rope: RopeShape, context_len: int) -> np.ndarray:
        """Return the base of each KV head."""
        count = rope.num_kv_heads
        if count == 1 and not self.shared:
            raise ConfigError("rope harpe: this model has a single KV head, so only one base; use method abf.")
        if self.bases == "printed":
            chosen = _printed(count)
        else:
            assert self.low is not None and self.high is not None
            chosen = (
                np.linspace(self.low, self.high, count)
                if self.bases == "uniform"
                else search_bases(self.low, self.high, self.step, count, rope.rotary_dim, context_len)
            )
        order = self.order or ("descending" if self.bases == "uniform" else "ascending")
        return chosen if order == "ascending" else chosen[::-1].copy()


def _printed(count: int) -> np.ndarray:
    if count != len(PRINTED):
        raise ConfigError(
            f"rope harpe: bases printed is the paper's list for {len(PRINTED)} KV heads, but this model has "
            f"{count}; use bases uniform with low 1e6 and high 5e6, the range of that list's search."
        )
    return np.array(PRINTED) * 1e4


def search_bases(low: float, high: float, step: float, count: int, rotary_dim: int, context_len: int) -> np.ndarray:
    """Choose ascending bases greedily, so that the peaks of each are near the valleys of those chosen before.

    From the paper: start with `low`. The distance of a candidate is the distance of its peaks from the valleys
    collected so far, plus the distance of its valleys from the peaks collected so far. Add the nearest candidate,
    collect its extrema, repeat. Our choices, which the paper does not specify: the waveform is Σ cos(m·θ_i), as in the
    method that it cites. m runs over the context, at up to 8,192 positions. The highest and the lowest point of each of
    six equal parts are a peak and a valley, so all bases have equally many. The distance of a peak is that to the
    nearest valley.
    """
    candidates = low + step * np.arange(1, int((high - low) / step) + 1)
    if len(candidates) + 1 < count:
        raise ConfigError(
            f"rope harpe: {len(candidates) + 1} bases from {low:g} to {high:g} in steps of {step:g} are too few "
            f"for {count} KV heads; give a smaller step or a wider range."
        )
    positions = np.unique(np.linspace(0, context_len - 1, min(context_len, MAX_POINTS)).round())
    extrema = [_extrema(base, rotary_dim, positions) for base in (low, *candidates)]
    chosen, left = [low], list(range(len(candidates)))
    peaks, valleys = extrema[0]
    while len(chosen) < count:
        distances = [_distance(extrema[n + 1][0], valleys) + _distance(extrema[n + 1][1], peaks) for n in left]
        best = left.pop(int(np.argmin(distances)))
        chosen.append(float(candidates[best]))
        peaks = np.union1d(peaks, extrema[best + 1][0])
        valleys = np.union1d(valleys, extrema[best + 1][1])
    return np.sort(np.array(chosen))


def _extrema(base: float, rotary_dim: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    wave = np.cos(positions[:, None] * plain_frequencies(base, rotary_dim)).sum(axis=1)
    parts = [part for part in np.array_split(np.arange(len(positions)), NUM_EXTREMA) if len(part)]
    peaks = np.array([positions[part[wave[part].argmax()]] for part in parts])
    valleys = np.array([positions[part[wave[part].argmin()]] for part in parts])
    return peaks, valleys


def _distance(points: np.ndarray, others: np.ndarray) -> float:
    """Sum the distances of all points to the nearest point of the other set."""
    return float(np.abs(points[:, None] - others[None]).min(axis=1).sum())
