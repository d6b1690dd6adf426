"""Greedy answers to several questions on one context, which is read once.

In: token ids. Out: the ids that follow each question.
Promise: the same ids as decoding each question on its own; no question sees another.
Price: one sequence at a time, and the whole context in the cache.
"""

from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

# Bounds the activations of reading the context; the cache holds it all.
PREFILL_CHUNK = 8192


@torch.inference_mode()
def answer(
    model: Any,
    context_ids: np.ndarray,
    questions: list[np.ndarray],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
    prefill_chunk: int = PREFILL_CHUNK,
) -> list[list[int]]:
    """The most likely tokens after context + question, up to a stop token (left out) or `max_new_tokens`."""
    # Without a config every layer keeps all keys, so that any of them can be cropped back.
    cache = DynamicCache()
    for start in range(0, len(context_ids), prefill_chunk):
        _next_token(model, cache, context_ids[start : start + prefill_chunk])
    answers = []
    for question_ids in questions:
        generated: list[int] = []
        token = _next_token(model, cache, question_ids)
        while token not in stop_ids:
            generated.append(token)
            if len(generated) >= max_new_tokens:
                break
            token = _next_token(model, cache, np.array([token]))
        answers.append(generated)
        # A negative count removes that many; 0 would be "nothing" and a positive one was a length once.
        cache.crop(len(context_ids) - cache.get_seq_length())
    return answers


def _next_token(model: Any, cache: DynamicCache, ids: np.ndarray) -> int:
    """Append `ids` to the cache; the most likely token after them."""
    tokens = torch.from_numpy(ids.astype(np.int64))[None].to(model.device)
    seen = cache.get_seq_length()
    positions = torch.arange(seen, seen + len(ids), device=tokens.device)[None]
    out = model(input_ids=tokens, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return int(out.logits[0, -1].argmax())
