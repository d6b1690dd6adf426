"""Activation checkpointing: layers whose activations are recomputed in the backward pass.

A checkpoint covers one layer or a group of them. It keeps the input of the group and, on request, the results of
attention kernels and of some layers' matrix products. The recomputation runs the same kernels on the same numbers, so
gradients have the same bits if the kernels are deterministic. It costs a second forward pass, without attention if that
is kept, and the activations of a group exist at once. keep.py keeps results; offload.py moves tensors to the host.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, is_grad_enabled, nn
from torch.utils.checkpoint import checkpoint

from unspool.core.errors import ConfigError
from unspool.models.attention.interface import apply_head_chunks
from unspool.models.checks import attention_of, check_tokenwise, layers_of, tokenwise_modules
from unspool.models.memory.kept import Kept, keep_result_of
from unspool.models.memory.offload import Offloader, Stored
from unspool.models.memory.policy import MemoryPolicy
from unspool.models.memory.tiling import apply_tiles


def apply_recompute(layers: list[nn.Module], policy: MemoryPolicy, device: torch.device) -> None:
    """One checkpoint for `layers_per_checkpoint` layers; that of the last group stays on the device, where it is needed."""
    every = policy.layers_per_checkpoint
    for layer in layers[len(layers) - policy.keep_products :]:
        keep_products(layer)
    offloader = Offloader(device) if policy.offload else None
    on_host = host_layers(len(layers), keep=policy.keep_products, on_host=policy.keep_on_host)
    keeper = Offloader(device) if on_host else None
    before: _Group | None = None
    for start in range(0, len(layers), every):
        is_last = start + every >= len(layers)
        group = _Group(layers[start : start + every], None if is_last else offloader, before)
        if policy.activation_checkpointing == "keep-attention":
            group.keep(keeper if start in on_host else None)
        before = group


def host_layers(num_layers: int, *, keep: int, on_host: int) -> set[int]:
    """Which of the last `keep` layers have their results in host memory: evenly apart, so that copies find the time."""
    first = num_layers - keep
    return {first + number * keep // on_host for number in range(on_host)}


def keep_products(layer: nn.Module) -> None:
    """Keep what the matrix products of a layer give; not of the last one, whose result is not needed again."""
    attention = attention_of(layer)
    inside = set(attention.modules())
    for module in layer.modules():
        if isinstance(module, nn.Linear) and (module in inside or module.out_features > module.in_features):
            keep_result_of(module)


class _Group:
    """Layers with one checkpoint. The first ones pass their input on; the last one runs them all."""

    def __init__(self, layers: list[nn.Module], offloader: Offloader | None, before: "_Group | None") -> None:
        self._forwards = [layer.forward for layer in layers]
        self._name = type(layers[0]).__name__
        self._options: dict[str, Any] = {}
        self._offloader = offloader
        self._before = before
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._hidden: Tensor | None = None
        self.stored: Stored | None = None  # of the forward pass that is under way
        self.kept: Kept | None = None  # likewise
        for number, layer in enumerate(layers):
            layer.forward = partial(self._called, number)

    def keep(self, offloader: Offloader | None) -> None:
        """Keep the results of attention, and of what else is asked to, there or in host memory."""

        def contexts() -> Any:
            self.kept = Kept(offloader, self._before.kept if self._before else None)
            return self.kept.contexts()

        self._options = {"context_fn": contexts}

    def _called(self, number: int, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not is_grad_enabled():
            return self._forwards[number](hidden, *args, **kwargs)
        if number == 0:
            self._calls = []
        elif hidden is not self._hidden:
            self._hidden = None
            raise ConfigError(
                f"layers_per_checkpoint: something happens to the hidden states between the layers of this model "
                f"({self._name}), so that layers cannot share a checkpoint; set layers_per_checkpoint to 1."
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
        self.stored = offloader.put(hidden.contiguous(), before=self._before.stored if self._before else None)
        entry.append(self.stored)
        return out


# Memory settings of a training pass, which change what is held and not what comes out.


def apply_memory(model: Any, policy: MemoryPolicy) -> None:
    """Change `model` in place; once per model, after its positions and after compiling."""
    if policy == MemoryPolicy():
        return
    layers = layers_of(model)
    if policy.mlp_tiles is not None:
        for part in tokenwise_modules(model):
            check_tokenwise(part, model.config.hidden_size)
            apply_tiles(part, policy.mlp_tiles)
    keep_attention = policy.activation_checkpointing == "keep-attention"
    if keep_attention or policy.attention_heads_at_once is not None:
        apply_head_chunks(layers, heads_at_once=policy.attention_heads_at_once)
    if policy.activation_checkpointing != "none":
        policy.check_layers(len(layers))
        apply_recompute(layers, policy, next(model.parameters()).device)
