"""Read the scores of models: cells, answers and a few questions to show.

Questions to show are chosen without looking at scores. Scores are keyed by the hash of their prompt, so that two
models can be compared in pairs.
"""

from pathlib import Path
from typing import Any

from unspool.core.artifacts import digest, read_manifest
from unspool.core.errors import DataError
from unspool.evals.baselines import KEY
from unspool.reporting.result_files import json_lines, json_object, number, published, whole
from unspool.reporting.run_results import (
    BASE,
    LOSS,
    SHORT,
    Answers,
    Cell,
    ModelScores,
    Prompt,
    Sample,
    Windows,
    task_of,
    task_suite,
)

SAMPLES_PER_SUITE = 4
SUMMARY = "summary.json"


def gather_models(run_dir: Path, stage_names: list[str]) -> tuple[ModelScores, ...]:
    """Read `scores/<model>/` (published folders only) and `short/<model>/summary.json`; the base model comes first."""
    order = {name: position for position, name in enumerate([BASE, *stage_names])}
    scored = {folder.name: folder for folder in published(run_dir / "scores")}
    # Results of lm-eval have no manifest: `unspool eval --suite short --out RUN/short/NAME`.
    short = {path.parent.name: path for path in sorted((run_dir / SHORT).glob(f"*/{SUMMARY}"))}
    names = sorted(scored.keys() | short.keys(), key=lambda name: (order.get(name, len(order)), name))
    return tuple(_model(name, scored.get(name), short.get(name)) for name in names)


def gather_model(folder: Path) -> ModelScores:
    """Read a folder that `unspool eval --out` wrote. The model's name comes from the scores."""
    summary = folder / SUMMARY
    name = json_object(summary).get("model")
    is_short = read_manifest(folder) is None  # results of lm-eval have no manifest
    return _model(str(name or folder.name), None if is_short else folder, summary if is_short else None)


def _model(name: str, folder: Path | None, short_file: Path | None) -> ModelScores:
    summary = json_object(folder / SUMMARY) if folder else {}
    cells = _cells(summary, folder / SUMMARY) if folder else []
    short = _cells(json_object(short_file), short_file) if short_file else []
    lines: list[tuple[int, dict[str, Any]]] = []
    samples_file = folder / "samples.jsonl" if folder else None
    if samples_file and samples_file.is_file():
        lines = list(json_lines(samples_file))
    # Suites may log other lines (perplexity has no questions); only answers can be shown.
    samples = [_sample(raw, samples_file, at) for at, raw in lines if "reference" in raw and "output" in raw]
    suites = sorted({sample.suite for sample in samples})
    return ModelScores(
        name=name,
        cells=tuple(cell for cell in cells if task_of(cell.suite)[0] != SHORT),
        samples=tuple(sample for suite in suites for sample in _chosen(samples, suite)),
        question_sets={suite: digest(sorted(s.hash for s in samples if s.suite == suite)) for suite in suites},
        answers=_answers(samples),
        windows=_windows(lines, samples_file),
        short=tuple(cell for cell in [*cells, *short] if task_of(cell.suite)[0] == SHORT),
        holds_until={suite: whole(entry.get("effective_length")) for suite, entry in _suites(summary).items()},
        mixed_averages=_mixed_averages(summary),
        rates=_rates(summary),
        comparability={
            suite: said
            for suite, entry in _suites(summary).items()
            if (said := _optional_text(entry.get("comparability")))
        },
        asked=_asked(summary) if folder else {},
        effective_length=_look_sentence(summary),
    )


# Keys of a server in summary.json, and their names on the page.
_SERVER = {"endpoint": "endpoint", "model": "server model", "context": "context", "template": "chat template"}


def _asked(summary: dict[str, Any]) -> dict[str, str]:
    """Backend settings. Old scores lack this record; they all came from the transformers backend."""
    record = summary.get("backend")
    record = record if isinstance(record, dict) else {}
    found = {"backend": str(record.get("kind", "transformers"))}
    known = {name: record[key] for key, name in _SERVER.items() if key in record}
    return found | {name: "not listed" if value is None else str(value) for name, value in known.items()}


def _cells(summary: dict[str, Any], path: Path) -> list[Cell]:
    return [_cell(raw, path, position) for position, raw in enumerate(summary.get("cells", []))]


