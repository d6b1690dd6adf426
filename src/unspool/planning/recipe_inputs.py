"""Inputs of a recipe: the shape of its model, and tokens, epochs and document lengths of its stages.

The model's shape comes from the first of these: the config in a folder, a file or the Hub's cache; the recipe of the
earlier run that makes the model; the published shapes in SHAPES; the Hub.

Tokens and lengths in the run folder are counted. If they do not exist yet, tokens are estimated from file sizes or
limits, and lengths from the packing, with ASSUMED tokens per packed document. Unknown numbers are reported as unknown.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from unspool.core.artifacts import read_manifest
from unspool.core.errors import ConfigError
from unspool.core.sizes import format_count, format_size
from unspool.data.mixture import Mix, epoch_warnings
from unspool.data.packing.config import DatasetConfig
from unspool.data.packing.row import attended_lens
from unspool.data.packing.store import RowSet, open_rows
from unspool.data.sources.base import Source
from unspool.models.config import SIZES, NewModel, config_values
from unspool.models.location import HUB_ID
from unspool.planning.cost import Shape
from unspool.planning.step_time import Documents, Windows, documents
from unspool.recipe.launch import cached_config
from unspool.recipe.load import LoadedRecipe, load_recipe
from unspool.recipe.paths import bundled_recipes
from unspool.training.config import StageConfig

# runs/NAME/stages/STAGE/model, the layout of `unspool run`.
OF_A_RUN = re.compile(r"(?P<run>.*?(?P<name>[^/]+))/stages/[^/]+/model/?")
# Maximum length of a chain of recipes that start from each other.
MAX_CHAIN = 8


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    shape: Shape
    values: dict[str, Any]
    origin: str  # origin of the shape

    @property
    def windows(self) -> Windows | None:
        """Return the sliding windows; None if every layer has full attention."""
        size, layers = self.values.get("sliding_window"), self.values.get("layer_types")
        if not size or (not layers and not self.values.get("use_sliding_window", True)):
            return None
        # Without layer types, a window applies to all layers.
        share = layers.count("sliding_attention") / len(layers) if layers else 1.0
        return Windows(size=int(size), share=share) if share else None


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
_LLAMA_3_70B = _published(128_256, 8192, 28_672, 80, (64, 8), 5e5, 131_072)
_QWEN2_7B = _published(152_064, 3584, 18_944, 28, (28, 4), 1e6, 32_768)
_QWEN2_1_5B = _published(151_936, 1536, 8960, 28, (12, 2), 1e6, 32_768, **TIED)
_QWEN2_0_5B = _published(151_936, 896, 4864, 24, (14, 2), 1e6, 32_768, **TIED)
_THREE_WINDOWS_IN_FOUR = {
    "sliding_window": 4096,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8,
}
# By a part of the path or Hub id; the first match is used.
SHAPES = {
    "llama-3.2-1b": _published(128_256, 2048, 8192, 16, (32, 8), 5e5, 131_072, **TIED),
    "llama-3.2-3b": _published(128_256, 3072, 8192, 28, (24, 8), 5e5, 131_072, **TIED),
    "llama-3.1-8b": _published(128_256, 4096, 14_336, 32, (32, 8), 5e5, 131_072),
    "llama-3.1-70b": _LLAMA_3_70B,
    "llama-3.3-70b": _LLAMA_3_70B,
    "llama-3-8b": _published(128_256, 4096, 14_336, 32, (32, 8), 5e5, 8192),
    "llama-3-70b": _published(128_256, 8192, 28_672, 80, (64, 8), 5e5, 8192),
    "llama-2-7b": _published(32_000, 4096, 11_008, 32, (32, 32), 1e4, 4096),
    "llama-2-13b": _published(32_000, 5120, 13_824, 40, (40, 40), 1e4, 4096),
    "mistral-7b": _published(32_768, 4096, 14_336, 32, (32, 8), 1e6, 32_768),
    # Before its long-context stage, which `olmo3-64k` repeats.
    "olmo-3-7b-midtrained": _published(100_278, 4096, 11_008, 32, (32, 32), 5e5, 8192, **_THREE_WINDOWS_IN_FOUR),
    "qwen2-7b": _QWEN2_7B,
    "qwen2.5-7b": _QWEN2_7B,
    "qwen2-1.5b": _QWEN2_1_5B,
    "qwen2.5-1.5b": _QWEN2_1_5B,
    "qwen2-0.5b": _QWEN2_0_5B,
    "qwen2.5-0.5b": _QWEN2_0_5B,
    "smollm2-135m": _published(49_152, 576, 1536, 30, (9, 3), 1e5, 8192, **TIED),
    "smollm2-360m": _published(49_152, 960, 2560, 32, (15, 5), 1e5, 8192, **TIED),
    "smollm2-1.7b": _published(49_152, 2048, 8192, 24, (32, 32), 1.3e5, 8192, **TIED),
}


_WHAT_TO_GIVE = f"give a folder or Hub id with its config as `model`, or a model of the same shape: {', '.join(SHAPES)}"


def planned_model(loaded: LoadedRecipe, given: str | None = None) -> PlannedModel:
    """Find the shape of the recipe's model, or of `given`, the value of `--model`."""
    model: str | NewModel = given or loaded.recipe.model
    for _ in range(MAX_CHAIN):
        if isinstance(model, NewModel):
            return _new(loaded, model)
        ref = loaded.path(model) if OF_A_RUN.fullmatch(model) else loaded.model_path(model)
        values = cached_config(ref)
        if values is not None:
            return PlannedModel(shape=shape_of(values, model), values=values, origin=f"the config of {model}")
        started = _start_of(loaded, model)
        if started is not None:
            loaded, model = started
            continue
        known = next((shape for name, shape in SHAPES.items() if name in model.lower()), None)
        if known is not None:
            return PlannedModel(shape=shape_of(known, model), values=known, origin=f"{model}, as published")
        return _from_hub(ref, model)
    raise ConfigError(f"model {model}: recipes start from each other in a circle; give its config as `model`.")


