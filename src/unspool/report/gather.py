"""Read the result files of a run folder.

In: the folder a recipe names as `out`. Out: `RunResults`.
Promise: only published folders count (those with a manifest), except that a stage in progress shows
its training curve. What is missing stays missing; what is damaged is named in a DataError.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

import unspool
from unspool.base.artefact import MANIFEST, digest, read_manifest
from unspool.base.errors import ConfigError, DataError
from unspool.report.gather_scores import gather_models
from unspool.report.gather_stages import gather_stages
from unspool.report.reading import json_lines, json_object, optional_text, published, read_text, whole
from unspool.report.results import Artefact, Problem, RunResults

PROBLEMS_PER_CORPUS = 3
_MARKS = ("recipe.yaml", "run.json", "scores", "stages")
_ASSET = "asset:"


def gather(run_dir: Path) -> RunResults:
    """Everything the result files of one run say."""
    if not any((run_dir / mark).exists() for mark in _MARKS):
        problem = "does not exist" if not run_dir.exists() else f"is not a run: it holds none of {', '.join(_MARKS)}"
        raise ConfigError(f"{run_dir} {problem}. Give the folder that the recipe names as `out`, such as runs/tiny.")
    recipe_file = run_dir / "recipe.yaml"
    recipe_text = read_text(recipe_file) if recipe_file.is_file() else None
    recipe = _recipe(recipe_file, recipe_text)
    facts = _facts(run_dir / "run.json")
    stages = gather_stages(run_dir / "stages", recipe)
    base_model = facts.base_model or optional_text(recipe.get("model"))
    return RunResults(
        run_dir=run_dir,
        name=str(recipe.get("name") or run_dir.resolve().name),
        recipe_text=recipe_text,
        base_model=base_model,
        original_context=facts.original_context,
        versions=facts.versions,
        seconds=facts.seconds,
        models=gather_models(run_dir, [stage.name for stage in stages]),
        stages=stages,
        artefacts=tuple(_artefacts(run_dir)),
        problems=tuple(_problems(run_dir / "corpus")),
        base_config=_base_config(base_model),
    )


def _recipe(path: Path, text: str | None) -> dict[str, Any]:
    try:
        loaded = yaml.safe_load(text or "")
    except yaml.YAMLError as error:
        raise DataError(
            f"{path} is not YAML ({str(error).splitlines()[0]}); run the recipe again to rewrite it."
        ) from error
    return loaded if isinstance(loaded, dict) else {}


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """What run.json says; a run that has not written it yet has none."""

    base_model: str | None = None
    original_context: int | None = None
    versions: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


def _facts(path: Path) -> _Facts:
    if not path.is_file():
        return _Facts()
    raw = json_object(path)
    try:
        return _Facts(
            base_model=optional_text(raw.get("base_model")),
            original_context=whole(raw.get("original_context")),
            versions={str(name): str(version) for name, version in (raw.get("versions") or {}).items()},
            seconds={str(name): float(seconds) for name, seconds in (raw.get("seconds") or {}).items()},
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{path} is not readable ({error!r}); run the recipe again to rewrite it.") from error


def _artefacts(run_dir: Path) -> Iterator[Artefact]:
    for group in ("corpus", "rows", "stages", "scores"):
        for folder in published(run_dir / group):
            manifest = read_manifest(folder)
            if manifest is None:
                raise DataError(f"{folder / MANIFEST} is damaged; run the recipe again to rebuild this folder.")
            files = manifest.get("files") or {}
            yield Artefact(
                path=f"{group}/{folder.name}",
                kind=str(manifest.get("kind", "–")),
                version=str(manifest.get("unspool", "–")),
                counts=manifest.get("counts") or {},
                inputs=manifest.get("inputs") or {},
                content_hash=digest({name: entry.get("sha256") for name, entry in files.items()}),
                num_files=len(files),
                num_bytes=sum(int(entry.get("bytes", 0)) for entry in files.values()),
                settings=manifest.get("settings") or {},
            )


def _problems(corpus_dir: Path) -> Iterator[Problem]:
    """The first records that were not read and parts that were left out, of each corpus."""
    for folder in published(corpus_dir):
        bad, left = folder / "quarantine.jsonl", folder / "left_out.jsonl"
        for raw in _first(bad):
            place = f"{raw.get('file', '')}, {raw.get('record', '')}"
            reason, detail = str(raw.get("reason", "")), str(raw.get("detail", ""))
            yield Problem(corpus=folder.name, kind="not read", place=place, reason=reason, detail=detail)
        for raw in _first(left):
            place = f"{raw.get('document', '')}, {raw.get('part', '')}"
            yield Problem(corpus=folder.name, kind="left out", place=place, reason=str(raw.get("reason", "")))


def _first(path: Path) -> list[dict[str, Any]]:
    return [raw for _, raw in islice(json_lines(path), PROBLEMS_PER_CORPUS)] if path.is_file() else []


def _base_config(base_model: str | None) -> dict[str, Any] | None:
    """config.json of a model that lies on this machine or ships with the package; nothing is fetched for a report."""
    if not base_model:
        return None
    assets = Path(unspool.__file__).parent / "assets"
    shipped = base_model.startswith(_ASSET)
    folder = assets / base_model.removeprefix(_ASSET) if shipped else Path(base_model)
    try:
        found = folder / "config.json"
        return json_object(found) if found.is_file() else None
    except (OSError, DataError):  # a name that no path can be, or a folder that was damaged since
        return None
