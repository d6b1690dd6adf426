"""What can be said before training about extending one model to one context: bounds, settings, curves.

In: a model's config as a plain dict, a context length. Out: `Advice`, which the terminal, the page and JSON show.
Promise: every base and factor that is suggested is what a recipe with the line beside it would use.
Elsewhere: the bound (bound.py), what published recipes used (published.py), the page (page.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from unspool.base.errors import ConfigError
from unspool.base.sizes import format_size
from unspool.position.bound import bound, curve, first_negative
from unspool.position.harpe import Harpe
from unspool.position.rope import RopeShape, frequencies, global_parameters, is_nested, ntk_base, shape_of, tables
from unspool.position.scaling import Abf, Dynamic, Llama3, Ntk, NtkByParts, Pi, Yarn
from unspool.position.settled import Settled

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
        settled = position.settle(rope, context_len)
        inv_freq = np.atleast_2d(settled.tables(rope, context_len).inv_freq)
        measured = _measure(inv_freq.astype(np.float64), looked_until, edges)
        methods.append(
            MethodAdvice(
                method=position.method,
                line=f"position: {{{_spell(position)}}}",
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


def _summary(settled: Settled, rope: RopeShape, context_len: int) -> str:
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
        line="position: {method: unchanged}",
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
