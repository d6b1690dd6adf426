"""Layers whose activations are computed again in the backward pass.

In: the layers of a decoder, how many share a checkpoint, whether the attention kernel runs again. Out: the same
layers, keeping the input of every group and nothing else (besides what attention is asked to keep).
Promise: the same kernels on the same numbers, so the same bits wherever those kernels repeat themselves.
Price: a second forward pass, without attention where that is kept; a group's activations exist at once.
Elsewhere: keeping attention (attention_parts.py), moving inputs to the host (offload.py).
"""

from functools import partial
from typing import Any

from torch import Tensor, is_grad_enabled, nn
from torch.utils.checkpoint import checkpoint

from unspool.base.errors import ConfigError
from unspool.model.attention_parts import keeping_attention
from unspool.model.offload import Offloader, Stored


def apply_recompute(
    layers: list[nn.Module], *, every: int = 1, keep_attention: bool = False, offloader: Offloader | None = None
) -> None:
    """One checkpoint for every `every` layers; that of the last group stays on the device, where it is needed next."""
    groups = [layers[start : start + every] for start in range(0, len(layers), every)]
    before: _Group | None = None
    for number, group in enumerate(groups):
        is_last = number == len(groups) - 1
        before = _Group(group, keep_attention, None if is_last else offloader, before)


class _Group:
    """Layers with one checkpoint. The first ones pass their input on; the last one runs them all."""

    def __init__(
        self, layers: list[nn.Module], keep_attention: bool, offloader: Offloader | None, before: "_Group | None"
    ) -> None:
        self._forwards = [layer.forward for layer in layers]
        self._name = type(layers[0]).__name__
        self._options: dict[str, Any] = {"context_fn": keeping_attention} if keep_attention else {}
        self._offloader = offloader
        self._before = before
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._hidden: Tensor | None = None
        self.stored: Stored | None = None  # of the forward pass that is under way
        for number, layer in enumerate(layers):
            layer.forward = partial(self._called, number)

    def _called(self, number: int, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not is_grad_enabled():
            return self._forwards[number](hidden, *args, **kwargs)
        if number == 0:
            self._calls = []
        elif hidden is not self._hidden:
            self._hidden = None
            raise ConfigError(
                f"recompute_every: something happens to the hidden states between the layers of this model "
                f"({self._name}), so that layers cannot share a checkpoint; set recompute_every to 1."
            )
        self._calls.append((args, kwargs))
        if number < len(self._forwards) - 1:
            self._hidden = hidden
            return hidden
        calls, self._calls, self._hidden = self._calls, [], None
        if self._offloader is None:
            return checkpoint(partial(self._run, calls), hidden, use_reentrant=False, **self._options)
        return self._run_offloaded(calls, hidden, self._offloader)

    def _run(self, calls: list[tuple[tuple[Any, ...], dict[str, Any]]], hidden: Any) -> Any:
        for number, (args, kwargs) in enumerate(calls):
            if number and isinstance(hidden, tuple):
                hidden = hidden[0]
            hidden = self._forwards[number](hidden, *args, **kwargs)
        return hidden

    def _run_offloaded(self, calls: Any, hidden: Tensor, offloader: Offloader) -> Any:
        """As above, but the checkpoint holds only a handle of its input."""
        entry: list[Any] = [hidden]

        def run(anchor: Tensor) -> Any:
            first = entry.pop()
            if isinstance(first, Stored):
                first = offloader.take(first).requires_grad_(needs_grad)
            return self._run(calls, first)

        needs_grad = hidden.requires_grad
        # Tells `checkpoint` which device it is about; without values, so that there is nothing to keep.
        out = checkpoint(run, hidden.new_empty(0), use_reentrant=False, **self._options)
        self.stored = offloader.put(hidden, before=self._before.stored if self._before else None)
        entry.append(self.stored)
        return out
