"""Greedy answers to several questions: on one context, which is read once, or each a prompt of its own.

In: token ids. Out: the ids that follow each question.
Promise: the same ids as decoding each question on its own, up to rounding; no question sees another; logits are
made for last positions only.
Price: the whole context in the cache.
Elsewhere: who sees what while questions on a context are answered side by side (branches.py), prompts that have none in
common (decode.py), how much is read at a time (room.py).
"""

from collections.abc import Collection
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from unspool.models.generation.batch_limits import MOST_ROW_TOKENS, batches, chunk_len
from unspool.models.generation.batched import answer_batch
from unspool.models.generation.shared_prefix import Branches, can_batch, can_branch

# Tokens of questions that are answered side by side; more would cost more in wasted scores than they save.
MOST_OWN_TOKENS = 4096


class RoomyLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer with room for what is to come, so that no token costs a copy of the context."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, room: int) -> None:
        super().__init__()
        self._room = room
        self._kept: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if self._kept is None or end > self._kept[0].shape[-2]:
            grown = tuple(
                new.new_empty(*new.shape[:-2], self._room if end <= self._room else 2 * end, new.shape[-1])
                for new in (key_states, value_states)
            )
            for new, old in zip(grown, (self.keys, self.values), strict=True):
                new[..., :start, :] = old if start else new[..., :0, :]
            self._kept = (grown[0], grown[1])
        for kept, new in zip(self._kept, (key_states, value_states), strict=True):
            kept[..., start:end, :] = new
        self.keys, self.values = (kept[..., :end, :] for kept in self._kept)
        # The first time nothing stands before, and kernels like whole tensors.
        return (self.keys, self.values) if start else (key_states, value_states)


@torch.inference_mode()
def answer(
    model: Any,
    context_ids: np.ndarray,
    questions: list[np.ndarray],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
    prefill_chunk: int | None = None,
) -> list[list[int]]:
    """The most likely tokens after context + question, up to a stop token (left out) or `max_new_tokens`."""
    if not len(context_ids) and len(questions) > 1 and can_batch(model):
        return _in_batches(model, questions, max_new_tokens, stop_ids, prefill_chunk)
    longest = max(map(len, questions)) + max_new_tokens
    together = len(questions) > 1 and sum(map(len, questions)) <= MOST_OWN_TOKENS and can_branch(model)
    own = sum(map(len, questions)) + len(questions) * max_new_tokens if together else longest
    # Every layer keeps all keys, sliding windows too, so that any of them can be cropped back.
    cache = Cache(layer_class_to_replicate=partial(RoomyLayer, len(context_ids) + own))
    chunk = prefill_chunk or chunk_len(model, len(context_ids) + own)
    for start in range(0, len(context_ids), chunk):
        _next_token(model, cache, context_ids[start : start + chunk])
    if together:
        return _side_by_side(model, cache, questions, max_new_tokens, stop_ids)
    return [_alone(model, cache, ids, max_new_tokens, stop_ids, chunk) for ids in questions]


def _in_batches(
    model: Any,
    prompts: list[np.ndarray],
    max_new_tokens: int,
    stop_ids: Collection[int],
    prefill_chunk: int | None,
) -> list[list[int]]:
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "stop_ids": stop_ids}
    answers: list[list[int]] = [[] for _ in prompts]
    for some in batches(model, [len(ids) for ids in prompts], max_new_tokens):
        asked = [prompts[at] for at in some]
        if len(asked) == 1:
            # By itself a prompt need not be padded, and its keys may take all there is.
            found = answer(model, asked[0][:0], asked, **options, prefill_chunk=prefill_chunk)
        else:
            padded = len(asked) * (max(map(len, asked)) + max_new_tokens)
            row_tokens = prefill_chunk or min(MOST_ROW_TOKENS, chunk_len(model, padded))
            found = answer_batch(model, asked, **options, row_tokens=row_tokens)
        for at, ids in zip(some, found, strict=True):
            answers[at] = ids
    return answers


def _alone(
    model: Any, cache: Cache, ids: np.ndarray, max_new_tokens: int, stop_ids: Collection[int], chunk: int
) -> list[int]:
    before = cache.get_seq_length()
    generated: list[int] = []
    for start in range(0, len(ids), chunk):
        token = _next_token(model, cache, ids[start : start + chunk])
    while token not in stop_ids:
        generated.append(token)
        if len(generated) >= max_new_tokens:
            break
        token = _next_token(model, cache, np.array([token]))
    # A negative count removes that many; 0 would be "nothing" and a positive one was a length once.
    cache.crop(before - cache.get_seq_length())
    return generated


def _side_by_side(
    model: Any, cache: Cache, questions: list[np.ndarray], max_new_tokens: int, stop_ids: Collection[int]
) -> list[list[int]]:
    shared = cache.get_seq_length()
    lens = [len(ids) for ids in questions]
    branches = Branches(shared, model.device)
    owners = np.repeat(np.arange(len(lens)), lens)
    places = np.concatenate([np.arange(shared, shared + size) for size in lens])
    ends = np.cumsum(lens) - 1
    answers: list[list[int]] = [[] for _ in questions]
    with branches.attached(model):
        tokens = _next_tokens(model, cache, branches, np.concatenate(questions), owners, places, ends)
        active = list(range(len(lens)))
        while True:
            going = []
            for at, token in zip(active, tokens, strict=True):
                if token not in stop_ids:
                    answers[at].append(token)
                    if len(answers[at]) < max_new_tokens:
                        going.append(at)
            if not going:
                return answers
            active = going
            last = np.array([answers[at][-1] for at in active])
            places = np.array([shared + lens[at] + len(answers[at]) - 1 for at in active])
            tokens = _next_tokens(model, cache, branches, last, np.array(active), places, np.arange(len(active)))


def _next_tokens(
    model: Any,
    cache: Cache,
    branches: Branches,
    ids: np.ndarray,
    owners: np.ndarray,
    places: np.ndarray,
    ends: np.ndarray,
) -> list[int]:
    """Append tokens of several questions to the cache; the most likely token after each of those at `ends`."""
    tokens, whose, where, last = (_tensor(model, values) for values in (ids, owners, places, ends))
    branches.feed(whose, where)
    out = model(
        input_ids=tokens[None],
        position_ids=where[None],
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=last,
    )
    found: list[int] = out.logits[0].argmax(dim=-1).tolist()
    return found


def _next_token(model: Any, cache: Cache, ids: np.ndarray) -> int:
    """Append `ids` to the cache; the most likely token after them."""
    tokens = _tensor(model, ids)[None]
    seen = cache.get_seq_length()
    positions = torch.arange(seen, seen + len(ids), device=tokens.device)[None]
    out = model(input_ids=tokens, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return int(out.logits[0, -1].argmax())


def _tensor(model: Any, values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(model.device)
