"""Read the result files of a run folder.

In: the folder a recipe names as `out`. Out: `RunResults`.
Promise: only published folders count (those with a manifest), except that a stage in progress shows
its training curve. What is missing stays missing; what is damaged is named in a DataError.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from unspool.base.artefact import MANIFEST, digest, read_manifest
from unspool.base.errors import ConfigError, DataError
from unspool.base.sizes import parse_size
from unspool.report.results import (
    BASE,
    Artefact,
    Cell,
    ModelScores,
    RunResults,
    Sample,
    Stage,
    Step,
    Validation,
    task_suite,
)

SAMPLES_PER_SUITE = 4
_MARKS = ("recipe.yaml", "run.json", "scores", "stages")


def gather(run_dir: Path) -> RunResults:
    """Everything the result files of one run say."""
    if not any((run_dir / mark).exists() for mark in _MARKS):
        problem = "does not exist" if not run_dir.exists() else f"is not a run: it holds none of {', '.join(_MARKS)}"
        raise ConfigError(f"{run_dir} {problem}. Give the folder that the recipe names as `out`, such as runs/tiny.")
    recipe_file = run_dir / "recipe.yaml"
    recipe_text = _text(recipe_file) if recipe_file.is_file() else None
    recipe = _recipe(recipe_file, recipe_text)
    facts = _facts(run_dir / "run.json")
    stages = _stages(run_dir / "stages", recipe)
    return RunResults(
        run_dir=run_dir,
        name=str(recipe.get("name") or run_dir.resolve().name),
        recipe_text=recipe_text,
        base_model=facts.base_model or _optional_text(recipe.get("model")),
        original_context=facts.original_context,
        versions=facts.versions,
        seconds=facts.seconds,
        models=_models(run_dir / "scores", [stage.name for stage in stages]),
        stages=stages,
        artefacts=tuple(_artefacts(run_dir)),
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
    raw = _json_object(path)
    try:
        return _Facts(
            base_model=_optional_text(raw.get("base_model")),
            original_context=_whole(raw.get("original_context")),
            versions={str(name): str(version) for name, version in (raw.get("versions") or {}).items()},
            seconds={str(name): float(seconds) for name, seconds in (raw.get("seconds") or {}).items()},
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{path} is not readable ({error!r}); run the recipe again to rewrite it.") from error


def _published(folder: Path) -> list[Path]:
    """Subfolders that carry a manifest, by name; drafts and leftovers have none or another ending."""
    if not folder.is_dir():
        return []
    found = (path.parent for path in folder.glob(f"*/{MANIFEST}"))
    return sorted(path for path in found if path.suffix not in (".partial", ".old", ".work"))


# Scores


def _models(scores_dir: Path, stage_names: list[str]) -> tuple[ModelScores, ...]:
    order = {name: position for position, name in enumerate([BASE, *stage_names])}
    folders = sorted(_published(scores_dir), key=lambda path: (order.get(path.name, len(order)), path.name))
    return tuple(_model(folder) for folder in folders)


def _model(folder: Path) -> ModelScores:
    summary_file = folder / "summary.json"
    cells = _json_object(summary_file).get("cells", [])
    samples_file = folder / "samples.jsonl"
    lines = list(_json_lines(samples_file)) if samples_file.is_file() else []
    # A suite may log lines of its own kind (loss has no questions): only answers can be shown.
    samples = [_sample(raw, samples_file, line) for line, raw in lines if "reference" in raw and "output" in raw]
    suites = sorted({sample.suite for sample in samples})
    return ModelScores(
        name=folder.name,
        cells=tuple(_cell(raw, summary_file, position) for position, raw in enumerate(cells)),
        samples=tuple(sample for suite in suites for sample in _chosen(samples, suite)),
        question_sets={suite: digest(sorted(s.hash for s in samples if s.suite == suite)) for suite in suites},
    )


def _cell(raw: Any, path: Path, position: int) -> Cell:
    try:
        return Cell(
            suite=_suite(raw),
            metric=str(raw["metric"]),
            length=int(raw["length"]),
            value=_number(raw["value"]),
            n=int(raw["n"]),
            low=_number(raw.get("low")),
            high=_number(raw.get("high")),
            depth=_number(raw.get("depth")),
            start=_whole(raw.get("from")),
            stop=_whole(raw.get("to")),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{path}: cell {position} is not readable ({error!r}); score this model again.") from error


def _suite(raw: dict[str, Any]) -> str:
    """A task of a suite is shown as one of its own."""
    return task_suite(str(raw["suite"]), str(raw["task"])) if raw.get("task") else str(raw["suite"])


def _sample(raw: dict[str, Any], path: Path, line: int) -> Sample:
    try:
        return Sample(
            suite=_suite(raw),
            length=int(raw["length"]),
            depth=_number(raw.get("depth")),
            index=int(raw["index"]),
            hash=str(raw["hash"]),
            prompt_tokens=_whole(raw.get("prompt_tokens")),
            reference=str(raw["reference"]),
            output=str(raw["output"]),
            score=_number(raw.get("score")),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}: line {line} is not a sample ({error!r}); score this model again.") from error


def _chosen(samples: list[Sample], suite: str) -> list[Sample]:
    """The first question of each depth at the longest length: chosen without looking at the scores."""
    of_suite = [sample for sample in samples if sample.suite == suite]
    longest = max(sample.length for sample in of_suite)
    at_longest = sorted((s for s in of_suite if s.length == longest), key=lambda s: s.index)
    by_depth: dict[float | None, list[Sample]] = {}
    for sample in at_longest:
        by_depth.setdefault(sample.depth, []).append(sample)
    if len(by_depth) == 1:
        return at_longest[:SAMPLES_PER_SUITE]
    firsts = [group[0] for _, group in sorted(by_depth.items(), key=lambda item: item[0] or 0.0)]
    step = max(1.0, (len(firsts) - 1) / (SAMPLES_PER_SUITE - 1))
    return [firsts[round(step * place)] for place in range(min(len(firsts), SAMPLES_PER_SUITE))]


# Stages


def _stages(stages_dir: Path, recipe: dict[str, Any]) -> tuple[Stage, ...]:
    """Stages in the recipe's order; without a recipe, the published ones by name."""
    described = recipe.get("stages")
    entries: list[Any] = described if isinstance(described, list) else []
    entries = [entry for entry in entries if isinstance(entry, dict) and "name" in entry]
    if not entries:
        entries = [{"name": folder.name, "start": "model"} for folder in _published(stages_dir)]
    stages: list[Stage] = []
    for entry in entries:
        name, start = str(entry["name"]), str(entry.get("start", "previous"))
        previous = stages[-1].name if stages else None
        published = (stages_dir / name / MANIFEST).is_file()
        folder = stages_dir / name if published else stages_dir / f"{name}.work"
        stages.append(
            Stage(
                name=name,
                parent={"previous": previous, "model": None}.get(start, start),
                context=_size(entry.get("context")),
                planned_tokens=_size(entry.get("tokens")),
                finished=published,
                steps=_steps(folder / "metrics.jsonl", finished=published),
                validation=_validation(folder / "validation.jsonl", finished=published),
            )
        )
    return tuple(stages)


