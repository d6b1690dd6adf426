"""What can be said before training about extending one model to one context: bounds, settings, curves.

In: a model's config as a plain dict, a context length. Out: `Advice`, which the terminal, the page and JSON show.
Promise: every base and factor that is suggested is what a recipe with the line beside it would use.
Elsewhere: the bound (bound.py), what published recipes used (published.py), the page (page.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from unspool.core.errors import ConfigError
from unspool.core.sizes import format_size
from unspool.rope.bound import bound, curve, first_negative
from unspool.rope.harpe import Harpe
from unspool.rope.methods import Abf, Dynamic, Llama3, Ntk, NtkByParts, Pi, Yarn
from unspool.rope.tables import (
    RopeSettings,
    RopeShape,
    frequencies,
    global_parameters,
    is_nested,
    ntk_base,
    shape_of,
    tables,
)

NUM_BINS = 60
# How much further than the context is looked for the first negative B.
LOOK_AHEAD = 4
# HARPE's own range is 1M to 5M, its upper end that of one stage with a single base.
HARPE_RATIO = 5.0


@dataclass(frozen=True, kw_only=True)
class MethodAdvice:
    method: str
    line: str  # to paste into a stage of a recipe
    summary: str  # what it comes to
    parameters: dict[str, Any] | None  # `rope_parameters`; None where transformers cannot express it
    max_positions: int
    reach: tuple[int, int]  # B ≥ 0 below this distance: of the worst and the best head, equal where heads are alike
    lowest: float  # of B within the context, as a share of its value at distance 0
    curve: tuple[float, ...]  # lowest B in each bin, as such a share; mean over heads


@dataclass(frozen=True, kw_only=True)
class Advice:
    rope: RopeShape
    head_dim: int
    parameters: dict[str, Any]  # the model's own, of the layers that see the whole context
    head_bases: Any  # of a model that has a base per head already
    local_layers: bool  # whether other layers keep positions of their own
    context_len: int
    bound: float | None
    ntk_base: float
    looked_until: int  # reaches at this distance are "at least"
    edges: tuple[int, ...]  # where the bins of the curves begin, and the context at last
    methods: tuple[MethodAdvice, ...]


def advise(
    config: Mapping[str, Any], context_len: int, *, advance: Callable[[int], None] = lambda done: None
) -> Advice:
    rope, parameters = shape_of(config), global_parameters(config)
    if context_len <= rope.original_len:
        raise ConfigError(
            f"--context {format_size(context_len)}: the model was made for {format_size(rope.original_len)} already; "
            "name a longer context."
        )
    smallest = bound(context_len, rope.rotary_dim, advance=advance)
    looked_until = LOOK_AHEAD * context_len
    edges = np.unique(np.geomspace(1, context_len, NUM_BINS + 1).round().astype(np.int64))
    methods = [_unchanged(config, rope, parameters, looked_until, edges)]
    for position in _candidates(rope, context_len, smallest):
        settled = position.resolve(rope, context_len)
        inv_freq = np.atleast_2d(settled.tables(rope, context_len).inv_freq)
        measured = _measure(inv_freq.astype(np.float64), looked_until, edges)
        methods.append(
            MethodAdvice(
                method=position.method,
                line=f"rope: {{{_spell(position)}}}",
                summary=_summary(settled, rope, context_len),
                parameters=settled.parameters,
                max_positions=settled.max_positions,
                **measured,
            )
        )
    return Advice(
        rope=rope,
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        parameters=parameters,
        head_bases=config.get("head_bases"),
        local_layers=is_nested(config.get("rope_parameters") or {}),
        context_len=context_len,
        bound=smallest,
        ntk_base=ntk_base(rope.base, context_len / rope.original_len, rope.rotary_dim),
        looked_until=looked_until,
        edges=tuple(int(edge) for edge in edges),
        methods=tuple(methods),
    )


def short(number: float) -> str:
    """1e6, 8.8e6, 500000: as a recipe would write it."""
    if number < 1e5:
        return f"{number:g}"
    digits, _, power = f"{number:.2e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"


def _candidates(rope: RopeShape, context_len: int, smallest: float | None) -> list[Any]:
    high = smallest or float(short(ntk_base(rope.base, context_len / rope.original_len, rope.rotary_dim)))
    found: list[Any] = [
        Abf(method="abf", base=high),
        Ntk(method="ntk"),
        Pi(method="pi"),
        Dynamic(method="dynamic"),
        NtkByParts(method="ntk-by-parts"),
        Yarn(method="yarn"),
        Llama3(method="llama3"),
    ]
    if rope.num_kv_heads > 1:
        found.append(Harpe(method="harpe", low=float(short(high / HARPE_RATIO)), high=high))
    return found


def _spell(position: Any) -> str:
    given = position.model_dump(exclude_defaults=True)
    words = (f"{key}: {short(value) if isinstance(value, float) else value}" for key, value in given.items())
    return ", ".join(sorted(words, key=lambda word: not word.startswith("method")))


def _summary(settled: RopeSettings, rope: RopeShape, context_len: int) -> str:
    if settled.head_bases is not None:
        first, last = settled.head_bases[0], settled.head_bases[-1]
        return f"bases {short(first)} to {short(last)}"
    assert settled.parameters is not None
    if settled.parameters["rope_type"] == "default":
        return f"base {short(settled.parameters['rope_theta'])}"
    factor, attention = settled.parameters["factor"], settled.tables(rope, context_len).attention_factor
    more = f", temperature {attention:.3g}" if attention != 1 else ""
    return f"factor {factor:g}{more}"


def _unchanged(
    config: Mapping[str, Any], rope: RopeShape, parameters: dict[str, Any], looked_until: int, edges: np.ndarray
) -> MethodAdvice:
    if config.get("head_bases"):
        inv_freq = np.concatenate(
            [frequencies(row, rope.rotary_dim) for row in np.atleast_2d(np.asarray(config["head_bases"]))]
        )
        summary = "a base per head"
    else:
        found = tables(parameters, rope.rotary_dim, max_positions=rope.max_positions, seq_len=int(edges[-1]))
        inv_freq = found.inv_freq[None]
        scaled = parameters["rope_type"] != "default"
        summary = f"base {short(rope.base)}" + (f", {parameters['rope_type']} scaling" if scaled else "")
    return MethodAdvice(
        method="unchanged",
        line="rope: {method: unchanged}",
        summary=summary,
        parameters=parameters,
        max_positions=rope.max_positions,
        **_measure(inv_freq.astype(np.float64), looked_until, edges),
    )


def _measure(inv_freq: np.ndarray, looked_until: int, edges: np.ndarray) -> dict[str, Any]:
    # Layers may share bases, and what is the same need not be computed again.
    inv_freq = np.unique(inv_freq, axis=0)
    reaches = [first_negative(line, looked_until) or looked_until for line in inv_freq]
    values = np.mean([curve(line, int(edges[-1])) for line in inv_freq], axis=0) / inv_freq.shape[1]
    lowest = np.minimum.reduceat(values, edges[:-1])
    return {
        "reach": (min(reaches), max(reaches)),
        "lowest": float(values.min()),
        "curve": tuple(float(value) for value in lowest),
    }


# What published recipes did about positions, for comparison with what is suggested here.


@dataclass(frozen=True, kw_only=True)
class Published:
    model: str
    lengths: str
    positions: str
    source: str


PUBLISHED = (
    Published(
        model="Llama 3.1 405B",
        lengths="8K → 128K in six steps",
        positions="base 5e5 from the start; released with llama3 scaling",
        source="arXiv 2407.21783",
    ),
    Published(
        model="Qwen2.5-1M",
        lengths="64K → 128K → 256K",
        positions="base 1e6, 5e6, 1e7",
        source="arXiv 2501.15383",
    ),
    Published(
        model="Qwen3",
        lengths="32K",
        positions="base 1e4 → 1e6; YaRN ×4 without training",
        source="arXiv 2505.09388",
    ),
    Published(
        model="ProLong (Llama-3-8B)",
        lengths="64K, then 512K",
        positions="base 8e6, 1.28e8",
        source="arXiv 2410.02660",
    ),
    Published(
        model="Untie the Knots (Qwen2-7B)",
        lengths="32K → 128K",
        positions="base 1e6 → 5e6",
        source="arXiv 2409.04774",
    ),
    Published(
        model="HARPE (Llama-2-7B)",
        lengths="4K → 128K",
        positions="a base per head, 1e6 to 5e6",
        source="arXiv 2412.07171",
    ),
    Published(
        model="Olmo 3",
        lengths="8K → 64K",
        positions="base 5e5, YaRN ×8 on layers with full attention",
        source="Olmo 3 report",
    ),
    Published(
        model="SmolLM3 3B",
        lengths="32K, 64K",
        positions="base 1.5e6, 5e6; YaRN to 128K without training",
        source="SmolLM3 blog",
    ),
    Published(
        model="DeepSeek-V3",
        lengths="32K, 128K",
        positions="YaRN, factor 40",
        source="arXiv 2412.19437",
    ),
    Published(
        model="Gemma 3",
        lengths="32K → 128K",
        positions="global layers base 1e6, then PI ×8; local layers 1e4",
        source="arXiv 2503.19786",
    ),
    Published(
        model="Gradient Llama-3-8B",
        lengths="64K, 256K, 512K, 1M",
        positions="base 1.53e7, 2.07e8, 1.06e9, 2.8e9",
        source="model cards on the Hub",
    ),
)
