"""Whether the stages of a recipe fit so many ranks, before anything is started.

In: a loaded recipe, the number of ranks. Out: one line per stage that says how it is spread, or a `ConfigError` with
the values that would fit.
Price: heads are only checked where the model's config can be read here: a new model, a folder, a file, or what the
Hub's cache holds; ranks check them again when they start.
"""

from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from unspool.base.errors import ConfigError
from unspool.base.sizes import format_size
from unspool.model.config import config_values
from unspool.model.scratch import SIZES
from unspool.recipes.check import HUB_ID, LoadedRecipe
from unspool.recipes.paths import path_exists
from unspool.train.config import StageConfig
from unspool.train.parallel_config import Layout, Work, check_layout, settle_layout


def check_layouts(loaded: LoadedRecipe, world_size: int) -> list[str]:
    """Refuse a stage that cannot be spread over `world_size` ranks."""
    heads = model_heads(loaded)
    lines = []
    for stage in loaded.recipe.stages:
        try:
            layout = settle_layout(stage.parallel, world_size)
            check_layout(layout, work_of(loaded, stage, heads))
        except ConfigError as error:
            raise ConfigError(f"stage {stage.name} on {world_size} ranks: {error}") from None
        lines.append(f"stage {stage.name}: {told(layout)}")
    return lines


def model_heads(loaded: LoadedRecipe) -> tuple[int, int] | None:
    """Query and KV heads of the recipe's model; None where its config is not on this machine."""
    model = loaded.recipe.model
    if not isinstance(model, str):
        shape = SIZES[model.size]
        return shape["num_attention_heads"], shape["num_key_value_heads"]
    ref = loaded.path(model)
    values = cached_config(ref)
    if values is None or "num_attention_heads" not in values:
        return None
    heads = int(values["num_attention_heads"])
    return heads, int(values.get("num_key_value_heads") or heads)


def cached_config(ref: str) -> dict[str, Any] | None:
    if not path_exists(ref):
        # Not the Hub itself: a launcher stands on a login node and must answer at once.
        cached = try_to_load_from_cache(ref, "config.json") if HUB_ID.fullmatch(ref) else None
        if not isinstance(cached, str):
            return None
        ref = str(Path(cached).parent)
    try:
        return config_values(ref)
    except ConfigError:
        return None


def work_of(loaded: LoadedRecipe, stage: StageConfig, heads: tuple[int, int] | None) -> Work:
    degree = stage.parallel.ulysses
    # As many as there are ranks fit any check of heads that cannot be made.
    num_heads, num_kv_heads = heads or (degree, degree)
    rows = [loaded.recipe.rows[name] for name in stage.mix]
    masks = stage.attention == "documents" and not all(
        entry.attention == "full" or entry.strategy is not None for entry in rows
    )
    return Work(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        context=stage.context,
        batch=stage.batch,
        micro_batch=stage.micro_batch or stage.context,
        document_masks=masks,
        kv_heads_at_once=stage.attention_heads_at_once if heads else None,
    )


def told(layout: Layout) -> str:
    axes = {name: getattr(layout, name) for name in ("replicate", "shard", "ring", "ulysses")}
    spread = " × ".join(f"{name} {size}" for name, size in axes.items() if size > 1) or "one rank"
    groups, ranks = format_size(layout.data_ranks), layout.sequence_ranks
    return f"{spread}; {groups} row{'s' * (layout.data_ranks > 1)} at a time, each on {ranks} rank{'s' * (ranks > 1)}"
