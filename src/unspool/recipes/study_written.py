"""Each run of a study as a recipe of its own, which `unspool run` takes like any other.

In: a run's checked recipe. Out: `recipes/<arm>-s<seed>.yaml` in the study's folder.
Promise: it gives the same artefacts wherever it is read from: paths that the first recipe found beside itself are
written anew from where this one stands; all other values are those of the checked recipe, defaults included.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from unspool.base.artefact import digest, write_atomic
from unspool.recipes.check import EVAL_PATHS, LoadedRecipe, load_recipe
from unspool.recipes.lines import CoreDumper, Place
from unspool.recipes.paths import ASSET_PREFIX, expand_home, path_exists
from unspool.recipes.schema import Recipe
from unspool.recipes.shape import value_at
from unspool.recipes.study import Study, StudyRun

RECIPES = "recipes"
# Keys of sources and of evals that name files.
SOURCE_PATHS = ("path", "prose", "template")


def recipe_file(study: Study, run: StudyRun) -> Path:
    return study.out / RECIPES / f"{run.name}.yaml"


def write_recipes(study: Study) -> None:
    """All of them before the first is run, so that any can be taken elsewhere."""
    (study.out / RECIPES).mkdir(parents=True, exist_ok=True)
    for run in study.runs:
        path = recipe_file(study, run)
        text = _text(run.loaded, path.parent)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            write_atomic(path, text)
    wanted = {recipe_file(study, run) for run in study.runs}
    for path in (study.out / RECIPES).glob("*.yaml"):
        if path not in wanted:  # of an arm that the study no longer has
            path.unlink()


def load_written(study: Study, run: StudyRun) -> LoadedRecipe:
    return load_recipe(recipe_file(study, run))


def _text(loaded: LoadedRecipe, folder: Path) -> str:
    plain: dict[str, Any] = loaded.recipe.model_dump(mode="json", by_alias=True, exclude_none=True)
    for place in path_places(loaded.recipe):
        holder: Any = value_at(place[:-1], plain)
        holder[place[-1]] = _from(folder, holder[place[-1]], loaded.root)
    return yaml.dump(plain, Dumper=CoreDumper, sort_keys=False, allow_unicode=True, width=120)


def _from(folder: Path, value: str, root: Path) -> str:
    """A path as it reads from `folder`; what was not found beside the recipe is left as it is."""
    path = expand_home(value)
    if value.startswith(ASSET_PREFIX) or path.is_absolute() or root == Path() or not path_exists(str(root / path)):
        return value
    # Both resolved, since `..` after a link leads elsewhere.
    return os.path.relpath(root.resolve() / path, folder.resolve())


def path_places(recipe: Recipe) -> Iterator[Place]:
    """Where a recipe names files and folders of this machine."""
    yield ("model",) if isinstance(recipe.model, str) else ("model", "tokenizer")
    for name, source in recipe.sources.items():
        yield from (("sources", name, key) for key in SOURCE_PATHS if getattr(source, key, None))
    for name, rows in recipe.rows.items():
        if rows.negatives and rows.negatives.model:
            yield ("rows", name, "negatives", "model")
    for at, entry in enumerate(recipe.evals):
        yield from (("evals", at, key) for key in EVAL_PATHS if getattr(entry, key, None))
        yield from (("evals", at, "paths", name) for name in getattr(entry, "paths", {}))


def located(loaded: LoadedRecipe, value: str | None) -> str | None:
    """Where a path leads, whichever recipe names it; a Hub id is itself."""
    if value is None:
        return None
    path = loaded.path(value)
    return os.path.realpath(path) if path_exists(path) else path


def recipe_digest(loaded: LoadedRecipe, *, paths: bool = True) -> str:
    """Of what a run is, wherever its own folder lies; without `paths` also wherever its inputs lie."""
    plain = loaded.recipe.model_dump(mode="json", by_alias=True)
    plain["out"] = plain["engine"] = None
    for place in path_places(loaded.recipe):
        holder: Any = value_at(place[:-1], plain)
        holder[place[-1]] = located(loaded, holder[place[-1]]) if paths else None
    return digest(plain)
