"""How much fits: tokens that are read at a time, prompts that are answered in one batch.

In: a model and lengths. Out: counts.
Promise: they depend on model, device and lengths, not on what else is in memory, so that the same questions give the
same answers again.
Elsewhere: who reads and answers (generate.py, decode.py).
"""

from dataclasses import dataclass
from typing import Any

import torch

# Bounds the activations of reading where memory is not known; the cache holds it all.
PREFILL_CHUNK = 8192
# Share of a GPU's memory that may be planned with; the rest is for what kernels and fragments take.
USABLE = 0.8
# Tokens of prompts that are read as documents of one row: from here on a longer one is no faster.
MOST_ROW_TOKENS = 1 << 17
# Prompts that are answered in one batch; by then a step is bound by reading their keys and no more by its launches.
MOST_PROMPTS = 64
# Of what weights leave, how much the keys of such a batch may take; reading the prompts needs the rest.
BATCH_SHARE = 0.5
# The same where memory is not known, in padded tokens: 3 GiB of SmolLM2-135M in fp32.
CPU_BATCH_TOKENS = 1 << 16


@dataclass(frozen=True)
class Costs:
    """In bytes."""

    weights: int
    kept_per_token: int  # keys and values of all layers
    read_per_token: int  # activations of one layer, while a token is read

    @classmethod
    def of(cls, model: Any) -> "Costs":
        config = model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        size = next(model.parameters()).element_size()
        # The stream and its norms, queries and attention's output, and the MLP's three wide tensors.
        wide = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        return cls(
            weights=sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()),
            kept_per_token=2 * config.num_hidden_layers * heads * dim * size,
            read_per_token=size * (8 * config.hidden_size + 4 * config.num_attention_heads * dim + 4 * wide),
        )


def chunk_len(model: Any, kept: int) -> int:
    """The most tokens to read at a time, beside a cache of `kept`: one long piece has the fastest kernels."""
    if model.device.type != "cuda":
        return PREFILL_CHUNK
    costs = Costs.of(model)
    left = _usable(model) - costs.weights - costs.kept_per_token * kept
    return int(max(1024, left // costs.read_per_token))


def batches(model: Any, lens: list[int], max_new_tokens: int) -> list[list[int]]:
    """Which prompts are answered in one batch: about equally long ones, as many as fit, the longest first."""
    left = sorted(range(len(lens)), key=lambda at: (-lens[at], at))
    tokens = _batch_tokens(model)
    found = []
    while left:
        most = min(MOST_PROMPTS, max(1, tokens // (lens[left[0]] + max_new_tokens)))
        # As equal as they can be: a last batch of one would take as many steps as a full one.
        size = -(-len(left) // -(-len(left) // most))
        found.append(left[:size])
        left = left[size:]
    return found


def rows(lens: list[int], most_tokens: int) -> list[range]:
    """Neighbours that are read together: as many as a row holds, at least one."""
    found: list[range] = []
    start = used = 0
    for at, length in enumerate(lens):
        if at > start and used + length > most_tokens:
            found.append(range(start, at))
            start, used = at, 0
        used += length
    return [*found, range(start, len(lens))]


def _batch_tokens(model: Any) -> int:
    if model.device.type != "cuda":
        return CPU_BATCH_TOKENS
    costs = Costs.of(model)
    return int(BATCH_SHARE * (_usable(model) - costs.weights) // costs.kept_per_token)


def _usable(model: Any) -> float:
    return USABLE * float(torch.cuda.get_device_properties(model.device).total_memory)
