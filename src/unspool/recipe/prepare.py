"""The steps of a run that need no model: tokenize the sources, pack the datasets."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from unspool.core.artifacts import read_manifest
from unspool.core.errors import ConfigError
from unspool.core.http_client import check_server
from unspool.data.corpus.build import build_corpus
from unspool.data.corpus.check import check_source
from unspool.data.corpus.executors import check_engine
from unspool.data.packing.build import build_rows
from unspool.data.packing.config import DatasetConfig
from unspool.models.location import location
from unspool.models.weight_files import check_weights, weight_files
from unspool.recipe.check_stages import check_stages
from unspool.recipe.context import RunContext
from unspool.recipe.document_scorer import SCORES, ModelScorer, check_scorer, score_sources, scorer_ref
from unspool.recipe.load import LoadedRecipe, check_inputs
from unspool.recipe.needs import tokens_needed
from unspool.recipe.packed_dataset import embedder
from unspool.synthesis.config import LocalGenerator, ServerGenerator

Counts = dict[str, dict[str, Any]]
REPLIES = "replies/synth.jsonl"  # of generators, in a run's folder; written by synthesis.py, which loads torch


def open_data_run(loaded: LoadedRecipe) -> RunContext:
    """Check a recipe's inputs and create its run folder; sufficient for `tokenize` and `pack`."""
    context = RunContext(loaded=loaded)
    check_data_inputs(context)
    context.start()
    return context


def check_data_inputs(context: RunContext) -> None:
    """Reject what would stop the run later: inputs that cannot be read or used here, and stages that do not fit.

    Runs before anything is written. Only a run with `ranks` reads weights, so only it checks them and its stages.
    """
    check_inputs(context.loaded)
    check_engine(context.recipe.engine)
    context.on_leader(lambda: _check(context))


def _check(context: RunContext) -> None:
    recipe, loaded, tokenizer = context.recipe, context.loaded, context.tokenizer
    models = {context.model: None} if context.ranks is not None and isinstance(context.model, str) else {}
    for name, dataset in recipe.datasets.items():
        if dataset.score is not None:
            ref = loaded.model_path(scorer_ref(dataset.score, recipe))
            check_scorer(dataset.score, ref, tokenizer, place=f"datasets.{name}.score")
            ModelScorer(ref, recipe.device)  # refuses a device that is not available
            models[ref] = None
        models |= dict.fromkeys(loaded.model_path(each.embedder) for each in dataset.strategies if each.embedder)
    for ref in models:
        check_model(ref)
    if context.ranks is not None:
        check_stages(context)
    used = _used_sources(context)
    check_generators(loaded, loaded.generated(used))
    for name in used:
        _check_source(context, name)


def check_model(ref: str) -> None:
    """Reject a model that is not on the Hub, or whose weights are missing or damaged."""
    location(ref)
    check_weights(ref)
    if Path(ref).is_dir():
        weight_files(Path(ref))


def check_generators(loaded: LoadedRecipe, names: Iterable[str]) -> None:
    """Reject models and servers of `synth` sets that cannot be used here; with saved replies, servers may be absent."""
    has_replies = (loaded.recipe.out / REPLIES).exists()
    for name in names:
        config = loaded.recipe.synth[name]
        for key, generator in (("generator", config.generator), ("judge", config.judge)):
            try:
                if isinstance(generator, LocalGenerator):
                    check_model(loaded.model_path(generator.model))
                elif isinstance(generator, ServerGenerator) and not has_replies:
                    check_server(generator.url)
            except ConfigError as error:
                raise ConfigError(f"synth.{name}.{key}: {error}") from error


def _used_sources(context: RunContext) -> list[str]:
    used = {source for config in context.recipe.datasets.values() for source in config.shares}
    return [name for name in context.recipe.sources if name in used]


def _check_source(context: RunContext, name: str) -> None:
    """Read the beginning of a source, unless its corpus is there or a set of the recipe is still to be generated."""
    source = context.recipe.sources[name].with_paths(context.loaded.path)
    if read_manifest(context.out / "corpus" / name) or context.loaded.generated([name]):
        return
    check_source(source, name=name, root=Path(), tokenizer=context.tokenizer, seed=context.recipe.seed)


def tokenize(context: RunContext) -> Counts:
    """Tokenize every source that some dataset uses; return the counts of each corpus."""

    def build_all() -> Counts:
        used = _used_sources(context)
        _synthesize(context, context.loaded.generated(used))
        return {name: build_source(context, name) for name in used}

    return context.on_leader(build_all)


def build_source(context: RunContext, name: str) -> dict[str, Any]:
    """Tokenize one source."""
    return context.build(
        f"corpus/{name}",
        lambda folder: build_corpus(
            context.recipe.sources[name].with_paths(context.loaded.path).limited(tokens_needed(context.recipe, name)),
            folder,
            tokenizer=context.tokenizer,
            root=Path(),
            engine=context.recipe.engine,
            seed=context.recipe.seed,
        ),
    )


def pack(context: RunContext) -> Counts:
    """Pack every dataset; return the counts of each."""

    def build_all() -> Counts:
        return {name: _pack_dataset(context, name) for name in context.recipe.datasets}

    return context.on_leader(build_all)


def _pack_dataset(context: RunContext, name: str) -> dict[str, Any]:
    config = context.recipe.datasets[name]
    corpora = {source: context.out / "corpus" / source for source in config.shares}
    scores = _score(context, config, corpora)
    return context.build(
        f"datasets/{name}",
        lambda folder: build_rows(
            config,
            corpora,
            folder,
            tokenizer=context.tokenizer,
            seed=context.recipe.seed,
            embed=embedder(config, context.tokenizer, context.loaded.model_path),
            scores=scores,
        ),
    )


def _score(context: RunContext, config: DatasetConfig, corpora: dict[str, Path]) -> dict[str, Path]:
    """Score the documents of a dataset with `score`; return the scores folder of each source."""
    if config.score is None:
        return {}

    def build(source: str, step: Callable[[Path], Any]) -> Path:
        folder = f"{SCORES}/{source}"
        context.build(folder, step)
        return context.out / folder

    scorer = ModelScorer(context.loaded.model_path(scorer_ref(config.score, context.recipe)), context.recipe.device)
    return score_sources(config, corpora, scorer=scorer, build=build)


def _synthesize(context: RunContext, sets: list[str]) -> None:
    """Generate the conversations that this recipe's sources read."""
    if not sets:
        return
    from unspool.recipe.synthesis import Synthesis  # import late: it loads torch

    synthesis = Synthesis(context.loaded, sets)
    synthesis.corpora()
    synthesis.make()