def _steps(path: Path, *, finished: bool) -> tuple[Step, ...]:
    if not path.is_file():
        return ()
    # A resumed stage may repeat the steps after its last checkpoint: the later line is the one that counts.
    by_step = {step.step: step for step in (_step(raw, path, line) for line, raw in _json_lines(path, finished))}
    return tuple(by_step[number] for number in sorted(by_step))


def _step(raw: dict[str, Any], path: Path, line: int) -> Step:
    try:
        return Step(
            step=int(raw["step"]),
            tokens=int(raw["tokens"]),
            loss=_number(raw["loss"]),
            lr=_number(raw.get("lr")),
            tokens_per_second=_number(raw.get("tokens_per_second")),
            losses={str(name): _number(value) for name, value in (raw.get("losses") or {}).items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{path}: line {line} is not a training step ({error!r}).") from error


def _validation(path: Path, *, finished: bool) -> tuple[Validation, ...]:
    if not path.is_file():
        return ()
    found = (_validation_line(raw, path, line) for line, raw in _json_lines(path, finished))
    by_step = {one.step: one for one in found}
    return tuple(by_step[number] for number in sorted(by_step))


def _validation_line(raw: dict[str, Any], path: Path, line: int) -> Validation:
    try:
        last = next((bucket for bucket in reversed(raw["buckets"]) if bucket["n"]), None)
        return Validation(
            step=int(raw["step"]),
            tokens=int(raw["tokens"]),
            loss=_number(raw["loss"]),
            farthest=_number(last["value"]) if last else None,
            span=(int(last["from"]), int(last["to"])) if last else None,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{path}: line {line} is not a validation ({error!r}).") from error


# Manifests


def _artefacts(run_dir: Path) -> Iterator[Artefact]:
    for group in ("corpus", "rows", "stages", "scores"):
        for folder in _published(run_dir / group):
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
            )


# Values


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text.") from error


def _json_object(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(_text(path))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is missing or not JSON ({error}); run the recipe again to rebuild it.") from error
    if not isinstance(loaded, dict):
        raise DataError(f"{path} should hold a JSON object; run the recipe again to rebuild it.")
    return loaded


def _json_lines(path: Path, whole: bool = True) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of each line; a file still being written (`whole=False`) may end in half a line."""
    lines = _text(path).split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            loaded = json.loads(line)
        except ValueError as error:
            if not whole and number == len(lines):
                return
            raise DataError(f"{path}: line {number} is not JSON ({error}).") from error
        if not isinstance(loaded, dict):
            raise DataError(f"{path}: line {number} should be a JSON object.")
        yield number, loaded


def _number(value: Any) -> float | None:
    """None for what is missing or not finite: neither can be drawn or compared."""
    if value is None:
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)


def _size(value: Any) -> int | None:
    try:
        return None if value is None else parse_size(value)
    except ValueError:
        return None


def _optional_text(value: Any) -> str | None:
    return None if value is None else str(value)
