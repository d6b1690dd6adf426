"""What tests of positions share: families, plain settings, logits with and without a cache."""

import torch
from transformers import (
    DynamicCache,
)

from factory import random_tokens

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
FAMILIES = ["llama", "llama-mha", "qwen2", "qwen3", "mistral"]


def plain_rope(base: float, **more) -> dict:
    return {"rope_type": "default", "rope_theta": base, **more}


@torch.no_grad()
def logits(model, tokens=None) -> torch.Tensor:
    return model(input_ids=random_tokens(40) if tokens is None else tokens).logits


@torch.no_grad()
def decoded(model, tokens, first: int) -> torch.Tensor:
    """Logits with a cache: `first` tokens at once, then one by one."""
    cache, found = DynamicCache(), []
    for part in torch.split(tokens, [first] + [1] * (tokens.shape[1] - first), dim=1):
        seen = cache.get_seq_length()
        positions = torch.arange(seen, seen + part.shape[1])[None]
        found.append(model(input_ids=part, position_ids=positions, past_key_values=cache, use_cache=True).logits)
    return torch.cat(found, dim=1)