def _new(loaded: LoadedRecipe, model: NewModel) -> PlannedModel:
    path = Path(loaded.model_path(model.tokenizer)) / "tokenizer.json"
    values = SIZES[model.size] | {"rope_theta": model.base, "max_position_embeddings": model.context_length}
    words = _vocabulary(path)
    if words is None:
        raise ConfigError(
            f"model.tokenizer {model.tokenizer}: it has no tokenizer.json, so its size is unknown; correct the path."
        )
    values |= {"vocab_size": words}
    return PlannedModel(shape=shape_of(values, model.size), values=values, origin=f"a new model of size {model.size}")


def _vocabulary(path: Path) -> int | None:
    if not path.is_file():
        return None
    return int(Tokenizer.from_file(str(path)).get_vocab_size())


def _start_of(loaded: LoadedRecipe, model: str) -> tuple[LoadedRecipe, str | NewModel] | None:
    """Find the recipe of the run that makes this model, and the model that it starts from."""
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
        raise ConfigError(f"model {model}: not found, so its shape is unknown; {_WHAT_TO_GIVE}.")
    try:
        values = config_values(ref)
    except ConfigError as error:
        raise ConfigError(f"{error} Or {_WHAT_TO_GIVE}.") from None
    return PlannedModel(shape=shape_of(values, model), values=values, origin=f"the Hub's config of {model}")


def shape_of(values: dict[str, Any], model: str) -> Shape:
    if any(values.get(name) for name in ("num_local_experts", "num_experts", "n_routed_experts")):
        raise ConfigError(
            f"model {model} is a mixture of experts, which `plan` does not support; `unspool train` prints memory and "
            "time after a few steps."
        )
    missing = [name for name in ("hidden_size", "num_hidden_layers", "intermediate_size") if not values.get(name)]
    if missing:
        raise ConfigError(
            f"model {model}: its config has no {missing[0]}, so it cannot be planned; give the config of a similar "
            "model as `model`."
        )
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


# Data


# Tokens of a packed document that is not counted yet, such as a web page.
ASSUMED = 1024
# Number of rows to read, evenly spaced, if there are more.
MAX_ROWS = 4096
COUNTED, ESTIMATED, UNKNOWN = "counted", "estimated", "unknown"


@dataclass(frozen=True, kw_only=True)
class Amount:
    """Tokens of a source or dataset; None if unknown."""

    tokens: int | None
    how: str  # counted | estimated | unknown
    why: str


@dataclass(frozen=True, kw_only=True)
class DatasetUse:
    """One dataset in one stage."""

    name: str
    share: float
    tokens: float
    available: Amount
    epochs: float | None
    document_len: float  # length of equal documents with the same attention cost
    window_len: float | None  # the same for layers with a sliding window; None without such layers
    lengths: str  # origin of the lengths


