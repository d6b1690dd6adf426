"""A folder that plain `transformers` loads: safetensors, config, tokenizer.

A base per head cannot be said in a `transformers` config. Such a folder gets a model_type that no
engine knows, so that loading it elsewhere fails instead of silently computing other positions.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unspool.base.artefact import write_atomic
from unspool.model.rotary import head_bases

HARPE_TYPE = "unspool_harpe"


def save_model(model: Any, tokenizer: Any, folder: Path, *, dtype: torch.dtype) -> None:
    """Write `model` and `tokenizer` to `folder` in `dtype`; the model itself is left as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, state_dict=_converted(model, dtype))
    # Whoever asks the tokenizer to truncate would otherwise get texts cut to the old context.
    tokenizer.model_max_length = max(tokenizer.model_max_length, model.config.max_position_embeddings)
    tokenizer.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    # `save_pretrained` writes the dtype of the model in memory, which engines would take for that of the file.
    config["dtype"] = str(dtype).removeprefix("torch.")
    bases = head_bases(model)
    if bases is not None:
        config |= {"plain_type": config["model_type"], "model_type": HARPE_TYPE, "head_bases": bases}
    write_atomic(path, json.dumps(config, indent=2, sort_keys=True) + "\n")


def _converted(model: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights in `dtype`; those that share memory still do, so that tied ones are written once."""
    converted: dict[tuple[int, torch.Size], Tensor] = {}
    weights = {}
    for name, tensor in model.state_dict().items():
        key = tensor.data_ptr(), tensor.shape
        if key not in converted:
            converted[key] = tensor.to(dtype) if tensor.is_floating_point() else tensor
        weights[name] = converted[key]
    return weights
