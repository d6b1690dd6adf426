"""Advice before training on extending one model to one context length: bounds, settings, curves.

Every suggested base and factor is what a recipe with the printed line would use.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from unspool.core.errors import ConfigError
from unspool.core.sizes import format_size
from unspool.rope.bound import bound, curve, first_negative
from unspool.rope.methods import ROPE_METHODS, Unchanged
from unspool.rope.tables import (
    RopeMethod,
    RopeShape,
    config_frequencies,
    format_base,
    global_parameters,
    is_nested,
    ntk_base,
    shape_of,
)

NUM_BINS = 60
# The first negative B is searched up to this multiple of the context length.
SEARCH_FACTOR = 4


@dataclass(frozen=True, kw_only=True)
class MethodAdvice:
    method: str
    line: str  # to paste into a stage of a recipe
    summary: str  # its settings
    parameters: dict[str, Any] | None  # `rope_parameters`; None if transformers cannot express the method
    max_positions: int
    reach: tuple[int, int]  # B ≥ 0 below this distance: of the worst and the best head
    lowest: float  # B within the context, relative to its value at distance 0
    curve: tuple[float, ...]  # lowest relative B in each bin, mean over heads


@dataclass(frozen=True, kw_only=True)
class Advice:
    rope: RopeShape
    head_dim: int
    parameters: dict[str, Any]  # the model's own, of the layers that see the whole context
    head_bases: Any  # of a model that has a base per head already
    local_layers: bool  # whether other layers keep frequencies of their own
    context_len: int
    bound: float | None
    ntk_base: float
    looked_until: int  # a reach of this distance means "at least"
    edges: tuple[int, ...]  # of the bins of the curves
    methods: tuple[MethodAdvice, ...]


def advise(
    config: Mapping[str, Any], context_len: int, *, advance: Callable[[int], None] = lambda done: None
) -> Advice:
    """Compute the advice for a model's config as a plain dict; `advance` is called as bases are tried."""
    rope, parameters = shape_of(config), global_parameters(config)
    if context_len <= rope.original_len:
        raise ConfigError(
            f"--context {format_size(context_len)}: the model was made for {format_size(rope.original_len)} already; "
            "name a longer context."
        )
    smallest = bound(context_len, rope.rotary_dim, advance=advance)
    ntk = ntk_base(rope.base, context_len / rope.original_len, rope.rotary_dim)
    looked_until = SEARCH_FACTOR * context_len
    edges = np.unique(np.geomspace(1, context_len, NUM_BINS + 1).round().astype(np.int64))
    own_frequencies, own_summary = config_frequencies(config, context_len)
    methods = [
        MethodAdvice(
            method=Unchanged().method,
            line=_recipe_line(Unchanged()),
            summary=own_summary,
            parameters=parameters,
            max_positions=rope.max_positions,
            **_measure(own_frequencies, looked_until, edges),
        )
    ]
    for cls in ROPE_METHODS.values():
        position = cls.suggest(rope, context_len, smallest or float(format_base(ntk)))
        if position is None:
            continue
        settled = position.resolve(rope, context_len)
        inv_freq = np.atleast_2d(settled.tables(rope, context_len).inv_freq).astype(np.float64)
        methods.append(
            MethodAdvice(
                method=position.method,
                line=_recipe_line(position),
                summary=settled.summary(rope, context_len),
                parameters=settled.parameters,
                max_positions=settled.max_positions,
                **_measure(inv_freq, looked_until, edges),
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
        ntk_base=ntk,
        looked_until=looked_until,
        edges=tuple(int(edge) for edge in edges),
        methods=tuple(methods),
    )


def _recipe_line(position: RopeMethod) -> str:
    given = position.model_dump(exclude_defaults=True) | {"method": position.method}
    words = (f"{key}: {format_base(value) if isinstance(value, float) else value}" for key, value in given.items())
    return f"rope: {{{', '.join(sorted(words, key=lambda word: not word.startswith('method')))}}}"


def _measure(inv_freq: np.ndarray, looked_until: int, edges: np.ndarray) -> dict[str, Any]:
    inv_freq = np.unique(inv_freq, axis=0)  # heads and layers may share bases
    reaches = [first_negative(line, looked_until) or looked_until for line in inv_freq]
    values = np.mean([curve(line, int(edges[-1])) for line in inv_freq], axis=0) / inv_freq.shape[1]
    lowest = np.minimum.reduceat(values, edges[:-1])
    return {
        "reach": (min(reaches), max(reaches)),
        "lowest": float(values.min()),
        "curve": tuple(float(value) for value in lowest),
    }


@dataclass(frozen=True)
class Published:
    """How a published model extended its context."""

    model: str
    lengths: str
    positions: str
    source: str


PUBLISHED = (
    Published(
        "Llama 3.1 405B",
        "8K → 128K in six steps",
        "base 5e5 from the start; released with llama3 scaling",
        "arXiv 2407.21783",
    ),
    Published("Qwen2.5-1M", "64K → 128K → 256K", "base 1e6, 5e6, 1e7", "arXiv 2501.15383"),
    Published("Qwen3", "32K", "base 1e4 → 1e6; YaRN ×4 without training", "arXiv 2505.09388"),
    Published("ProLong (Llama-3-8B)", "64K, then 512K", "base 8e6, 1.28e8", "arXiv 2410.02660"),
    Published("Untie the Knots (Qwen2-7B)", "32K → 128K", "base 1e6 → 5e6", "arXiv 2409.04774"),
    Published("HARPE (Llama-2-7B)", "4K → 128K", "a base per head, 1e6 to 5e6", "arXiv 2412.07171"),
    Published("Olmo 3", "8K → 64K", "base 5e5, YaRN ×8 on layers with full attention", "Olmo 3 report"),
    Published("SmolLM3 3B", "32K, 64K", "base 1.5e6, 5e6; YaRN to 128K without training", "SmolLM3 blog"),
    Published("DeepSeek-V3", "32K, 128K", "YaRN, factor 40", "arXiv 2412.19437"),
    Published("Gemma 3", "32K → 128K", "global layers base 1e6, then PI ×8; local layers 1e4", "arXiv 2503.19786"),
    Published(
        "Gradient Llama-3-8B", "64K, 256K, 512K, 1M", "base 1.53e7, 2.07e8, 1.06e9, 2.8e9", "model cards on the Hub"
    ),
)
