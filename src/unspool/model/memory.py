"""Memory settings of a training pass, which change what is held and not what comes out.

In: a model, a `MemoryPolicy`. Out: the same model with wrapped layers; weights and their names stay as they are.
Promise: loss and gradients are those without any of it: the same bits, or in tiles the same up to rounding.
Price: time; docs/memory.md says which.
Elsewhere: recompute.py, keep.py, offload.py, tiling.py, attention_parts.py do the work; loss.py has its own chunks.
"""

from typing import Any

from unspool.model.attention_parts import apply_attention_parts
from unspool.model.memory_policy import MemoryPolicy
from unspool.model.parts import check_token_part, layers_of, token_parts
from unspool.model.recompute import apply_recompute
from unspool.model.tiling import apply_tiles

__all__ = ["MemoryPolicy", "apply_memory"]


def apply_memory(model: Any, policy: MemoryPolicy) -> None:
    """Change `model` in place; once per model, after its positions and after compiling."""
    if policy == MemoryPolicy():
        return
    layers = layers_of(model)
    if policy.mlp_tiles is not None:
        for part in token_parts(model):
            check_token_part(part, model.config.hidden_size)
            apply_tiles(part, policy.mlp_tiles)
    keep_attention = policy.recompute == "keep-attention"
    if keep_attention or policy.attention_heads_at_once is not None:
        apply_attention_parts(layers, heads_at_once=policy.attention_heads_at_once)
    if policy.recompute != "none":
        policy.check_layers(len(layers))
        apply_recompute(layers, policy, next(model.parameters()).device)
