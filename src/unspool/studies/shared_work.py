"""Build shared folders of a study's arms only once: corpora, datasets, scores of the base model.

Shared folders are in `shared/`, named by a hash of everything that their content depends on. Each run gets hard links
to their files (copies on disks without links), so that its folder is complete and can be moved or deleted.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from unspool.core.artifacts import MANIFEST, digest, find_damage, read_manifest, remove, write_atomic
from unspool.core.lock import LOCK, wait_for_lock
from unspool.models.config import NewModel
from unspool.models.location import ASSET_PREFIX, expand_home, path_exists
from unspool.recipe.context import RunContext, Share
from unspool.recipe.document_scorer import SCORES, scorer_ref
from unspool.recipe.json_schema import value_at
from unspool.recipe.load import EVAL_PATHS, LoadedRecipe, load_recipe
from unspool.recipe.run import BASE
from unspool.recipe.schema import Recipe
from unspool.recipe.yaml_lines import CoreDumper, Place
from unspool.studies.load import Study, StudyRun

RECIPES = "recipes"


def recipe_file(study: Study, run: StudyRun) -> Path:
    return study.out / RECIPES / f"{run.name}.yaml"


def write_recipes(study: Study) -> None:
    """Write the recipe of every run, and delete recipes of arms that the study no longer has."""
    (study.out / RECIPES).mkdir(parents=True, exist_ok=True)
    for run in study.runs:
        path = recipe_file(study, run)
        text = _text(run.loaded, path.parent)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            write_atomic(path, text)
    wanted = {recipe_file(study, run) for run in study.runs}
    for path in (study.out / RECIPES).glob("*.yaml"):
        if path not in wanted:
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
    """Return a path relative to `folder`; paths that are not next to the recipe are unchanged."""
    path = expand_home(value)
    if value.startswith(ASSET_PREFIX) or path.is_absolute() or root == Path() or not path_exists(str(root / path)):
        return value
    # Resolve both, since `..` after a symbolic link leads elsewhere.
    return os.path.relpath(root.resolve() / path, folder.resolve())


def path_places(recipe: Recipe) -> Iterator[Place]:
    """Yield the places of a recipe that name files and folders."""
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
    """Return the absolute path of a recipe's path; a Hub id is returned unchanged."""
    if value is None:
        return None
    path = loaded.path(value)
    return os.path.realpath(path) if path_exists(path) else path


def recipe_digest(loaded: LoadedRecipe, *, paths: bool = True) -> str:
    """Hash a recipe without the run's folder; without `paths`, also without the folders of its inputs."""
    plain = loaded.recipe.model_dump(mode="json", by_alias=True)
    plain["out"] = plain["engine"] = None
    for stage in plain["stages"]:
        if stage["schedule"] == "cosine":  # so that runs from before this key stay finished
            del stage["schedule"]
    for place in path_places(loaded.recipe):
        holder: Any = value_at(place[:-1], plain)
        holder[place[-1]] = located(loaded, holder[place[-1]]) if paths else None
    return digest(plain)


SHARED = "shared"


def corpus_key(loaded: LoadedRecipe, name: str) -> str:
    source = loaded.recipe.sources[name]
    paths = {key: located(loaded, path) for key, path in source.paths.items()}
    seed = loaded.recipe.seed if source.depends_on_seed else None
    plain = source.model_dump(mode="json", exclude=set(source.path_keys))
    return digest([plain, paths, _tokenizer(loaded), seed])[:16]


def dataset_key(loaded: LoadedRecipe, name: str) -> str:
    config = loaded.recipe.datasets[name]
    corpora = {source: corpus_key(loaded, source) for source in config.shares}
    paths = [located(loaded, getattr(strategy, key)) for strategy in config.strategies for key in strategy.path_keys]
    excluded = {strategy.name: set(strategy.path_keys) for strategy in config.strategies}
    plain = config.model_dump(mode="json", by_alias=True, exclude=excluded)
    return digest([plain, name, corpora, _tokenizer(loaded), paths, loaded.recipe.seed])[:16]


def base_scores_key(loaded: LoadedRecipe) -> str | None:
    """Return the key of the base model's scores; None without a base model."""
    recipe = loaded.recipe
    if isinstance(recipe.model, NewModel) or not recipe.evals:
        return None
    evals = [entry.model_dump(mode="json", exclude={*EVAL_PATHS, "paths"}) for entry in recipe.evals]
    texts = [located(loaded, getattr(entry, key, None)) for entry in recipe.evals for key in EVAL_PATHS]
    files = [
        {name: located(loaded, path) for name, path in getattr(entry, "paths", {}).items()} for entry in recipe.evals
    ]
    return digest([located(loaded, recipe.model), evals, texts, files, recipe.seed, recipe.device])[:16]


def shared_folders(loaded: LoadedRecipe) -> dict[str, str]:
    """Return the shareable folders of a run, such as `corpus/books`, each with the hash of its inputs."""
    recipe = loaded.recipe
    used = {source for config in recipe.datasets.values() for source in config.shares}
    folders = {f"corpus/{name}": corpus_key(loaded, name) for name in recipe.sources if name in used}
    folders |= {f"datasets/{name}": dataset_key(loaded, name) for name in recipe.datasets}
    for config in recipe.datasets.values():
        if config.score is not None:
            by = [located(loaded, scorer_ref(config.score, recipe)), config.score.scoring(), recipe.device]
            for name in config.score.scored_sources(config):
                folders[f"{SCORES}/{name}"] = digest([corpus_key(loaded, name), *by])[:16]
    scores = base_scores_key(loaded)
    return folders | ({f"scores/{BASE}": scores} if scores else {})


def _tokenizer(loaded: LoadedRecipe) -> str | None:
    model = loaded.recipe.model
    return located(loaded, model.tokenizer if isinstance(model, NewModel) else model)


def share_between_runs(study_dir: Path) -> Share:
    """Build shared folders once, in the study's folder, and link them into each run."""

    def share(context: RunContext, folder: str, build: Callable[[Path], Any]) -> Any:
        key = shared_folders(context.loaded).get(folder)
        if key is None:
            return build(context.out / folder)
        kind, name = folder.split("/")
        shared = study_dir / SHARED / kind / key / name
        with wait_for_lock(shared.parent / LOCK):
            result = build(shared)
            link_folder(shared, context.out / folder)
        return result

    return share


def link_folder(shared: Path, own: Path) -> None:
    """Link the files of `shared` into `own`, unless `own` is up to date."""
    theirs, ours = read_manifest(shared), read_manifest(own)
    assert theirs is not None, shared
    if ours is not None and _same_content(theirs, ours) and find_damage(own) is None:
        return
    draft = own.with_name(own.name + ".partial")
    remove(draft)
    draft.mkdir(parents=True)
    for name in [*theirs["files"], MANIFEST]:
        target = draft / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            target.hardlink_to(shared / name)
        except OSError:  # another disk, or one without hard links
            shutil.copyfile(shared / name, target)
    # A kill between these two lines loses nothing, because the next run links again.
    remove(own)
    draft.rename(own)


def _same_content(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two folders have the same inputs and settings; a judge may have added files to one."""
    keys = ("kind", "format", "inputs", "settings")
    return all(json.dumps(one.get(key), sort_keys=True) == json.dumps(other.get(key), sort_keys=True) for key in keys)