@dataclass(frozen=True, kw_only=True)
class SourceUse:
    """One source over all stages."""

    name: str
    tokens: float  # tokens that stages train on
    available: Amount
    epochs: float | None


@dataclass(frozen=True, kw_only=True)
class DataPlan:
    stages: dict[str, tuple[DatasetUse, ...]]
    sources: tuple[SourceUse, ...]
    documents: dict[str, Documents]  # documents of a whole step, by stage
    warnings: tuple[str, ...]

    def lengths_are_counted(self, stage: str) -> bool:
        return all(use.lengths.startswith(COUNTED) for use in self.stages[stage])


def plan_data(loaded: LoadedRecipe, windows: Windows | None = None) -> DataPlan:
    """Plan the data of every stage; `windows` are those of the model."""
    recipe = loaded.recipe
    amounts = {name: source_amount(loaded, name, source) for name, source in recipe.sources.items()}
    built = {name: _open(recipe.out / "datasets" / name, config) for name, config in recipe.datasets.items()}
    stages = {stage.name: tuple(_uses(loaded, stage, built, amounts, windows)) for stage in recipe.stages}
    drawn = dict.fromkeys(recipe.sources, 0.0)
    for uses in stages.values():
        for use in uses:
            shares = recipe.datasets[use.name].shares
            for source, share in shares.items():
                drawn[source] += use.tokens * share / sum(shares.values())
    sources = tuple(
        SourceUse(name=name, tokens=tokens, available=amounts[name], epochs=_ratio(tokens, amounts[name].tokens))
        for name, tokens in drawn.items()
        if tokens
    )
    whole = {
        stage.name: documents_of(stages[stage.name], windows).of(float(stage.batch_tokens)) for stage in recipe.stages
    }
    repeated = [warning for uses in stages.values() for warning in epoch_warnings(_known(uses))]
    return DataPlan(stages=stages, sources=sources, documents=whole, warnings=tuple(dict.fromkeys(repeated)))


def documents_of(uses: tuple[DatasetUse, ...], windows: Windows | None = None) -> Documents:
    """Return the documents of a stage's mix, per token."""
    total = sum(use.share for use in uses)
    inside = [use.share / total * use.window_len for use in uses if use.window_len is not None]
    return Documents(
        tokens=1.0,
        squares=sum(use.share / total * use.document_len for use in uses),
        windows=windows,
        windowed=sum(inside) if windows else None,
    )


def _known(uses: tuple[DatasetUse, ...]) -> dict[str, float]:
    return {use.name: use.epochs for use in uses if use.epochs is not None}


def _uses(
    loaded: LoadedRecipe,
    stage: StageConfig,
    built: dict[str, RowSet | None],
    amounts: dict[str, Amount],
    windows: Windows | None,
) -> Iterator[DatasetUse]:
    """Return the datasets of a stage's mix, in its order."""
    tokens = stage.steps * stage.batch_tokens
    total = sum(stage.mix.values())
    exact = _exact_epochs(loaded, stage, built)
    for name, weight in stage.mix.items():
        config, rows = loaded.recipe.datasets[name], built[name]
        share = weight / total
        available = _rows_amount(config, rows, amounts)
        docs, origin = _documents(config, rows, stage, loaded, windows)
        yield DatasetUse(
            name=name,
            share=share,
            tokens=share * tokens,
            available=available,
            epochs=exact.get(name) if exact else _ratio(share * tokens, available.tokens),
            document_len=docs.mean,
            window_len=docs.in_window / docs.tokens if windows else None,
            lengths=origin,
        )


