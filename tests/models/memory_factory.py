"""A training pass of a small model, and what it holds."""

import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from factory import build_model, packed_inputs, random_tokens
from unspool.models.loss import summed_loss
from unspool.models.memory.checkpointing import apply_memory
from unspool.models.memory.policy import MemoryPolicy

DOC_LENS = (20, 12, 1, 31)
LAYERS = 5


def build(family: str = "llama", policy: MemoryPolicy | None = None, **changes: Any) -> Any:
    model = build_model(family, **{"num_hidden_layers": LAYERS} | changes).train()
    apply_memory(model, policy or MemoryPolicy())
    return model


def forward(model: Any, doc_lens: tuple[int, ...] = DOC_LENS, seed: int = 0) -> Tensor:
    device = next(model.parameters()).device
    tokens, targets = (random_tokens(sum(doc_lens), number).to(device) for number in (seed, seed + 100))
    inputs = packed_inputs(tokens, doc_lens)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        hidden = model.base_model(**inputs, use_cache=False).last_hidden_state[0]
        total, _ = summed_loss(hidden, model.get_output_embeddings().weight, targets[0])
    return total / sum(doc_lens)


def trained(model: Any, *batches: tuple[int, ...]) -> dict[str, Tensor]:
    """Loss and gradients, summed over micro-batches."""
    loss = torch.zeros(())
    for number, doc_lens in enumerate(batches or (DOC_LENS,)):
        part = forward(model, doc_lens, seed=number)
        part.backward()
        loss = loss + part.detach().cpu()
    return {"loss": loss} | {name: weight.grad.clone().cpu() for name, weight in model.named_parameters()}


def apart(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """The largest difference of a loss or gradient, relative to its size."""
    assert left.keys() == right.keys()
    found = [float((left[name] - right[name]).norm() / right[name].norm().clamp(min=1e-20)) for name in right]
    return max(math.inf if math.isnan(one) else one for one in found)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


class Watch(TorchDispatchMode):
    """Counts operators and adds up what tensors made under it still hold."""

    def __init__(self, *, with_peak: bool = False) -> None:
        super().__init__()
        self._with_peak = with_peak
        self.calls: Counter[str] = Counter()
        self.peak = 0
        self.largest = 0
        self._storages: Any = WeakIdKeyDictionary()

    @property
    def live(self) -> int:
        return sum(storage.nbytes() for storage in self._storages)

    @property
    def attention_calls(self) -> int:
        return sum(count for name, count in self.calls.items() if "attention" in name and "backward" not in name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        out = func(*args, **kwargs or {})
        known = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and id(leaf.untyped_storage()) not in known:
                self._storages[leaf.untyped_storage()] = None
                self.largest = max(self.largest, leaf.untyped_storage().nbytes())
        if self._with_peak:
            self.peak = max(self.peak, self.live)
        return out


def kept_bytes(model: Any, doc_lens: tuple[int, ...]) -> int:
    """What a forward pass leaves for the backward pass, without the loss, which is the same for all."""
    tokens = random_tokens(sum(doc_lens))
    with Watch() as watch:
        hidden = model.base_model(**packed_inputs(tokens, doc_lens), use_cache=False).last_hidden_state
        kept = watch.live
    del hidden
    return kept
