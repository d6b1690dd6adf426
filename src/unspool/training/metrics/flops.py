"""Floating-point operations of a step, the peak rate of a device, and the speed display.

A step costs 6 operations per token for every weight of a matrix product, including the head but not the embedding. A
frozen weight costs 4, because its gradient is not computed. In a mixture of experts, only the experts that a token uses
count. Causal attention counts half of the square of each document. Recomputation does not count. Norms, RoPE, softmax
and the optimizer are ignored.
"""

import re
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from unspool.core.sizes import format_count

# Dense bf16 with fp32 accumulation, in TFLOP/s, from data sheets. The first matching name counts.
PEAKS = {
    r"GB[23]00": 2500,
    r"B[23]00": 2250,
    r"B100": 1750,
    r"H[12]00 NVL": 835,
    r"H100 PCIe": 756,
    r"H100|H200|H800|GH200": 989,
    r"H20": 148,
    r"A[18]00": 312,
    r"A40": 150,
    r"A30": 165,
    r"A10": 125,
    r"L40S": 362,
    r"L40": 181,
    r"L4": 121,
    r"RTX A6000": 155,
    r"RTX 6000 Ada.*": 364,
    r"RTX 5090": 209,
    r"RTX 4090": 165,
    r"RTX 3090": 71,
    r"MI3[02][05]X": 1307,
}
# Config keys for the number of experts per token.
_ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")


@dataclass(frozen=True, kw_only=True)
class LayerAttention:
    """The size of one layer's attention."""

    width: int  # query heads · (dimension of queries + dimension of values)
    window: int | None  # sliding window


@dataclass(frozen=True, kw_only=True)
class FlopCount:
    """The operations of a training step, as a function of its documents."""

    per_token: float
    layers: tuple[LayerAttention, ...]

    def step(self, doc_lens: Sequence[int]) -> float:
        lens = np.asarray(doc_lens, dtype=np.float64)
        # Two operations per product, once in the forward pass and twice in the backward pass.
        attention = sum(6.0 * layer.width * float(visible_pairs(lens, layer.window).sum()) for layer in self.layers)
        return self.per_token * float(lens.sum()) + attention


def visible_pairs(doc_lens: np.ndarray, window: int | None) -> np.ndarray:
    """Return the number of (query, key) pairs: half of a document's square, without those beyond the window."""
    beyond = np.zeros_like(doc_lens) if window is None else np.maximum(0.0, doc_lens - window)
    return np.asarray((doc_lens**2 - beyond**2) / 2)


def count_flops(model: Any) -> FlopCount:
    return FlopCount(per_token=_per_token(model), layers=_attention(model.config.get_text_config()))


def peak_flops(device: torch.device) -> float | None:
    """Return the operations per second in the data sheet; None for an unknown device."""
    return known_peak(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def known_peak(name: str) -> float | None:
    # Match whole words: an A10G is not an A10, and the laptop RTX 4090 is another chip.
    found = (peak for pattern, peak in PEAKS.items() if re.search(rf"\b({pattern})\b", name))
    return None if "Laptop" in name else next((peak * 1e12 for peak in found), None)


def _per_token(model: Any) -> float:
    """Return the operations per token, without attention."""
    head = model.get_output_embeddings().weight
    embeddings = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)} - {id(head)}
    active = _active_experts(model.config.get_text_config())
    return sum(
        (6.0 if weight.requires_grad else 4.0) * int(weight.numel()) * _share(name, weight, active)
        # A tied head appears once, under the embedding's name.
        for name, weight in model.named_parameters()
        if weight.dim() > 1 and id(weight) not in embeddings and not name.endswith("bias")
    )


def _active_experts(config: Any) -> tuple[int, int] | None:
    """Return (experts per token, all experts) of a mixture of experts."""
    active = next((count for name in _ACTIVE if (count := getattr(config, name, None))), None)
    total = next((n for name in ("num_experts", "num_local_experts") if (n := getattr(config, name, None))), None)
    return (int(active), int(total)) if active and total else None


def _share(name: str, weight: torch.Tensor, experts: tuple[int, int] | None) -> float:
    """Return the share of a weight that one token uses."""
    if ".experts." not in name or experts is None:
        return 1.0
    active, total = experts
    return active / (len(weight) if weight.dim() == 3 else total)


def _attention(config: Any) -> tuple[LayerAttention, ...]:
    heads = int(config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    query_dim = getattr(config, "qk_head_dim", None) or head_dim
    value_dim = getattr(config, "v_head_dim", None) or head_dim
    window = getattr(config, "sliding_window", None)
    # Without layer_types, a window applies to all layers.
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return tuple(
        LayerAttention(width=heads * (query_dim + value_dim), window=window if "sliding" in kind else None)
        for kind in kinds
    )


LAST_STEPS = 20
GIB = 1 << 30


@dataclass(frozen=True)
class MfuCounter:
    """Model FLOPs utilization of `devices` devices with `peak` operations per second each."""

    count: FlopCount | None = None
    peak: float | None = None
    devices: int = 1

    def mfu(self, doc_lens: Sequence[int], seconds: float) -> float | None:
        if self.count is None or self.peak is None:
            return None
        return self.count.step(doc_lens) / (seconds * self.peak * self.devices)


@dataclass
class SpeedMeter:
    """Tokens per second, MFU and remaining time, measured over the last steps of a stage."""

    steps: int
    batch: int  # tokens per step
    clock: Callable[[], float] = time.perf_counter
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=LAST_STEPS))
    _mfus: deque[float] = field(default_factory=lambda: deque(maxlen=LAST_STEPS))
    _ends: deque[float] = field(default_factory=lambda: deque(maxlen=LAST_STEPS + 1))

    def add(self, seconds: float, mfu: float | None) -> None:
        self._seconds.append(seconds)
        self._ends.append(self.clock())
        if mfu is not None:
            self._mfus.append(mfu)

    def summary(self, step: int, loss: float, memory_gib: float) -> str:
        """Return the text of the progress bar, most important values first: a narrow terminal truncates the rest."""
        tokens_per_second = self.batch * len(self._seconds) / sum(self._seconds)
        parts = [f"loss {loss:.3f}", f"eta {_clock_text(self.seconds_left(step))}"]
        parts.append(f"{format_count(tokens_per_second)} tok/s")
        if self._mfus:
            parts.append(f"MFU {100 * sum(self._mfus) / len(self._mfus):.0f}%")
        return "  ".join([*parts, f"{memory_gib:.1f} GiB"])

    def seconds_left(self, step: int) -> float:
        """Return the remaining seconds by wall time, which includes checkpoints and validation."""
        pace = self._seconds[-1]
        if len(self._ends) > 1:
            pace = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return pace * (self.steps - step)


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory of this process so far: on the GPU, or in main memory without one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # In kilobytes, except on macOS.
    return held / GIB if sys.platform == "darwin" else held * 1024 / GIB


def _clock_text(seconds: float) -> str:
    """Format seconds as 1:02:33."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
