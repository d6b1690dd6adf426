"""What the arms of a study have in common is made once: corpora, rows, the scores of the untouched model.

In: a run's recipe. Out: folders under the study's `shared/`, named by a hash of everything their content depends on,
and the same folders in each run, as hard links to the same files (copies where the disk has no links).
Promise: a run's folder is complete by itself and can be moved, copied or deleted; what is shared is checked against
its manifest each time, as in any run; what depends on the seed is shared under the same seed only. A kill leaves no
half-linked folder under a final name. Several processes may work on one study: they wait for each other here.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from unspool.core.artifacts import MANIFEST, digest, read_manifest, write_atomic
from unspool.models.config import NewModel
from unspool.recipe.context import RunContext, Share
from unspool.recipe.json_schema import value_at
from unspool.recipe.load import EVAL_PATHS, LoadedRecipe, load_recipe
from unspool.recipe.paths import ASSET_PREFIX, expand_home, path_exists
from unspool.recipe.run import BASE
from unspool.recipe.schema import Recipe
from unspool.recipe.yaml_lines import CoreDumper, Place
from unspool.studies.load import Study, StudyRun

# Each run of a study as a recipe of its own, which `unspool run` takes like any other.


RECIPES = "recipes"


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
        yield from (("sources", name, key) for key in source.paths)
    for name, dataset in recipe.datasets.items():
        for strategy in dataset.strategies:
            yield from (("datasets", name, strategy.name, key) for key in strategy.path_keys if getattr(strategy, key))
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


SHARED = "shared"
LOCK = ".lock"


def corpus_key(loaded: LoadedRecipe, name: str) -> str:
    source = loaded.recipe.sources[name]
    paths = {key: located(loaded, path) for key, path in source.paths.items()}
    seed = loaded.recipe.seed if source.seeded else None
    plain = source.model_dump(mode="json", exclude=set(source.path_keys))
    return digest([plain, paths, _tokenizer(loaded), seed])[:16]


def rows_key(loaded: LoadedRecipe, name: str) -> str:
    config = loaded.recipe.datasets[name]
    corpora = {source: corpus_key(loaded, source) for source in config.shares}
    paths = [located(loaded, getattr(strategy, key)) for strategy in config.strategies for key in strategy.path_keys]
    excluded = {strategy.name: set(strategy.path_keys) for strategy in config.strategies}
    plain = config.model_dump(mode="json", by_alias=True, exclude=excluded)
    return digest([plain, name, corpora, _tokenizer(loaded), paths, loaded.recipe.seed])[:16]


def base_scores_key(loaded: LoadedRecipe) -> str | None:
    """None where there is no model yet whose scores could be shared."""
    recipe = loaded.recipe
    if isinstance(recipe.model, NewModel) or not recipe.evals:
        return None
    evals = [entry.model_dump(mode="json", exclude={*EVAL_PATHS, "paths"}) for entry in recipe.evals]
    texts = [located(loaded, getattr(entry, key, None)) for entry in recipe.evals for key in EVAL_PATHS]
    files = [
        {name: located(loaded, path) for name, path in getattr(entry, "paths", {}).items()} for entry in recipe.evals
    ]
    return digest([located(loaded, recipe.model), evals, texts, files, recipe.seed, recipe.device])[:16]


def shared_boxes(loaded: LoadedRecipe) -> dict[str, str]:
    """Every box of a run that others may share: `corpus/books` and the like, with its key."""
    recipe = loaded.recipe
    used = {source for config in recipe.datasets.values() for source in config.shares}
    boxes = {f"corpus/{name}": corpus_key(loaded, name) for name in recipe.sources if name in used}
    boxes |= {f"datasets/{name}": rows_key(loaded, name) for name in recipe.datasets}
    scores = base_scores_key(loaded)
    return boxes | ({f"scores/{BASE}": scores} if scores else {})


def _tokenizer(loaded: LoadedRecipe) -> str | None:
    model = loaded.recipe.model
    return located(loaded, model.tokenizer if isinstance(model, NewModel) else model)


def share_between_runs(study_dir: Path) -> Share:
    """Build what runs of a study have in common once, in the study's folder, and link it into each run."""

    def share(context: RunContext, folder: str, build: Callable[[Path], Any]) -> Any:
        key = shared_boxes(context.loaded).get(folder)
        if key is None:
            return build(context.out / folder)
        kind, name = folder.split("/")
        shared = study_dir / SHARED / kind / key / name
        with locked(shared.parent):
            result = build(shared)
            lend(shared, context.out / folder)
        return result

    return share


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time; the system lets go of the lock however a process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def lend(shared: Path, own: Path) -> None:
    """Make `own` hold the files of `shared`, unless it already is what those inputs and settings give."""
    theirs, ours = read_manifest(shared), read_manifest(own)
    assert theirs is not None, shared
    if ours is not None and _same(theirs, ours) and _whole(own, ours):
        return
    draft = own.with_name(own.name + ".partial")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    for name in [*theirs["files"], MANIFEST]:
        target = draft / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            target.hardlink_to(shared / name)
        except OSError:  # another disk, or one without links
            shutil.copyfile(shared / name, target)
    # Nothing is lost if this is where it ends: the next run links again.
    shutil.rmtree(own, ignore_errors=True)
    draft.rename(own)


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two folders answer the same question; a judge may have added to one of them."""
    keys = ("kind", "format", "inputs", "settings")
    return all(json.dumps(one.get(key), sort_keys=True) == json.dumps(other.get(key), sort_keys=True) for key in keys)


def _whole(folder: Path, manifest: dict[str, Any]) -> bool:
    files: dict[str, dict[str, Any]] = manifest.get("files", {})
    return all(
        (folder / name).is_file() and (folder / name).stat().st_size == entry["bytes"] for name, entry in files.items()
    )
