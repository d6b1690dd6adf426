"""Which head a model has: its weight and bias, and what it does to the logits afterwards.

Promise: read from the config alone; trial.py confirms it by the model's own logits before anything relies on it.
"""

from typing import Any

from unspool.model.loss import Head

# Fields of configs that change logits, and whether they multiply or divide (Cohere; Granite).
_FACTORS = {"logit_scale": 1, "logits_scaling": -1}


def read_head(model: Any) -> Head:
    """The head as the loss needs it."""
    layer = model.get_output_embeddings()
    config = model.config.get_text_config()
    scale = 1.0
    for name, power in _FACTORS.items():
        factor = getattr(config, name, None)
        if factor:
            scale *= float(factor) ** power
    cap = getattr(config, "final_logit_softcapping", None)
    return Head(
        weight=layer.weight,
        bias=getattr(layer, "bias", None),
        scale=scale,
        softcap=float(cap) if cap else None,
    )