def _cell(raw: Any, path: Path, position: int) -> Cell:
    try:
        return Cell(
            suite=_suite(raw),
            metric=str(raw["metric"]),
            length=int(raw["length"]),
            value=number(raw["value"]),
            n=int(raw["n"]),
            low=number(raw.get("low")),
            high=number(raw.get("high")),
            depth=number(raw.get("depth")),
            start=whole(raw.get("from")),
            stop=whole(raw.get("to")),
            tasks=whole(raw.get("tasks")),
            of_tasks=whole(raw.get("of_tasks")),
            beyond_context=_optional_text(raw.get("beyond_context")),
            baselines={str(name): float(value) for name, value in (raw.get(KEY) or {}).items()},
            unscored=int(raw.get("not_judged") or 0) + int(raw.get("unparsable") or 0),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{path}: cell {position} cannot be read ({error!r}); score this model again.") from error


def _look_sentence(summary: dict[str, Any]) -> str | None:
    look = summary.get("look")
    return _optional_text(look.get("sentence")) if isinstance(look, dict) else None


def _optional_text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _suite(raw: dict[str, Any]) -> str:
    """Suite name of a sample or cell. Tasks appear as suites of their own."""
    return task_suite(str(raw["suite"]), str(raw["task"])) if raw.get("task") else str(raw["suite"])


def _suites(summary: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Entry of each task suite in summary.json; the last one wins."""
    return {str(entry.get("suite")): entry for entry in _suite_entries(summary)}


def _suite_entries(summary: dict[str, Any]) -> list[dict[str, Any]]:
    suites = summary.get("suites")
    return [entry for entry in suites if isinstance(entry, dict)] if isinstance(suites, list) else []


def _mixed_averages(summary: dict[str, Any]) -> dict[str, tuple[float, tuple[int, ...]]]:
    found = [(str(entry.get("suite")), entry.get("average")) for entry in _suite_entries(summary)]
    mixed = [(suite, average) for suite, average in found if isinstance(average, dict) and "task_lengths" in average]
    return {suite: (float(average["value"]), tuple(average["lengths"])) for suite, average in mixed}


def _rates(summary: dict[str, Any]) -> dict[str, tuple[int, int]]:
    found = {suite: entry.get("adaptation_rate") for suite, entry in _suites(summary).items()}
    return {suite: (rate["to"], rate["from"]) for suite, rate in found.items() if isinstance(rate, dict)}


def _sample(raw: dict[str, Any], path: Path | None, line: int) -> Sample:
    try:
        return Sample(
            suite=_suite(raw),
            length=int(raw["length"]),
            depth=number(raw.get("depth")),
            index=int(raw["index"]),
            hash=str(raw["hash"]),
            prompt_tokens=whole(raw.get("prompt_tokens")),
            reference=str(raw["reference"]),
            output=str(raw["output"]),
            score=number(raw.get("score")),
            prompt=_prompt(raw.get("prompt")),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}: line {line} is not a sample ({error!r}); score this model again.") from error


def _prompt(raw: Any) -> Prompt | None:
    """The prompt as text, or its start and end with the number of tokens cut between them."""
    if isinstance(raw, str):
        return Prompt(start=raw)
    if not isinstance(raw, dict):
        return None
    return Prompt(
        start=str(raw.get("start", "")), end=str(raw.get("end", "")), cut_tokens=int(raw.get("cut_tokens") or 0)
    )


def _answers(samples: list[Sample]) -> dict[tuple[str, int], Answers]:
    found: dict[tuple[str, int], Answers] = {}
    for sample in samples:
        if sample.score is not None:
            found.setdefault((sample.suite, sample.length), {})[sample.hash] = sample.score
    return found


def _windows(lines: list[tuple[int, dict[str, Any]]], path: Path | None) -> dict[int, Windows]:
    """Losses of each window by position."""
    found: dict[int, Windows] = {}
    for line, raw in lines:
        if raw.get("suite") != LOSS or "losses" not in raw:
            continue
        try:
            spans = {
                (int(one["from"]), int(one["to"])): (float(one["value"]), int(one["n"]))
                for one in raw["losses"]
                if number(one["value"]) is not None and one["n"]
            }
            found.setdefault(int(raw["length"]), {})[str(raw["hash"])] = spans
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path}: line {line} is not a window ({error!r}); score this model again.") from error
    return found


def _chosen(samples: list[Sample], suite: str) -> list[Sample]:
    """The first question of each depth at the longest length, chosen without looking at scores."""
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