def _exact_epochs(loaded: LoadedRecipe, stage: StageConfig, built: dict[str, RowSet | None]) -> dict[str, float]:
    """Return the epochs that the stage will report, if all its datasets are built."""
    rows = {name: built[name] for name in stage.mix}
    found = {name: row_set for name, row_set in rows.items() if row_set is not None}
    if len(found) < len(rows):
        return {}
    sizes = {name: len(row_set) for name, row_set in found.items()}
    lens = {name: row_set.row_len for name, row_set in found.items()}
    mix = Mix(stage.mix, sizes, lens, stage.context_length, loaded.recipe.seed)
    return mix.epochs(stage.steps * stage.batch_tokens // stage.context_length)


def _open(folder: Path, config: DatasetConfig) -> RowSet | None:
    """Open a dataset if it is built with the recipe's current seq_len."""
    if read_manifest(folder) is None or not any(folder.glob("rows-*.arrow")):
        return None
    rows = open_rows(folder)
    return rows if rows.row_len == config.seq_len else None


def _rows_amount(config: DatasetConfig, rows: RowSet | None, amounts: dict[str, Amount]) -> Amount:
    if rows is not None:
        return Amount(tokens=len(rows) * rows.row_len, how=COUNTED, why=f"{format_count(len(rows))} rows are packed")
    shares = config.shares
    total = sum(shares.values())
    # The source that runs out first ends the dataset.
    least = [
        (amounts[name].tokens or 0) * total / share
        for name, share in shares.items()
        if amounts[name].tokens is not None
    ]
    if len(least) < len(shares):
        missing = next(name for name in shares if amounts[name].tokens is None)
        return Amount(
            tokens=config.limit, how=ESTIMATED if config.limit else UNKNOWN, why=f"source {missing} is unknown"
        )
    tokens = int(min([*least, config.limit or float("inf")]))
    return Amount(tokens=tokens, how=ESTIMATED, why="from its sources")


def _documents(
    config: DatasetConfig, rows: RowSet | None, stage: StageConfig, loaded: LoadedRecipe, windows: Windows | None
) -> tuple[Documents, str]:
    """Return the spans that attend to themselves, and the origin of their lengths."""
    if rows is not None:
        every = max(1, len(rows) // MAX_ROWS)
        picked = [rows[index] for index in range(0, len(rows), every)]
        full = stage.attention == "full"
        lens = [attended_lens(row.doc_lens, "full" if full else row.attention) for row in picked]
        return documents(np.concatenate(lens), windows), f"{COUNTED} in {len(picked)} rows"
    whole = Documents(tokens=1.0, squares=float(config.seq_len), windows=windows)
    if stage.attention == "full" or config.attention == "full" or config.chunk_strategy:
        return whole, "full attention over rows"
    if config.packing == "single_doc":
        return whole, "one document fills a row"
    found = [_source_documents(loaded, name, config.seq_len, windows) for name in config.shares]
    shares = list(config.shares.values())
    mean = sum(share * docs.mean for share, (docs, _) in zip(shares, found, strict=True)) / sum(shares)
    inside = sum(share * docs.in_window for share, (docs, _) in zip(shares, found, strict=True)) / sum(shares)
    origins = dict.fromkeys(origin for _, origin in found)
    windowed = inside if windows else None
    return Documents(tokens=1.0, squares=mean, windows=windows, windowed=windowed), "; ".join(origins)


def _source_documents(loaded: LoadedRecipe, name: str, row_len: int, windows: Windows | None) -> tuple[Documents, str]:
    """Return one token of a source's documents, and the origin of their lengths."""
    source = loaded.recipe.sources[name]
    counts = (read_manifest(loaded.recipe.out / "corpus" / name) or {}).get("counts", {})
    lengths = counts.get("lengths")
    if lengths and sum(lengths["tokens"]):
        # Documents of one range of lengths count as equally long.
        groups = [
            Documents(tokens=tokens, squares=tokens * min(tokens / max(1, number), row_len), windows=windows)
            for tokens, number in zip(lengths["tokens"], lengths["documents"], strict=True)
            if tokens
        ]
        total = sum(lengths["tokens"])
        windowed = sum(group.in_window for group in groups) / total if windows else None
        squares = sum(group.squares for group in groups) / total
        return Documents(tokens=1.0, squares=squares, windows=windows, windowed=windowed), f"{COUNTED} in the corpus"
    expected = source.with_paths(loaded.path).estimate().document_len
    if expected is not None:
        return Documents(tokens=1.0, squares=min(expected, float(row_len)), windows=windows), "as generated"
    assumed = Documents(tokens=1.0, squares=float(min(ASSUMED, row_len)), windows=windows)
    return assumed, f"assumed: documents of {format_size(ASSUMED)}"


def source_amount(loaded: LoadedRecipe, name: str, source: Source) -> Amount:
    counts: dict[str, Any] = (read_manifest(loaded.recipe.out / "corpus" / name) or {}).get("counts", {})
    if counts.get("tokens"):
        return Amount(tokens=int(counts["tokens"]), how=COUNTED, why="the corpus is tokenized")
    expected = source.with_paths(loaded.path).estimate()
    how = UNKNOWN if expected.tokens is None else ESTIMATED
    return Amount(tokens=expected.tokens, how=how, why=expected.why)


def _ratio(used: float, available: int | None) -> float | None:
    return used / available if available else None
