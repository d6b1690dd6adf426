"""The report as plain values for `--json`: every number of the page, unrounded, and where it came from.

In: what gather.py read. Out: dicts and lists as docs/report.md describes them.
Promise: what was not measured is null; keys are there even where their values are null or empty.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, cast

from unspool import __version__
from unspool.report.audit import length_bins, realised
from unspool.report.comparisons import Comparison, compare
from unspool.report.figures import Line
from unspool.report.headline import headline, missing_parts
from unspool.report.measures import Measure, key_measures, measures_for
from unspool.report.positions import Rope, ropes
from unspool.report.results import LOSS, Cell, RunResults, Sample, Stage
from unspool.report.sections import lines_of
from unspool.report.view import lines_together, shared_context

FORMAT = 1


def as_plain(runs: Sequence[RunResults]) -> dict[str, Any]:
    """What `--json` prints."""
    plain = {
        "format": FORMAT,
        "unspool": __version__,
        "runs": [_run(run) for run in runs],
        "together": _together(runs) if len(runs) > 1 else None,
    }
    return cast(dict[str, Any], _strict(plain))


def _strict(value: Any) -> Any:
    """What JSON and UTF-8 can hold: no NaN, no lone surrogates, names that are texts."""
    if isinstance(value, dict):
        return {_strict(str(key)): _strict(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(part) for part in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value.encode("utf-8", "replace").decode("utf-8") if isinstance(value, str) else value


def _run(results: RunResults) -> dict[str, Any]:
    styles = {name: position for position, name in enumerate(results.model_names)}
    measures, lines = key_measures(results), lines_of(results, styles)
    return {
        "name": results.name,
        "base_model": results.base_model,
        "original_context": results.original_context,
        "target_context": results.target_context,
        "headline": headline(results),
        "notes": missing_parts(results),
        "measures": [_measure(measure) for measure in measures],
        "models": [_model(line) for line in lines],
        "comparisons": [_comparison(one) for one in compare(lines, measures)],
        "stages": [_stage(stage, results) for stage in results.stages],
        "positions": [_rope(rope) for rope in ropes(results, styles)],
        "data": _data(results),
        "recipe": results.recipe_text,
        "versions": results.versions,
        "seconds": results.seconds,
        "artefacts": [_artefact(one) for one in results.artefacts],
    }


def _together(runs: Sequence[RunResults]) -> dict[str, Any]:
    lines = lines_together(runs)
    measures = measures_for({line.label: line.scores for line in lines}, shared_context(runs))
    return {
        "models": [line.label for line in lines],
        "measures": [_measure(measure) for measure in measures],
        "comparisons": [_comparison(one) for one in compare(lines, measures)],
    }


def _model(line: Line) -> dict[str, Any]:
    return {
        "model": line.scores.name,
        "context": line.context,
        "cells": [plain_cell(cell) for cell in line.scores.cells],
        "short": [plain_cell(cell) for cell in line.scores.short],
        "holds_until": line.scores.holds_until,
        "samples": [_sample(sample) for sample in line.scores.samples],
    }


def plain_cell(cell: Cell) -> dict[str, Any]:
    """A cell under the names it has in summary.json; a task's suite reads `ruler: vt`."""
    plain = {name: getattr(cell, name) for name in ("suite", "metric", "length", "value", "n", "low", "high")}
    if cell.start is not None:
        return {**plain, "from": cell.start, "to": cell.stop}
    more: dict[str, Any] = {"depth": cell.depth}
    if cell.of_tasks is not None:
        more |= {"tasks": cell.tasks, "of_tasks": cell.of_tasks}
    return {**plain, **more, **({"unscored": cell.unscored} if cell.unscored else {})}


def _sample(sample: Sample) -> dict[str, Any]:
    return asdict(sample)


def _measure(measure: Measure) -> dict[str, Any]:
    return {
        "title": measure.title,
        "suite": measure.suite,
        "lengths": list(measure.lengths),
        "positions": [list(span) for span in measure.spans],
        "higher_is_better": measure.higher_is_better,
        "cells": {name: None if cell is None else plain_cell(cell) for name, cell in measure.cells.items()},
    }


def _comparison(one: Comparison) -> dict[str, Any]:
    return {
        "first": one.first,
        "second": one.second,
        "measure": one.measure.title,
        "unit": "nats" if one.measure.suite == LOSS else "share",
        "difference": one.found.value,
        "low": one.found.low,
        "high": one.found.high,
        "n": one.found.n,
        "better": one.better,
        "told_apart_without_pairing": one.apart if one.measure.cells else None,
    }


def _stage(stage: Stage, results: RunResults) -> dict[str, Any]:
    return {
        "name": stage.name,
        "starts_from": stage.parent,
        "context": stage.context,
        "planned_tokens": stage.planned_tokens,
        "tokens": stage.tokens if stage.steps else None,
        "finished": stage.finished,
        "position": stage.position,
        "mix_asked": stage.mix,
        "mix_came": realised(stage, {one.path.removeprefix("rows/"): one for one in results.artefacts}),
        "rows_trained_on": stage.drawn,
        "seconds": results.seconds.get(f"stages/{stage.name}"),
        "steps": [asdict(step) for step in stage.steps],
        "validation": [asdict(one) for one in stage.validation],
    }


def _rope(rope: Rope) -> dict[str, Any]:
    return {
        "models": list(rope.names),
        "summary": rope.summary,
        "context": rope.context,
        "frequencies": rope.inv_freq.tolist(),
        "first_negative_distance": rope.reach,
        "lowest": rope.lowest,
        "curve": [list(point) for point in rope.curve],
    }


def _data(results: RunResults) -> dict[str, Any]:
    counted = [one for one in results.artefacts if one.path.startswith(("corpus/", "rows/"))]
    return {
        "counts": {one.path: one.counts for one in counted},
        "lengths": {
            one.path: [dict(zip(("at_least", "documents", "tokens"), found, strict=True)) for found in bins]
            for one in counted
            if (bins := length_bins(one.counts.get("lengths")))
        },
        "problems": [asdict(problem) for problem in results.problems],
    }


def _artefact(one: Any) -> dict[str, Any]:
    plain = asdict(one)
    plain.pop("counts")
    return plain
