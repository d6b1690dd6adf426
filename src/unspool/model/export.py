"""A folder that plain `transformers` loads: safetensors, config, tokenizer.

A base per head cannot be said in a `transformers` config. Such a folder gets a model_type that no
engine knows, so that loading it elsewhere fails instead of silently computing other positions.
"""

import json
from pathlib import Path
from typing import Any

import torch

from unspool.base.artefact import write_atomic
from unspool.model.rotary import head_bases

HARPE_TYPE = "unspool_harpe"


def save_model(model: Any, tokenizer: Any, folder: Path, *, dtype: torch.dtype) -> None:
    """Write `model` and `tokenizer` to `folder` in `dtype`; the model itself is left as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    own_dtype = model.config.dtype
    model.config.dtype = dtype
    try:
        model.save_pretrained(folder, state_dict=weights)
    finally:
        model.config.dtype = own_dtype
    tokenizer.save_pretrained(folder)
    bases = head_bases(model)
    if bases is not None:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        config |= {"plain_type": config["model_type"], "model_type": HARPE_TYPE, "head_bases": bases}
        write_atomic(path, json.dumps(config, indent=2, sort_keys=True) + "\n")
