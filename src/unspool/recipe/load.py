"""Load a recipe and check it: its values (`load_recipe`) and its inputs on this machine (`check_inputs`).

All problems are reported together, one line each: file and line, key, value, and what is allowed.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from unspool.core.config import did_you_mean
from unspool.core.errors import ConfigError
from unspool.evals.averaged_run import run_model_path
from unspool.evals.config import EvalConfig
from unspool.models.location import ASSET_PREFIX, HUB_ID, path_exists, resolve_path, suggestion
from unspool.models.weight_files import check_weights
from unspool.recipe.extends import read_recipe
from unspool.recipe.json_schema import dotted, misplaced_booleans, recipe_schema, refuse, validation_problems
from unspool.recipe.overrides import apply_overrides
from unspool.recipe.paths import SYNTH_PREFIX
from unspool.recipe.schema import Recipe, reference_problems
from unspool.recipe.yaml_lines import Marks, Place, Problem

# Changes to a recipe: `--set` strings such as `stages.0.lr=2e-5`, or values by their path.
Overrides = Mapping[str, Any] | Sequence[str] | None
# Evaluation keys whose value is a file.
EVAL_PATHS = ("text", "wording", "reference")
# A name with one of these suffixes is a file, although it could be a Hub id.
DATA_SUFFIXES = {".jsonl", ".json", ".txt", ".csv", ".tsv", ".parquet", ".zst", ".gz"}


@dataclass(frozen=True, kw_only=True)
class LoadedRecipe:
    """A recipe, with the folder for its relative paths and the lines of its keys."""

    recipe: Recipe
    root: Path  # relative paths are looked up here first
    text: str
    marks: Marks

    def path(self, value: str) -> str:
        if value.startswith(SYNTH_PREFIX):
            return str(self.recipe.out / "synth" / value.removeprefix(SYNTH_PREFIX))
        return resolve_path(value, self.root)

    def model_path(self, value: str) -> str:
        """Return the path or Hub id of a model or tokenizer; for a run or stage folder, its model."""
        return run_model_path(value, self.root)

    def generated(self, sources: Iterable[str]) -> list[str]:
        """Return the `synth` sets that these sources read, in the recipe's order."""
        paths = {path for name in sources for path in self.recipe.sources[name].paths.values()}
        return [name for name in self.recipe.synth if SYNTH_PREFIX + name in paths]

    def evals(self, after: str | None = None) -> list[EvalConfig]:
        """Return the recipe's evaluations, or those of one stage (or `base`), with resolved paths."""
        chosen = [entry for entry in self.recipe.evals if after is None or entry.after is None or after in entry.after]
        return [self._found(entry) for entry in chosen]

    def _found(self, entry: EvalConfig) -> EvalConfig:
        changed: dict[str, Any] = {key: self.path(value) for key in EVAL_PATHS if (value := getattr(entry, key, None))}
        paths: dict[str, str] = getattr(entry, "paths", {})
        if paths:
            changed["paths"] = {
                name: path if path.startswith("hub:") else self.path(path) for name, path in paths.items()
            }
        return entry.model_copy(update=changed) if changed else entry


def load_recipe(path_or_name: str | Path, overrides: Overrides = None) -> LoadedRecipe:
    """Load and check a recipe: a file or the name of a bundled one, with `--set` overrides applied.

    Raises ConfigError with one line per problem.
    """
    found = read_recipe(str(path_or_name))
    data, marks = found.data, found.marks
    problems = [*found.problems, *apply_overrides(data, marks, override_texts(overrides))]
    problems += misplaced_booleans(recipe_schema(), data)
    recipe = None
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        # In this order: of two messages about one place, the first is kept.
        problems += [*validation_problems(error, data), *reference_problems(data)]
    refuse(problems, marks, data)
    assert recipe is not None, "a recipe was refused without a message"
    return LoadedRecipe(recipe=recipe, root=found.root, text=found.text, marks=marks)


def override_texts(overrides: Overrides) -> list[str]:
    """Overrides as texts such as `stages.0.lr=2e-5`."""
    if isinstance(overrides, Mapping):
        # JSON is valid YAML, the syntax of override values.
        return [f"{key}={json.dumps(value, default=str)}" for key, value in overrides.items()]
    return list(overrides or [])


def check_inputs(loaded: LoadedRecipe) -> None:
    """Reject a recipe whose inputs are not on this machine, before any work."""
    checks = (_source_problems, _model_problems, _logger_problems, _eval_problems)
    problems = [problem for check in checks for problem in check(loaded)]
    refuse(problems, loaded.marks, loaded.recipe.model_dump(mode="json", by_alias=True))


