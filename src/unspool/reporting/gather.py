"""Read the result files of a run folder.

It reads only published folders (those with a manifest). The one exception is the training curve of a stage in
progress. Missing files are skipped; damaged files raise a DataError that names them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from unspool.core.artifacts import MANIFEST, digest, read_manifest
from unspool.core.errors import ConfigError, DataError
from unspool.models.location import ASSET_PREFIX, ASSETS
from unspool.reporting.distance_figures import gather_distances
from unspool.reporting.gather_scores import SUMMARY, gather_model, gather_models
from unspool.reporting.result_files import (
    json_lines,
    json_object,
    number,
    optional_text,
    published,
    read_text,
    size,
    whole,
)
from unspool.reporting.run_results import Artifact, Problem, RunResults, Stage, Step, Validation
from unspool.reporting.score_curves import gather_curves


def gather_stages(stages_dir: Path, recipe: dict[str, Any]) -> tuple[Stage, ...]:
    """Stages in the recipe's order; without a recipe, published stages by name."""
    described = recipe.get("stages")
    entries: list[Any] = described if isinstance(described, list) else []
    entries = [entry for entry in entries if isinstance(entry, dict) and "name" in entry]
    if not entries:
        entries = [{"name": folder.name, "init": "base"} for folder in published(stages_dir)]
    stages: list[Stage] = []
    for entry in entries:
        stages.append(_stage(entry, stages_dir, stages[-1].name if stages else None))
    return tuple(stages)


def _stage(entry: dict[str, Any], stages_dir: Path, previous: str | None) -> Stage:
    name, start = str(entry["name"]), str(entry.get("init", "previous"))
    finished = (stages_dir / name / MANIFEST).is_file()
    folder = stages_dir / name if finished else stages_dir / f"{name}.work"
    config_file = folder / "model" / "config.json"
    mix, rope = entry.get("mix"), entry.get("rope")
    return Stage(
        name=name,
        parent={"previous": previous, "base": None}.get(start, start),
        context_length=size(entry.get("context_length")),
        planned_tokens=size(entry.get("tokens")),
        finished=finished,
        steps=_steps(folder / "metrics.jsonl", finished=finished),
        validation=_validation(folder / "validation.jsonl", finished=finished),
        mix=_shares(mix) if isinstance(mix, dict) else {},
        drawn=_drawn(folder / "ledger.jsonl", finished=finished),
        rope=rope if isinstance(rope, dict) else {},
        config=json_object(config_file) if config_file.is_file() else None,
    )


def _shares(mix: dict[Any, Any]) -> dict[str, float]:
    """The recipe's shares, normalized; they may be weights that do not add up to 1."""
    known = {str(name): float(share) for name, share in mix.items() if isinstance(share, int | float)}
    total = sum(known.values())
    return {name: share / total for name, share in known.items()} if total > 0 else {}


def _steps(path: Path, *, finished: bool) -> tuple[Step, ...]:
    if not path.is_file():
        return ()
    # A resumed stage repeats the steps after its last checkpoint, so the later line of a step wins.
    by_step = {step.step: step for step in (_step(raw, path, line) for line, raw in json_lines(path, finished))}
    return tuple(by_step[at] for at in sorted(by_step))


