"""Activation checkpointing, and applying all memory settings of training.

A checkpoint covers one layer or a group of layers. It keeps the group's input and, if configured, the results of
attention kernels and of some layers' matrix products. The recomputation runs the same kernels on the same numbers, so
gradients are bit-identical if the kernels are deterministic. It costs a second forward pass (without attention if its
results are kept), and the activations of one group exist at a time.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, is_grad_enabled, nn
from torch.utils.checkpoint import checkpoint

from unspool.core.errors import ConfigError
from unspool.models.attention.interface import apply_head_chunks
from unspool.models.checks import attention_of, check_tokenwise, layers_of, tokenwise_modules
from unspool.models.memory.host_bytes import LayerWidths, pool_bytes
from unspool.models.memory.kept import Kept, keep_result_of
from unspool.models.memory.offload import Offloader, Stored
from unspool.models.memory.passes import dropping_saved
from unspool.models.memory.policy import MemoryPolicy
from unspool.models.memory.tiling import apply_tiles

Call = tuple[tuple[Any, ...], dict[str, Any]]  # arguments of a layer


def apply_memory(model: Any, policy: MemoryPolicy, *, device: torch.device | None = None) -> None:
    """Apply memory settings to `model` in place: once per model, after its RoPE method and after compiling.

    `device` is where the layers compute. Default: where the weights are.
    """
    if policy == MemoryPolicy():
        return
    layers = layers_of(model)
    device = device or next(model.parameters()).device
    if policy.mlp_tiles is not None:
        for module in tokenwise_modules(model):
            check_tokenwise(module, model.config.hidden_size, device)
            apply_tiles(module, policy.mlp_tiles)
    if policy.activation_checkpointing == "keep-attention" or policy.attention_heads_at_once is not None:
        apply_head_chunks(layers, heads_at_once=policy.attention_heads_at_once)
    if policy.activation_checkpointing != "none":
        policy.check_layers(len(layers))
        apply_checkpointing(layers, policy, device)


def apply_checkpointing(layers: list[nn.Module], policy: MemoryPolicy, device: torch.device) -> None:
    """Group layers into checkpoints. The last group's checkpoint is never offloaded, because it is needed first."""
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


def reserve_host_memory(model: Any, policy: MemoryPolicy, *, tokens: int) -> None:
    """Start to pin the host memory of a micro-batch of `tokens` tokens; without this the first one waits for it."""
    widths = LayerWidths.of_config(model.config.to_dict())
    for number, offloader in enumerate(_offloaders(model)):
        if offloader is not None:
            # Not the device of the weights: `parallel.offload` keeps them in host memory.
            element_bytes = 2 if offloader.device.type == "cuda" else 4
            offloader.reserve(pool_bytes(policy, widths, tokens, element_bytes=element_bytes)[number])


def release_host_memory(model: Any) -> int:
    """Free the host memory of offloaded activations, and return its bytes. The next forward pass allocates it again.

    Without this the memory would stay pinned while the model is exported.
    """
    return sum(offloader.release() for offloader in _offloaders(model) if offloader is not None)


def _offloaders(model: Any) -> tuple[Offloader | None, Offloader | None]:
    """Return the offloaders of checkpoints and of kept results."""
    forwards = [getattr(layer.forward, "func", None) for layer in layers_of(model)]
    groups = [owner for owner in (getattr(one, "__self__", None) for one in forwards) if isinstance(owner, _Group)]
    checkpoints = next((group.offloader for group in groups if group.offloader is not None), None)
    return checkpoints, next((group.keeper for group in groups if group.keeper is not None), None)


def host_layers(num_layers: int, *, keep: int, on_host: int) -> set[int]:
    """Return the layers, of the last `keep`, that keep results in host memory: evenly spaced, to overlap the copies."""
    first = num_layers - keep
    return {first + number * keep // on_host for number in range(on_host)}


def keep_products(layer: nn.Module) -> None:
    """Keep the results of a layer's matrix products, except the last, which the backward pass does not need."""
    attention = attention_of(layer)
    inside = set(attention.modules())
    for module in layer.modules():
        if isinstance(module, nn.Linear) and (module in inside or module.out_features > module.in_features):
            keep_result_of(module)


class _Group:
    """Layers with one checkpoint. The first layers return their input; the last one runs all of them."""

    def __init__(self, layers: list[nn.Module], offloader: Offloader | None, before: "_Group | None") -> None:
        self._forwards = [layer.forward for layer in layers]
        self._name = type(layers[0]).__name__
        self._options: dict[str, Any] = {}
        self.offloader = offloader
        self.keeper: Offloader | None = None
        self._before = before
        self._calls: list[Call] = []
        self._hidden: Tensor | None = None
        self.stored: Stored | None = None  # of the current forward pass
        self.kept: Kept | None = None  # of the current forward pass
        for number, layer in enumerate(layers):
            layer.forward = partial(self._forward, number)

    def keep(self, offloader: Offloader | None) -> None:
        """Keep the results of `kept.call`, on the device or in host memory."""
        self.keeper = offloader

        def contexts() -> Any:
            self.kept = Kept(offloader, self._before.kept if self._before else None)
            return self.kept.contexts()

        self._options = {"context_fn": contexts}

    def _forward(self, number: int, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not is_grad_enabled():
            return self._forwards[number](hidden, *args, **kwargs)
        if number == 0:
            self._calls = []
        elif hidden is not self._hidden:
            self._hidden = None
            raise ConfigError(
                f"layers_per_checkpoint: this model changes the hidden states between its layers ({self._name}), so "
                "layers cannot share a checkpoint; set layers_per_checkpoint to 1."
            )
        self._calls.append((args, kwargs))
        if number < len(self._forwards) - 1:
            self._hidden = hidden
            return hidden
        calls, self._calls, self._hidden = self._calls, [], None
        if self.offloader is None:
            with dropping_saved():
                return checkpoint(partial(self._run, calls), hidden, use_reentrant=False, **self._options)
        return self._run_offloaded(calls, hidden, self.offloader)

    def _run(self, calls: list[Call], hidden: Any) -> Any:
        for number, (args, kwargs) in enumerate(calls):
            if number and isinstance(hidden, tuple):
                hidden = hidden[0]
            hidden = self._forwards[number](hidden, *args, **kwargs)
        return hidden

    def _run_offloaded(self, calls: list[Call], hidden: Tensor, offloader: Offloader) -> Any:
        """Run layers under a checkpoint that holds only a handle to its offloaded input."""
        entry: list[Any] = [hidden]

        def run(anchor: Tensor) -> Any:
            first = entry.pop()
            if isinstance(first, Stored):
                first = offloader.take(first).requires_grad_(needs_grad)
            return self._run(calls, first)

        needs_grad = hidden.requires_grad
        # `checkpoint` reads the device from this empty tensor, and keeps nothing else.
        with dropping_saved():
            out = checkpoint(run, hidden.new_empty(0), use_reentrant=False, **self._options)
        self.stored = offloader.put(hidden.contiguous(), before=self._before.stored if self._before else None)
        entry.append(self.stored)
        return out
