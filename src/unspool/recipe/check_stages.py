"""Check that every stage fits the model that it starts from, before the first one is trained.

The stages are applied to the model without its weights: RoPE settings, layers and names of parameters. Checks that
compute something with the weights run when a stage starts.
"""

import copy
import logging
import os
from typing import Any

from unspool.core.errors import ConfigError, UnspoolError
from unspool.models.config import SIZES, NewModel
from unspool.recipe.context import RunContext
from unspool.training.config import StageConfig

logger = logging.getLogger(__name__)

BASE = "base"
# Names of settings, with commas, whose effect on quality is not measured yet.
EXPERIMENTAL = "UNSPOOL_EXPERIMENTAL"
# Embeddings are the only weights that get memory, so the model is built with few.
FEW_TOKENS = {"vocab_size": 8, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


def check_stages(context: RunContext) -> None:
    """Raise ConfigError for the first stage that does not fit, with its name."""
    if not context.recipe.stages:
        return
    _check_precision(context)
    try:
        models = {BASE: _build(context.model)}
        previous = BASE
        for stage in context.recipe.stages:
            start = models[previous if stage.init == "previous" else stage.init]
            models[stage.name] = _apply(stage, copy.deepcopy(start))
            previous = stage.name
    except UnspoolError:
        raise
    except Exception as error:  # of any type: architectures differ, and the stage itself is checked when it starts
        logger.debug(f"stages are not checked before they start: {error!r}")


def _check_precision(context: RunContext) -> None:
    """Refuse FP8 unless it was asked for as an experiment, and on a device that has no FP8 products."""
    stages = [stage.name for stage in context.recipe.stages if stage.precision == "fp8"]
    if stages and "fp8" not in os.environ.get(EXPERIMENTAL, "").split(","):
        raise ConfigError(
            f"stage {stages[0]}: precision fp8 is an experiment: its speed and quality are not measured yet. Set the "
            f"environment variable {EXPERIMENTAL}=fp8 to try it, or precision to bf16."
        )
    if stages and context.ranks is not None:
        from unspool.models.fp8.support import refuse_device

        try:
            refuse_device(context.ranks.device)
        except ConfigError as error:
            raise ConfigError(f"stage {stages[0]}: {error}") from error


def _build(ref: str | NewModel) -> Any:
    """Build the recipe's model without weights, but with a few embeddings on the CPU, where RoPE tables are checked."""
    # Import late: these load torch.
    from transformers import AutoConfig

    from unspool.models.config import config_values
    from unspool.models.rotary import apply_head_bases
    from unspool.training.parallel.fsdp import build_empty

    if isinstance(ref, NewModel):
        rope = {"rope_type": "default", "rope_theta": ref.base}
        values = SIZES[ref.size] | {"max_position_embeddings": ref.context_length, "rope_parameters": rope}
        values |= {"model_type": "llama", "tie_word_embeddings": True}
    else:
        values = config_values(ref)
    bases = values.pop("head_bases", None)
    model = build_empty(AutoConfig.for_model(**values | FEW_TOKENS))
    model.get_input_embeddings().to_empty(device="cpu")
    model.tie_weights()
    if bases is not None:
        apply_head_bases(model, bases)
    return model


def _apply(stage: StageConfig, model: Any) -> Any:
    """Apply the settings of a stage that can be checked without weights; return the model for later stages."""
    from unspool.models.fp8.support import refuse_model
    from unspool.models.rotary import apply_head_bases, apply_rope, rope_shape
    from unspool.training.optim.updater import build_updater

    try:
        if stage.rope.needs_weights:
            settings = stage.rope.resolve(rope_shape(model.config), stage.context_length)
            if settings.head_bases is not None:
                apply_head_bases(model, settings.head_bases)
                model.config.max_position_embeddings = settings.max_positions
        else:
            # Folding a gain into weights computes with them.
            apply_rope(model, stage.rope.model_copy(update={"attention_scale": None}), stage.context_length)
        stage.memory.check_layers(len(model.base_model.layers))
        if stage.precision == "fp8":
            refuse_model(model, stage.bf16_layers)
        build_updater(stage, copy.deepcopy(model))
    except ConfigError as error:
        where = f"stage {stage.name}: "
        raise ConfigError(where + str(error).removeprefix(where)) from error
    if stage.export_context_length:
        model.config.max_position_embeddings = stage.export_context_length
    return model
