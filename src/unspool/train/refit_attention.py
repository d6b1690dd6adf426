"""How far one layer's attention is from another's, and which way its queries and keys have to go.

In: queries and keys of both, as they come to the kernel (rotated, normed), and the lengths of documents.
Out: KL(teacher ‖ student) summed over heads and queries; its gradient by the student's queries and keys.
Promise: in fp32, exact, within documents; where both are the same bits the gradient is exactly 0, so that Adam has no
rounding to blow up. No more than SCORES_AT_ONCE scores of each side exist at a time.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from unspool.model.attention_reference import Rules, visible

# Scores of one side, in fp32: 64 MiB.
SCORES_AT_ONCE = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Attended:
    """What a layer's kernel is given, values apart."""

    query: Tensor  # [H, T, D]
    key: Tensor  # [KV, T, D]
    rules: Rules
    sinks: Tensor | None = None  # [H]

    @property
    def scaling(self) -> float:
        return float(self.query.shape[-1] ** -0.5 if self.rules.scaling is None else self.rules.scaling)

    def cut(self, queries: slice, keys: slice) -> "Attended":
        query, key = self.query[:, queries].float(), self.key[:, keys].float()
        return Attended(query=query, key=key, rules=self.rules, sinks=self.sinks)


@torch.no_grad()
def divergence(teacher: Attended, student: Attended, doc_lens: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of KL, and its gradient by the student's queries and keys, in fp32."""
    total = torch.zeros((), dtype=torch.float64, device=student.query.device)
    query_grad = torch.zeros_like(student.query, dtype=torch.float32)
    key_grad = torch.zeros_like(student.key, dtype=torch.float32)
    num_heads = len(student.query)
    for start, end in pairwise(accumulate(doc_lens, initial=0)):
        size = max(1, SCORES_AT_ONCE // (num_heads * (end - start)))
        for first in range(start, end, size):
            queries = slice(first, min(first + size, end))
            keys = slice(_reach(teacher, student, start, first), queries.stop)
            found = _block(teacher.cut(queries, keys), student.cut(queries, keys), first - keys.start)
            total += found[0]
            query_grad[:, queries] = found[1]
            key_grad[:, keys] += found[2]
    return total, query_grad, key_grad


def _reach(teacher: Attended, student: Attended, start: int, first: int) -> int:
    """The first key that some query from `first` on sees."""
    windows = (teacher.rules.window, student.rules.window)
    widest = max((window for window in windows if window is not None), default=None)
    return start if widest is None or None in windows else max(start, first - widest + 1)


def _block(teacher: Attended, student: Attended, offset: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of some queries, the first of which stands at the key `offset`."""
    # What is fp32 here stays so, also where the model computes under autocast.
    with torch.autocast(student.query.device.type, enabled=False):
        wanted, wanted_sink, _ = _log_weights(teacher, offset)
        found, found_sink, slope = _log_weights(student, offset)
        wanted_weights = wanted.exp()
        apart = torch.where(wanted_weights > 0, wanted_weights * (wanted - found), 0.0).sum(dtype=torch.float64)
        if wanted_sink is not None and found_sink is not None:
            apart += (wanted_sink.exp() * (wanted_sink - found_sink)).sum(dtype=torch.float64)
        # Of the scores: a softmax's own gradient, whether or not a sink takes part in it.
        pull = (found.exp() - wanted_weights) * student.scaling
        if slope is not None:
            pull *= slope
        num_kv, num_queries = len(student.key), student.query.shape[1]
        pull = pull.reshape(num_kv, -1, pull.shape[-1])  # [KV, G·Q, K]
        query_grad = (pull @ student.key).reshape(student.query.shape)
        key_grad = pull.transpose(-1, -2) @ _grouped(student.query, num_kv)
        assert query_grad.shape[1] == num_queries
        return apart, query_grad, key_grad


def _log_weights(layer: Attended, offset: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Logarithms of attention weights [H, Q, K] and of the sink's [H, Q, 1]; the slope of the cap."""
    num_heads, num_queries, _ = layer.query.shape
    scores = _grouped(layer.query, len(layer.key)) @ layer.key.transpose(-1, -2) * layer.scaling
    scores = scores.reshape(num_heads, num_queries, -1)
    cap, slope = layer.rules.softcap, None
    if cap is not None:
        flat = torch.tanh(scores / cap)
        scores, slope = flat * cap, 1 - flat.square()
    seen = visible(num_queries, scores.shape[-1], offset, layer.rules.window, scores.device)
    scores = scores.masked_fill(~seen, -torch.inf)
    log_sum = scores.logsumexp(dim=-1, keepdim=True)
    if layer.sinks is None:
        return scores - log_sum, None, slope
    sink = layer.sinks.float().reshape(-1, 1, 1)
    log_sum = torch.logaddexp(log_sum, sink)
    return scores - log_sum, sink - log_sum, slope


def _grouped(query: Tensor, num_kv: int) -> Tensor:
    """Query heads beside the KV head they share, so that keys are not repeated: [KV, G·Q, D]."""
    return query.reshape(num_kv, -1, query.shape[-1])