def _step(raw: dict[str, Any], path: Path, line: int) -> Step:
    try:
        return Step(
            step=int(raw["step"]),
            tokens=int(raw["tokens"]),
            loss=number(raw["loss"]),
            lr=number(raw.get("lr")),
            tokens_per_second=number(raw.get("tokens_per_second")),
            losses={str(name): number(value) for name, value in (raw.get("losses") or {}).items()},
            grad_norm=number(raw.get("grad_norm")),
            mfu=number(raw.get("mfu")),
            memory_gib=number(raw.get("memory_gib")),
            skipped=bool(raw.get("skipped")),
            wrong=str(raw.get("wrong") or ""),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{path}: line {line} is not a training step ({error!r}).") from error


def _validation(path: Path, *, finished: bool) -> tuple[Validation, ...]:
    if not path.is_file():
        return ()
    found = (_validation_line(raw, path, line) for line, raw in json_lines(path, finished))
    by_step = {one.step: one for one in found}
    return tuple(by_step[at] for at in sorted(by_step))


def _validation_line(raw: dict[str, Any], path: Path, line: int) -> Validation:
    try:
        last = next((bucket for bucket in reversed(raw["buckets"]) if bucket["n"]), None)
        return Validation(
            step=int(raw["step"]),
            tokens=int(raw["tokens"]),
            loss=number(raw["loss"]),
            farthest=number(last["value"]) if last else None,
            span=(int(last["from"]), int(last["to"])) if last else None,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{path}: line {line} is not a validation result ({error!r}).") from error


def _drawn(path: Path, *, finished: bool) -> dict[str, int]:
    """Number of trained rows by dataset."""
    if not path.is_file():
        return {}
    by_step: dict[int, dict[str, int]] = {}
    for line, raw in json_lines(path, finished):
        try:
            by_step[int(raw["step"])] = {str(name): len(rows) for name, rows in raw["rows"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{path}: line {line} is not an entry of the ledger ({error!r}).") from error
    total: dict[str, int] = {}
    for rows in by_step.values():
        for name, count in rows.items():
            total[name] = total.get(name, 0) + count
    return total


PROBLEMS_PER_CORPUS = 3
ATTENTION = "attention"  # folder of a run: figures that `unspool inspect attention --svg` wrote
_MARKS = ("recipe.yaml", "run.json", "scores", "stages")


def gather(run_dir: Path) -> RunResults:
    """Read all result files of a run, or of a folder that `unspool eval --out` wrote."""
    if not any((run_dir / mark).exists() for mark in _MARKS):
        if (run_dir / SUMMARY).is_file():
            return _gather_scores(run_dir)
        raise ConfigError(
            f"{run_dir} {_not_a_run(run_dir)}. Give the output folder of a recipe, such as runs/tiny, or that of an "
            "evaluation."
        )
    recipe_file = run_dir / "recipe.yaml"
    recipe_text = read_text(recipe_file) if recipe_file.is_file() else None
    recipe = _recipe(recipe_file, recipe_text)
    facts = _facts(run_dir / "run.json")
    stages = gather_stages(run_dir / "stages", recipe)
    base_model = facts.base_model or optional_text(recipe.get("model"))
    artifacts = tuple(_artifacts(run_dir))
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
        artifacts=artifacts,
        problems=tuple(_problems(run_dir / "corpus")),
        base_config=_base_config(base_model),
        curves=gather_curves(run_dir, stages),
        distances=gather_distances(run_dir, artifacts),
        attention_maps={path.stem: read_text(path) for path in sorted((run_dir / ATTENTION).glob("*.svg"))},
    )


def _not_a_run(folder: Path) -> str:
    if not folder.exists():
        return "does not exist"
    work = folder.with_name(folder.name + ".work")
    if work.is_dir():
        return f"has no scores yet: {work} is unfinished; run the same `unspool eval` command again to resume it"
    return f"is not a run: it has none of {', '.join((*_MARKS, SUMMARY))}"


def _gather_scores(folder: Path) -> RunResults:
    return RunResults(
        run_dir=folder,
        name=folder.resolve().name,
        recipe_text=None,
        base_model=None,
        original_context=None,
        versions={},
        seconds={},
        models=(gather_model(folder),),
        stages=(),
        artifacts=(),
        is_run=False,
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
    """Contents of run.json; empty if it has not been written yet."""

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
        raise DataError(f"{path} cannot be read ({error!r}); run the recipe again to rewrite it.") from error


def _artifacts(run_dir: Path) -> Iterator[Artifact]:
    for group in ("corpus", "datasets", "stages", "scores"):
        for folder in published(run_dir / group):
            manifest = read_manifest(folder)
            if manifest is None:
                raise DataError(f"{folder / MANIFEST} is damaged; run the recipe again to rebuild this folder.")
            files = manifest.get("files") or {}
            yield Artifact(
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
    """The first unreadable records and removed parts of each corpus."""
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
    """config.json of a local or bundled model. Reports never download."""
    if not base_model:
        return None
    shipped = base_model.startswith(ASSET_PREFIX)
    folder = ASSETS / base_model.removeprefix(ASSET_PREFIX) if shipped else Path(base_model)
    try:
        found = folder / "config.json"
        return json_object(found) if found.is_file() else None
    except (OSError, DataError):  # a name that is not a valid path, or a damaged folder
        return None
