"""Several continuations of one context in one row: each sees the context and itself, none sees another.

In: keys of the context first, then keys of all continuations in the order they came. Out: as attention.py.
Promise: the numbers of computing each continuation alone, up to rounding; the context's keys are read once for all
and never copied; sliding windows, capped scores and sinks are followed.
Price: scores between continuations are computed and thrown away, so they should be short.
Elsewhere: what is fed when (generate.py).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from unspool.core.errors import ConfigError
from unspool.models.attention import cuda
from unspool.models.attention.interface import NAME
from unspool.models.attention.reference import MAX_SCORES, Rules
from unspool.models.checks import attention_of, layers_of, stand_between
from unspool.rope.tables import is_nested

Part = tuple[Tensor, Tensor]  # output over some keys alone, and its log-sum-exp: [B, KV, G·Q, D] and [B, KV, G·Q]


def can_branch(model: Any) -> bool:
    """Whether keys are rotated when they are kept, so that continuations may stand in any order."""
    return can_batch(model) and all(
        getattr(attention_of(layer), "head_inv_freq", None) is None for layer in layers_of(model)
    )


def can_batch(model: Any) -> bool:
    """Whether a model attends through us, and what is near a text cannot change its positions."""
    if model.config._attn_implementation != NAME or _rotates_by_length(model.config.get_text_config()):
        return False
    try:
        return all(attention_of(layer) is not None for layer in layers_of(model))
    except ConfigError:
        return False


def _rotates_by_length(config: Any) -> bool:
    """Whether the longest of several prompts would change how all of them are rotated."""
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = parameters.values() if is_nested(parameters) else [parameters]
    names = [(kind or {}).get("rope_type") or "" for kind in kinds]
    return any("dynamic" in name or name == "longrope" for name in names)


class Branches:
    """Which key belongs to which continuation, and at which position it stands."""

    def __init__(self, num_shared: int, device: torch.device) -> None:
        self.num_shared = num_shared
        self._owners = torch.empty(0, dtype=torch.int64, device=device)
        self._places = torch.empty(0, dtype=torch.int64, device=device)
        self._fed = 0
        self._masks: dict[tuple[str, int | None], Tensor] = {}

    def feed(self, owners: Tensor, places: Tensor) -> None:
        """Say whose tokens come next, and where they stand."""
        self._owners, self._places = torch.cat([self._owners, owners]), torch.cat([self._places, places])
        self._fed = len(owners)
        self._masks = {}

    def attached(self, model: Any) -> AbstractContextManager[None]:
        """Within this, the model's layers attend as told here."""
        return stand_between(model, lambda layer: self)

    def __call__(
        self,
        compute: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rules: Rules,
        sinks: Tensor | None,
        doc_lens: tuple[int, ...] | None,
    ) -> Tensor:
        assert doc_lens is None, "questions on one context are no documents"
        batch, num_heads, num_queries, dim = query.shape
        grouped = query.reshape(batch, key.shape[1], -1, dim)
        at = self.num_shared
        parts = [attend_part(grouped, key[:, :, at:], value[:, :, at:], rules, self._own_mask(rules.window))]
        if at:
            seen = None if rules.window is None else self._shared_mask(rules.window)
            parts.append(attend_part(grouped, key[:, :, :at], value[:, :, :at], rules, seen))
        total = torch.stack([log_sum for _, log_sum in parts]).logsumexp(dim=0)
        if sinks is not None:
            # A sink takes part in the softmax and has nothing to say.
            sink = sinks.float().view(1, key.shape[1], -1, 1).expand(batch, -1, -1, num_queries)
            total = torch.logaddexp(total, sink.reshape(total.shape))
        merged = sum(out * (log_sum - total).exp()[..., None] for out, log_sum in parts)
        assert isinstance(merged, Tensor)
        return merged.view(batch, num_heads, num_queries, -1).transpose(1, 2).to(query.dtype)

    def _own_mask(self, window: int | None) -> Tensor:
        """bool[queries, keys after the shared ones]."""
        kept = self._masks.get(("own", window))
        if kept is None:
            owners, places = self._owners[-self._fed :, None], self._places[-self._fed :, None]
            kept = (owners == self._owners) & (places >= self._places)
            if window is not None:
                kept &= places - self._places < window
            self._masks["own", window] = kept
        return kept

    def _shared_mask(self, window: int) -> Tensor:
        kept = self._masks.get(("shared", window))
        if kept is None:
            keys = torch.arange(self.num_shared, device=self._places.device)
            kept = self._places[-self._fed :, None] - keys < window
            self._masks["shared", window] = kept
        return kept


def attend_part(query: Tensor, key: Tensor, value: Tensor, rules: Rules, mask: Tensor | None) -> Part:
    """Attention to some keys only; query heads stand beside the KV head they share: [B, KV, G·Q, D]."""
    scale = query.shape[-1] ** -0.5 if rules.scaling is None else rules.scaling
    if mask is None and rules.softcap is None and cuda.fits(query, key, value):
        found = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, False, scale=scale)
        return found[0].float(), found[1].float()
    outs, sums = [], []
    keys, values = key.float().transpose(-1, -2), value.float()
    size = max(1, MAX_SCORES // (query.shape[0] * query.shape[1] * key.shape[2]))
    num_queries = query.shape[2] if mask is None else len(mask)
    for start in range(0, query.shape[2], size):
        rows = slice(start, min(start + size, query.shape[2]))
        scores = query[:, :, rows].float() @ keys * scale
        if rules.softcap is not None:
            scores = torch.tanh(scores / rules.softcap) * rules.softcap
        if mask is not None:
            # Rows are group by group, each with all queries.
            of_rows = torch.arange(rows.start, rows.stop, device=mask.device) % num_queries
            scores = scores.masked_fill(~mask[of_rows], -torch.inf)
        log_sum = scores.logsumexp(dim=-1)
        # A query that sees none of these keys has −∞ for a sum, and nothing minus nothing is not a number.
        outs.append((scores - log_sum.clamp(min=-1e30)[..., None]).exp() @ values)
        sums.append(log_sum)
    return torch.cat(outs, dim=2), torch.cat(sums, dim=2)
