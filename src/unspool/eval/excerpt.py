"""Both ends of a prompt as text, for people who read samples.

In: a prompt's token ids. Out: `{"prompt": {"start", "end", "cut_tokens"}}` to put into its sample.
Promise: the text is decoded from the ids that the model was given, control tokens included.
Price: only prompts of the longest length have it, so that samples.jsonl stays small.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

# The question stands at the end.
START_TOKENS, END_TOKENS = 100, 150


def excerpt(tokenizer: Any, length: int, lengths: Sequence[int], *parts: np.ndarray) -> dict[str, Any]:
    """Nothing for a prompt that is not of the longest of `lengths`."""
    if length < max(lengths):
        return {}
    ids = np.concatenate(parts).tolist()
    if len(ids) <= START_TOKENS + END_TOKENS:
        return {"prompt": {"start": tokenizer.decode(ids), "end": "", "cut_tokens": 0}}
    start, end = tokenizer.decode(ids[:START_TOKENS]), tokenizer.decode(ids[-END_TOKENS:])
    return {"prompt": {"start": start, "end": end, "cut_tokens": len(ids) - START_TOKENS - END_TOKENS}}
