"""Whether a stage fits the ranks it is to be trained on, before any weight is loaded.

In: a stage, its model's config, its rows. Out: nothing, or a sentence with the values that would fit.
Elsewhere: the rules (parallel_config.py).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from unspool.core.errors import ConfigError
from unspool.data.mixture import ModelShape
from unspool.data.packing.store import RowSet
from unspool.models.config import SIZES, NewModel
from unspool.models.tokenizer import location
from unspool.training.batch import attended_by
from unspool.training.config import StageConfig
from unspool.training.parallel.config import Layout, Work, check_layout, settle_layout


def check_fit(stage: StageConfig, model: str | NewModel, rows: Mapping[str, RowSet], *, world_size: int) -> Layout:
    """The stage's layout for so many ranks, unless something does not divide among them."""
    layout = settle_layout(stage.parallel, world_size)
    if world_size == 1:
        return layout
    heads = read_heads(model)
    work = Work(
        num_heads=heads[0],
        num_kv_heads=heads[1],
        context_length=stage.context_length,
        batch_tokens=stage.batch_tokens,
        micro_batch_tokens=stage.micro_batch_tokens or stage.context_length,
        # Looking at every row takes a while, and only a ring wants to know.
        document_masks=layout.ring > 1 and has_document_masks(stage, rows),
        kv_heads_at_once=stage.attention_heads_at_once,
    )
    check_layout(layout, work)
    if stage.samples and stage.parallel.offload:
        raise ConfigError(
            f"stage {stage.name}: samples cannot be written while weights wait in host memory (parallel.offload); "
            "leave one of them out."
        )
    if stage.samples and layout.sequence_ranks > 1:
        raise ConfigError(
            f"stage {stage.name}: samples cannot be written while ranks share a row (ring × ulysses = "
            f"{layout.sequence_ranks}), since what is written grows by a token at a time; leave samples out, or set "
            "ulysses and ring to 1."
        )
    return layout


def has_document_masks(stage: StageConfig, rows: Mapping[str, RowSet]) -> bool:
    """Whether some micro-batch of one context can hold documents that must not see each other."""
    if any(row_set.row_len < stage.context_length for row_set in rows.values()):
        return True
    return any(
        len(attended_by(row_set[index], stage.attention)) > 1
        for row_set in rows.values()
        for index in range(len(row_set))
    )


def read_heads(model: str | NewModel) -> tuple[int, int]:
    """Query and KV heads, from the config alone."""
    found = _config(model)
    heads = int(found["num_attention_heads"])
    return heads, int(found.get("num_key_value_heads") or heads)


def model_shape(model: Any) -> ModelShape:
    """What a loaded model's rows cost."""
    config = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return ModelShape(
        num_layers=config.num_hidden_layers,
        attention_width=config.num_attention_heads * head_dim,
        num_params=sum(parameter.numel() for parameter in model.parameters()),
    )


def _config(model: str | NewModel) -> dict[str, Any]:
    if isinstance(model, NewModel):
        return SIZES[model.size]
    path = Path(model) / "config.json"
    # A folder of ours may name a model_type that only we know, so its file is read as it is.
    if path.is_file():
        found: dict[str, Any] = json.loads(path.read_text())
        return {**found, **(found.get("text_config") or {})}
    own: dict[str, Any] = (
        AutoConfig.from_pretrained(**location(model), trust_remote_code=False).get_text_config().to_dict()
    )
    return own
