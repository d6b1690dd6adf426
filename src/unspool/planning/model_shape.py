"""The shape of the model that a recipe trains, also where the model itself is not on this machine.

In: a loaded recipe, and what `--model` says. Out: `PlannedModel`: its config as a plain dict, its `Shape`, and where
that is known from.
It is looked for in this order: the config in a folder, a file or the Hub's cache; the model of the run that is to make
it, where the recipe starts from an earlier run; the shapes of SHAPES, as their makers published them; the Hub.
Price: decoders of Llama's kind. Mixtures of experts are refused.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from unspool.core.errors import ConfigError
from unspool.models.config import SIZES, NewModel, config_values
from unspool.planning.cost import Shape
from unspool.recipe.launch import cached_config
from unspool.recipe.load import HUB_ID, LoadedRecipe, load_recipe
from unspool.recipe.paths import bundled_recipes

# runs/NAME/stages/STAGE/model, as `unspool run` lays it out.
OF_A_RUN = re.compile(r"(?P<run>.*?(?P<name>[^/]+))/stages/[^/]+/model/?")
# Recipes that start from each other.
MOST_STEPS = 8


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    shape: Shape
    values: dict[str, Any]
    origin: str  # where the shape is known from


def _published(
    vocabulary: int,
    hidden: int,
    inner: int,
    layers: int,
    heads: tuple[int, int],
    base: float,
    context: int,
    **more: Any,
) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "rope_theta": base,
        "max_position_embeddings": context,
    } | more


TIED = {"tie_word_embeddings": True}
# By a pattern of the Hub id; the first that fits counts.
SHAPES = {
    r"llama-3\.2-1b": _published(128_256, 2048, 8192, 16, (32, 8), 5e5, 131_072, **TIED),
    r"llama-3\.2-3b": _published(128_256, 3072, 8192, 28, (24, 8), 5e5, 131_072, **TIED),
    r"llama-3\.1-8b": _published(128_256, 4096, 14_336, 32, (32, 8), 5e5, 131_072),
    r"llama-3\.[13]-70b": _published(128_256, 8192, 28_672, 80, (64, 8), 5e5, 131_072),
    r"llama-3-8b": _published(128_256, 4096, 14_336, 32, (32, 8), 5e5, 8192),
    r"llama-3-70b": _published(128_256, 8192, 28_672, 80, (64, 8), 5e5, 8192),
    r"llama-2-7b": _published(32_000, 4096, 11_008, 32, (32, 32), 1e4, 4096),
    r"llama-2-13b": _published(32_000, 5120, 13_824, 40, (40, 40), 1e4, 4096),
    r"mistral-7b": _published(32_768, 4096, 14_336, 32, (32, 8), 1e6, 32_768),
    r"qwen2(\.5)?-7b": _published(152_064, 3584, 18_944, 28, (28, 4), 1e6, 32_768),
    r"qwen2(\.5)?-1\.5b": _published(151_936, 1536, 8960, 28, (12, 2), 1e6, 32_768, **TIED),
    r"qwen2(\.5)?-0\.5b": _published(151_936, 896, 4864, 24, (14, 2), 1e6, 32_768, **TIED),
    r"smollm2-135m": _published(49_152, 576, 1536, 30, (9, 3), 1e5, 8192, **TIED),
    r"smollm2-360m": _published(49_152, 960, 2560, 32, (15, 5), 1e5, 8192, **TIED),
    r"smollm2-1\.7b": _published(49_152, 2048, 8192, 24, (32, 32), 1.3e5, 8192, **TIED),
}


def planned_model(loaded: LoadedRecipe, given: str | None = None) -> PlannedModel:
    """`given` is `--model`: what to read the shape from instead of the recipe's own model."""
    model: str | NewModel = given or loaded.recipe.model
    for _ in range(MOST_STEPS):
        if isinstance(model, NewModel):
            return _new(loaded, model)
        ref = loaded.path(model)
        values = cached_config(ref)
        if values is not None:
            return PlannedModel(shape=shape_of(values, model), values=values, origin=f"the config of {model}")
        started = _start_of(loaded, model)
        if started is not None:
            loaded, model = started
            continue
        known = next((shape for pattern, shape in SHAPES.items() if re.search(pattern, model.lower())), None)
        if known is not None:
            return PlannedModel(shape=shape_of(known, model), values=known, origin=f"{model}, as published")
        return _from_hub(ref, model)
    raise ConfigError(f"model {model}: recipes that start from each other go round in a circle; use --model CONFIG.")


def _new(loaded: LoadedRecipe, model: NewModel) -> PlannedModel:
    path = Path(loaded.path(model.tokenizer)) / "tokenizer.json"
    values = SIZES[model.size] | {"rope_theta": model.base, "max_position_embeddings": model.context_length}
    words = _vocabulary(path)
    if words is None:
        raise ConfigError(
            f"model.tokenizer {model.tokenizer}: there is no tokenizer.json to count words in; correct the path."
        )
    values |= {"vocab_size": words}
    return PlannedModel(shape=shape_of(values, model.size), values=values, origin=f"a new model of size {model.size}")


def _vocabulary(path: Path) -> int | None:
    if not path.is_file():
        return None
    return int(Tokenizer.from_file(str(path)).get_vocab_size())


def _start_of(loaded: LoadedRecipe, model: str) -> tuple[LoadedRecipe, str | NewModel] | None:
    """The recipe of the run that makes this model, and what it starts from."""
    match = OF_A_RUN.fullmatch(model)
    if match is None:
        return None
    written = Path(loaded.path(match["run"])) / "recipe.yaml"
    if written.is_file():
        earlier = load_recipe(written)
    elif match["name"] in bundled_recipes():
        earlier = load_recipe(match["name"])
    else:
        return None
    return earlier, earlier.recipe.model


def _from_hub(ref: str, model: str) -> PlannedModel:
    if model.startswith((".", "/", "~")) or not HUB_ID.fullmatch(ref):
        raise ConfigError(
            f"model {model} is not here, so its shape is not known; give its config by --model FOLDER or a Hub id."
        )
    try:
        values = config_values(ref)
    except ConfigError as error:
        raise ConfigError(f"{error} Give the config of a model of the same shape by --model.") from None
    return PlannedModel(shape=shape_of(values, model), values=values, origin=f"the Hub's config of {model}")


def shape_of(values: dict[str, Any], model: str) -> Shape:
    if any(values.get(name) for name in ("num_local_experts", "num_experts", "n_routed_experts")):
        raise ConfigError(
            f"model {model} is a mixture of experts, whose memory and time are not planned yet; `unspool train` shows "
            "both after a few steps."
        )
    missing = [name for name in ("hidden_size", "num_hidden_layers", "intermediate_size") if not values.get(name)]
    if missing:
        raise ConfigError(f"model {model}: its config has no {missing[0]}, so it cannot be planned; use --model.")
    heads = int(values["num_attention_heads"])
    hidden = int(values["hidden_size"])
    return Shape(
        num_layers=int(values["num_hidden_layers"]),
        hidden=hidden,
        intermediate=int(values["intermediate_size"]),
        num_heads=heads,
        num_kv_heads=int(values.get("num_key_value_heads") or heads),
        head_dim=int(values.get("head_dim") or hidden // heads),
        vocabulary=int(values["vocab_size"]),
        tied=bool(values.get("tie_word_embeddings")),
    )
