"""A folder that plain `transformers` loads: safetensors, config, tokenizer.

A base per head cannot be said in a `transformers` config. Such a folder gets a model_type and an architecture that no
engine knows, so that loading it elsewhere fails instead of silently computing other positions, and modeling_harpe.py,
with which `transformers` loads it when the user allows its code.
Elsewhere: whether it loads as it should (plain.py); the model card (report/card.py).
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unspool.base.artefact import write_atomic
from unspool.model import modeling_harpe
from unspool.model.rotary import head_bases
from unspool.position.rope import old_fields

HARPE_TYPE = modeling_harpe.MODEL_TYPE
# What config.json of such a folder says besides what that of the plain architecture does, or says otherwise.
HARPE_KEYS = ("model_type", "plain_type", "head_bases", "auto_map", "architectures")


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
        config |= _harpe_config(config["model_type"], bases)
        shutil.copyfile(modeling_harpe.__file__, folder / Path(modeling_harpe.__file__).name)
    else:
        config = _for_old_readers(config)
    write_atomic(path, json.dumps(config, indent=2, sort_keys=True) + "\n")


def _harpe_config(plain_type: str, bases: Any) -> dict[str, Any]:
    file = Path(modeling_harpe.__file__).stem
    model, config = modeling_harpe.HarpeForCausalLM.__name__, modeling_harpe.HarpeConfig.__name__
    return {
        "model_type": HARPE_TYPE,
        "plain_type": plain_type,
        "head_bases": bases,
        # Converters and engines also go by this name alone, so it must not be that of the plain architecture.
        "architectures": [model],
        "auto_map": {"AutoConfig": f"{file}.{config}", "AutoModelForCausalLM": f"{file}.{model}"},
    }


def _for_old_readers(config: dict[str, Any]) -> dict[str, Any]:
    """`config` with its RoPE settings also in the words of before transformers v5, where these can say them."""
    parameters = config.get("rope_parameters")
    fields = (old_fields(parameters) if parameters else None) or {}
    # What an earlier export wrote into the config must not outlive the settings it repeats.
    return {key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling")} | fields


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
