"""The host memory of offloaded activations, and the nearest settings that fit into it. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from unspool.models.memory.policy import MemoryPolicy

# Host memory is pinned in blocks of one size; an offloaded tensor takes whole blocks.
BLOCK_BYTES = 64 << 20
_FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class LayerWidths:
    """Elements per token of the tensors that a decoder layer computes."""

    num_layers: int
    num_heads: int
    hidden: int
    queries: int
    keys: int
    inner: int

    @classmethod
    def of_config(cls, values: Mapping[str, Any]) -> "LayerWidths":
        hidden, heads = int(values["hidden_size"]), int(values["num_attention_heads"])
        head_dim = int(values.get("head_dim") or hidden // heads)
        return cls(
            num_layers=int(values["num_hidden_layers"]),
            num_heads=heads,
            hidden=hidden,
            queries=heads * head_dim,
            keys=int(values.get("num_key_value_heads") or heads) * head_dim,
            inner=int(values.get("intermediate_size") or 4 * hidden),
        )

    def kept(self, element_bytes: int) -> tuple[int, ...]:
        """Return bytes per token of each tensor that a layer with kept products keeps, log-sum-exp included."""
        widths = (self.queries, self.queries, self.keys, self.keys, self.hidden, self.inner, self.inner)
        return (*(element_bytes * width for width in widths), _FP32_BYTES * self.num_heads)


def activation_bytes(
    policy: MemoryPolicy, widths: LayerWidths, tokens: int, *, element_bytes: int = 2, block_bytes: int = BLOCK_BYTES
) -> int:
    """Return the bytes of host memory for the activations of a micro-batch of `tokens` tokens, in whole blocks."""
    return sum(pool_bytes(policy, widths, tokens, element_bytes=element_bytes, block_bytes=block_bytes))


def pool_bytes(
    policy: MemoryPolicy, widths: LayerWidths, tokens: int, *, element_bytes: int = 2, block_bytes: int = BLOCK_BYTES
) -> tuple[int, int]:
    """Return the bytes of `activation_bytes` for (checkpoints, kept results), which have separate blocks."""

    def blocks(tensor_bytes: int) -> int:
        return -(-tensor_bytes // block_bytes) * block_bytes

    # The last group's checkpoint stays on the device.
    groups = -(-widths.num_layers // policy.layers_per_checkpoint) - 1 if policy.offload else 0
    kept = sum(blocks(per_token * tokens) for per_token in widths.kept(element_bytes))
    return groups * blocks(element_bytes * widths.hidden * tokens), policy.keep_on_host * kept


def with_fewer_kept(
    policy: MemoryPolicy, widths: LayerWidths, tokens: int, *, room: float, element_bytes: int = 2
) -> MemoryPolicy | None:
    """Return the policy that keeps as many layers in host memory as fit into `room` bytes; None if even zero do not.

    The other layers are recomputed, so the device keeps no more than before.
    """
    for fewer in range(policy.keep_on_host + 1):
        tried = replace(policy, keep_products=policy.keep_products - fewer, keep_on_host=policy.keep_on_host - fewer)
        if activation_bytes(tried, widths, tokens, element_bytes=element_bytes) <= room:
            return tried
    return None


def with_larger_groups(
    policy: MemoryPolicy, widths: LayerWidths, tokens: int, *, room: float, element_bytes: int = 2
) -> MemoryPolicy | None:
    """Return the policy with the fewest layers per checkpoint that fits; None if no policy fits."""
    without_products = replace(policy, keep_products=0, keep_on_host=0)
    for every in range(policy.layers_per_checkpoint + 1, widths.num_layers + 1):
        tried = replace(without_products, layers_per_checkpoint=every)
        if activation_bytes(tried, widths, tokens, element_bytes=element_bytes) <= room:
            return tried
    return None
