"""Several continuations of one context in one sequence: each attends to the context and to itself.

The keys of the context come first, followed by the keys of all continuations in the order of computation. The context's
keys are read once for all continuations and never copied. The output equals that of each continuation alone, up to
rounding. Scores between continuations are computed and discarded, so continuations should be short.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from unspool.core.errors import ConfigError
from unspool.models.attention import cuda
from unspool.models.attention.interface import NAME
from unspool.models.attention.reference import MAX_SCORES, AttentionInputs, Kernel, capped_scores, within_window
from unspool.models.checks import attention_of, intercept_attention, layers_of
from unspool.models.rotary import depends_on_length


def can_share_prefix(model: Any) -> bool:
    """Return whether cached keys are already rotated, so that continuations may be stored in any order."""
    return can_batch(model) and all(
        getattr(attention_of(layer), "head_inv_freq", None) is None for layer in layers_of(model)
    )


def can_batch(model: Any) -> bool:
    """Return whether a model uses our attention and its RoPE does not depend on the length of the input."""
    if model.config._attn_implementation != NAME or depends_on_length(model):
        return False
    try:
        return all(attention_of(layer) is not None for layer in layers_of(model))
    except ConfigError:
        return False


class SharedPrefixAttention:
    """The attention kernel of every layer; it knows the continuation and the position of each key."""

    def __init__(self, num_shared: int, device: torch.device) -> None:
        self.num_shared = num_shared
        self._owners = torch.empty(0, dtype=torch.int64, device=device)
        self._positions = torch.empty(0, dtype=torch.int64, device=device)
        self._num_new = 0
        self._masks: dict[tuple[str, int | None], Tensor] = {}

    def add_tokens(self, owners: Tensor, positions: Tensor) -> None:
        """Set the continuations and the positions of the next tokens."""
        self._owners, self._positions = torch.cat([self._owners, owners]), torch.cat([self._positions, positions])
        self._num_new = len(owners)
        self._masks = {}

    def attached(self, model: Any) -> AbstractContextManager[None]:
        """Return a context manager in which the model's layers use this attention."""
        return intercept_attention(model, lambda layer: self)

    def __call__(self, kernel: Kernel, inputs: AttentionInputs) -> Tensor:
        assert inputs.doc_lens is None, "continuations of one context are not packed documents"
        query, key, value = inputs.heads
        batch, num_heads, num_queries, dim = query.shape
        grouped = query.reshape(batch, key.shape[1], -1, dim)
        at = self.num_shared
        own = inputs.with_heads(grouped, key[:, :, at:], value[:, :, at:])
        parts = [partial_attention(own, self._own_mask(inputs.window))]
        if at:
            shared = inputs.with_heads(grouped, key[:, :, :at], value[:, :, :at])
            mask = None if inputs.window is None else self._shared_mask(inputs.window)
            parts.append(partial_attention(shared, mask))
        total = torch.stack([log_sum for _, log_sum in parts]).logsumexp(dim=0)
        if inputs.sinks is not None:
            sinks = inputs.sinks.float().view(1, key.shape[1], -1, 1).expand(batch, -1, -1, num_queries)
            total = torch.logaddexp(total, sinks.reshape(total.shape))
        merged = sum(out * (log_sum - total).exp()[..., None] for out, log_sum in parts)
        assert isinstance(merged, Tensor)
        return merged.view(batch, num_heads, num_queries, -1).transpose(1, 2).to(query.dtype)

    def _own_mask(self, window: int | None) -> Tensor:
        """Return bool[queries, keys after the shared keys]."""
        if ("own", window) not in self._masks:
            owners, positions = self._owners[-self._num_new :, None], self._positions[-self._num_new :, None]
            visible = within_window(positions - self._positions, window)
            self._masks["own", window] = (owners == self._owners) & visible
        return self._masks["own", window]

    def _shared_mask(self, window: int) -> Tensor:
        """Return bool[queries, shared keys]."""
        if ("shared", window) not in self._masks:
            keys = torch.arange(self.num_shared, device=self._positions.device)
            self._masks["shared", window] = within_window(self._positions[-self._num_new :, None] - keys, window)
        return self._masks["shared", window]


def partial_attention(inputs: AttentionInputs, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attend to some of the keys: return the output [B, KV, G·Q, D] over them, and its log-sum-exp [B, KV, G·Q].

    Queries [B, KV, G·Q, D] are grouped by the KV head that they share.
    """
    query, key, value = inputs.heads
    if mask is None and inputs.softcap is None and cuda.supports(query, key, value):
        found = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, False, scale=inputs.scale)
        return found[0].float(), found[1].float()
    outs, log_sums = [], []
    keys, values = key.float(), value.float()
    size = max(1, MAX_SCORES // (query.shape[0] * query.shape[1] * key.shape[2]))
    for start in range(0, query.shape[2], size):
        some = slice(start, min(start + size, query.shape[2]))
        scores = capped_scores(query[:, :, some].float(), keys, inputs.scale, inputs.softcap)
        if mask is not None:
            # Queries are ordered by head within a group: all of the first head, then all of the second.
            queries = torch.arange(some.start, some.stop, device=mask.device) % len(mask)
            scores = scores.masked_fill(~mask[queries], -torch.inf)
        log_sum = scores.logsumexp(dim=-1)
        # The log-sum of a query that sees none of these keys is −∞, and −∞ − −∞ is NaN.
        outs.append((scores - log_sum.clamp(min=-1e30)[..., None]).exp() @ values)
        log_sums.append(log_sum)
    return torch.cat(outs, dim=2), torch.cat(log_sums, dim=2)
