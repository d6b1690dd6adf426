"""Measure how far back each attention layer sees, inside a user's step.

A hook calls a layer's attention a second time, with the same arguments but a different vector for one token. The tokens
whose output changes are those that see this token. So the test covers the masks that actually reach the layer.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from unspool.core.errors import ConfigError
from unspool.models.checks import attention_of, layers_of, short_windows
from unspool.verification.audits.captures import StepFn, run_step
from unspool.verification.audits.promises import Verdict, broken, kept, not_checked
from unspool.verification.audits.spans import Batch, Span, Spans

# Changes below this fraction of the largest change count as rounding.
SEEN = 1e-6


def check_sliding_window(model: Any, step_fn: StepFn, batches: Sequence[Batch], spans: Sequence[Spans]) -> Verdict:
    windows = layer_windows(model)
    if windows is None:
        return not_checked("sliding_window", "some layers have neither full nor sliding-window attention")
    longest = max(
        (
            (end - start, number, row, (start, end))
            for number, each in enumerate(spans)
            for row, of_row in enumerate(each.rows)
            for start, end in of_row
        ),
        default=None,
    )
    if longest is None or longest[0] < 8:
        return not_checked("sliding_window", "no document has 8 or more tokens")
    length, number, row, span = longest
    is_short = any(window is not None and window >= length for window in windows)
    with short_windows(model) if is_short else nullcontext():
        windows = layer_windows(model) or []
        try:
            with _measure(model, number, row, span) as reach:
                run_step(model, step_fn, batches, probe="sliding window")
        except ConfigError as error:
            return not_checked("sliding_window", str(error))
    if len(reach) < len(windows):
        return not_checked("sliding_window", "the model's attention modules were not called")
    for layer, window in enumerate(windows):
        found, wanted = reach[layer], min(length, window or length)
        kind = f"sliding window {window}" if window else "full attention"
        if found > wanted:
            return broken("sliding_window", f"layer {layer} ({kind}) sees {found} of a document's {length} tokens")
        if found < wanted / 2:
            return broken("sliding_window", f"layer {layer} ({kind}) sees only {found} of {wanted} tokens")
    sliding = sum(window is not None for window in windows)
    if not sliding:
        return kept("sliding_window", f"{len(windows)} layers of full attention see all {length} tokens of a document")
    shortened = " (set to a few tokens for this check)" if is_short else ""
    size = min(window for window in windows if window)
    return kept("sliding_window", f"{sliding} of {len(windows)} layers use a window of {size} tokens{shortened}")


def layer_windows(model: Any) -> list[int | None] | None:
    """Sliding window of every layer from the config; None for full attention."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        return [window] * config.num_hidden_layers
    if set(types) - {"full_attention", "sliding_attention"}:
        return None
    return [window if each == "sliding_attention" else None for each in types]


@contextmanager
def _measure(model: Any, number: int, row: int, span: Span) -> Iterator[dict[int, int]]:
    """Measure by layer how many tokens of a document the attention sees in pass `number`."""
    reach: dict[int, int] = {}
    passes = -1

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    handles = [model.base_model.register_forward_pre_hook(count)]
    for layer, module in enumerate(map(attention_of, layers_of(model))):
        handles.append(
            module.register_forward_hook(_hook(layer, lambda: passes == number, row, span, reach), with_kwargs=True)
        )
    try:
        yield reach
    finally:
        for handle in handles:
            handle.remove()


def _hook(layer: int, is_turn: Any, row: int, span: Span, reach: dict[int, int]) -> Any:
    start, end = span

    @torch.no_grad()
    def after(module: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        if not is_turn() or layer in reach:
            return
        named = "hidden_states" in kwargs
        states: Tensor = (kwargs["hidden_states"] if named else args[0]).detach().clone()
        states[row, start] = states[row, start].flip(0) * 3 + 1
        again = kwargs | {name: None for name in ("past_key_values", "past_key_value") if name in kwargs}
        other = (
            module.forward(**again | {"hidden_states": states}) if named else module.forward(states, *args[1:], **again)
        )
        old, new = (found[0] if isinstance(found, tuple) else found for found in (out, other))
        change = (new.float() - old.float()).abs().amax(dim=-1)[row, start:end]
        seen = (change > SEEN * change.max()).nonzero()[:, 0]
        reach[layer] = int(seen.max()) + 1 if len(seen) else 0

    return after