def _source_problems(loaded: LoadedRecipe) -> Iterator[Problem]:
    for name, source in loaded.recipe.sources.items():
        for key, value in source.paths.items():
            if value.startswith(SYNTH_PREFIX):
                yield from _synth_problems(loaded, ("sources", name, key), value.removeprefix(SYNTH_PREFIX))
            elif not source.may_be_remote(value):
                yield from _missing(loaded, ("sources", name, key), value)


def _synth_problems(loaded: LoadedRecipe, place: Place, wanted: str) -> Iterator[Problem]:
    """Check a source that reads conversations generated by the same recipe."""
    sets = loaded.recipe.synth
    if wanted not in sets:
        known = f"Sets in this recipe: {', '.join(sets)}." if sets else "The recipe has no `synth`."
        yield Problem(place=place, text=f"{wanted!r} is not a set of `synth`{did_you_mean(wanted, sets)} {known}")
    if not loaded.recipe.sources[str(place[1])].is_chat:
        yield Problem(place=place, text="only sources of kind: chat can read the conversations of `synth`.")


def _logger_problems(loaded: LoadedRecipe) -> Iterator[Problem]:
    for index, stage in enumerate(loaded.recipe.stages):
        for name in stage.loggers:
            if find_spec(name) is None:
                text = f"{name} is not installed; run pip install 'unspool[track]', or remove it here."
                yield Problem(place=("stages", index, "loggers"), text=text)


def _eval_problems(loaded: LoadedRecipe) -> Iterator[Problem]:
    for index, entry in enumerate(loaded.recipe.evals):
        for key in EVAL_PATHS:
            if (value := getattr(entry, key, None)) is not None:
                yield from _missing(loaded, ("evals", index, key), value)
        for name, path in getattr(entry, "paths", {}).items():
            # The suite checks Hub ids. A name with the suffix of a data file is a file.
            is_file = Path(path).suffix in DATA_SUFFIXES
            if is_file or not (path.startswith("hub:") or HUB_ID.fullmatch(path)):
                yield from _missing(loaded, ("evals", index, "paths", name), path)


def _model_problems(loaded: LoadedRecipe) -> Iterator[Problem]:
    model = loaded.recipe.model
    place: Place = ("model",) if isinstance(model, str) else ("model", "tokenizer")
    yield from _folder_problems(loaded, place, model if isinstance(model, str) else model.tokenizer)
    for name, dataset in loaded.recipe.datasets.items():
        if dataset.score is not None and dataset.score.model is not None:
            yield from _folder_problems(loaded, ("datasets", name, "score", "model"), dataset.score.model)
        for strategy in dataset.strategies:
            if strategy.embedder is not None:
                yield from _folder_problems(loaded, ("datasets", name, strategy.name, "model"), strategy.embedder)


def _folder_problems(loaded: LoadedRecipe, place: Place, value: str) -> Iterator[Problem]:
    """Check a model or tokenizer that is on this machine; the key's name says which it is."""
    looks_like_path = value.startswith((ASSET_PREFIX, ".")) or value.endswith(".gguf") or not HUB_ID.fullmatch(value)
    if not looks_like_path and not path_exists(loaded.path(value)):
        return
    found = list(_missing(loaded, place, value))
    yield from (replace(problem, text=problem.text + suggestion(str(loaded.root / value))) for problem in found)
    if found:
        return
    try:
        folder = Path(loaded.model_path(value))
        if place[-1] == "model":
            check_weights(str(folder), digests=False)  # a run that reads the weights also checks their digests
    except ConfigError as error:
        yield Problem(place=place, text=str(error))
        return
    wanted = "config.json" if place[-1] == "model" else "tokenizer.json"
    if folder.is_dir() and not (folder / wanted).is_file():
        yield Problem(place=place, text=f"the folder has no {wanted}, so it is not a {place[-1]}.", show_value=True)


def _missing(loaded: LoadedRecipe, place: Place, value: str) -> Iterator[Problem]:
    try:
        path = loaded.path(value)
    except ConfigError as error:
        yield Problem(place=place, text=str(error))
        return
    if not path_exists(path):
        tried = " or ".join(dict.fromkeys(str(folder.absolute()) for folder in (loaded.root, Path())))
        at = "" if Path(path).is_absolute() else f" in {tried}"
        text = f"no such file or folder{at}; correct it, or give `overrides='{dotted(place)}=PATH'`."
        yield Problem(place=place, text=text, show_value=True)
