"""The report as Markdown and as JSON.

Markdown has the page's sections, tables and samples, but no charts. Text from models and data is escaped: it cannot
start markup or leave its cell or fence. JSON has every number of the page, unrounded.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, cast

from unspool import __version__
from unspool.core.formatting import printable
from unspool.core.table import Entry, Table, escape_markdown, markdown_table
from unspool.evals.baselines import KEY
from unspool.reporting.comparisons import Comparison, compare, headline, missing_parts, not_paired
from unspool.reporting.data_section import length_bins, realized_mix
from unspool.reporting.figures import Line
from unspool.reporting.measures import Measure, key_measures, measures_for
from unspool.reporting.page import lines_together, page_view, shared_context
from unspool.reporting.rope_section import Rope, ropes
from unspool.reporting.run_results import LOSS, Cell, RunResults, Stage
from unspool.reporting.sections import Block, Code, Group, PageView, Questions, RunView, Section, Text, lines_of

_FENCE = re.compile(r"`{3,}")


def render_markdown(runs: Sequence[RunResults]) -> str:
    return "\n\n".join(_page(page_view(runs))) + "\n"


def _page(page: PageView) -> Iterator[str]:
    if page.together:
        yield f"# {escape_markdown(page.title)}"
        yield from _section(page.together, 2)
    for run in page.runs:
        yield from _run(run, 1 if page.together is None else 2)
    yield f"Made by Unspool {page.version}. Intervals are 95%; “–” means not measured."


def _run(run: RunView, level: int) -> Iterator[str]:
    yield f"{'#' * level} {escape_markdown(run.name)}"
    about = [f"context {run.contexts}" if run.contexts else "", run.base_model]
    if any(about):
        yield escape_markdown(" · ".join(filter(None, about)))
    yield from (escape_markdown(line) for line in run.lines)
    yield from (f"> {escape_markdown(note)}" for note in run.notes)
    if run.tiles:
        rows = [
            [Entry(text=tile.title), Entry(text=row.model), Entry(text=row.value, note=row.detail)]
            for tile in run.tiles
            for row in tile.rows
        ]
        yield markdown_table(Table(caption="Before and after", columns=["measure", "model", "value"], rows=rows))
    for section in run.sections:
        yield from _section(section, level + 1)


def _section(section: Section, level: int) -> Iterator[str]:
    yield f"{'#' * level} {escape_markdown(section.title)}"
    for block in section.blocks:
        yield from _block(block, level + 1)


def _block(block: Block, level: int) -> Iterator[str]:
    if isinstance(block, Text):
        yield f"> {escape_markdown(block.text)}" if block.role == "note" else escape_markdown(block.text)
    elif isinstance(block, Group):
        yield from (markdown_table(table) for table in block.tables)
    elif isinstance(block, Code):
        yield fenced(block.text)
    elif isinstance(block, Questions):
        yield f"{'#' * level} {escape_markdown(block.title)}"
        for question in block.questions:
            yield f"{escape_markdown(question.place)}, expected {quoted(question.reference)}"
            yield "\n".join(f"- {escape_markdown(a.model)} {a.mark} {quoted(a.output)}" for a in question.answers)
            if question.prompt:
                yield fenced(question.prompt)
    else:
        # Markdown has no charts; the tables by length and depth hold the numbers.
        yield f"{escape_markdown(block.title)}: the HTML report has the chart, “All numbers” the values."


def quoted(text: str) -> str:
    """Model output as inline code; line breaks become a visible sign."""
    one_line = printable(text).replace("\n", "↵").replace("\t", " ")
    longest = max((len(run) for run in re.findall(r"`+", one_line)), default=0)
    fence = "`" * (longest + 1)
    return f"{fence} {one_line} {fence}"


def fenced(text: str) -> str:
    longest = max((len(run) for run in _FENCE.findall(text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}text\n{printable(text)}\n{fence}"


FORMAT = 1


def report_values(runs: Sequence[RunResults]) -> dict[str, Any]:
    """The values that `--json` prints. Numbers are not rounded; None means not measured.

    Scores are in [0, 1], losses in nats per token. `format` increases when a key is removed or changes its meaning.
    `unspool` is the version, `runs` has one object per run, and `together`, for several runs, has `models`,
    `measures`, `comparisons` and `not_paired` over all of them.

    A run:
        `name`, `base_model`, `original_context`, `target_context`: from the recipe and run.json.
        `headline`, `notes`: the first sentences of the page, and notes on missing parts.
        `measures`: the key measures: `title`, `suite`, `lengths`, `positions` (of a loss), `higher_is_better`, `cells`.
        `models`: `model`, `context_length`, `asked` (backend and server), `cells`, `short` (results of lm-eval),
            `holds_until` (effective length by suite), `comparability` (with published numbers) and `samples`.
        `comparisons`: `first`, `second`, `measure`, `unit`, `difference` (second − first), `low`, `high`, `n`, `better`
            (None: no difference shown), `told_apart_without_pairing`.
        `not_paired`: one sentence for each pair of models whose settings differ.
        `stages`: `name`, `starts_from`, `context_length`, `planned_tokens`, `tokens`, `finished`, `rope`, `mix_asked`,
            `mix_came`, `rows_trained_on`, `seconds`, `steps`, `validation`.
        `positions`: per set of RoPE frequencies `models`, `summary`, `context_length`, `frequencies`,
            `first_negative_distance`, `lowest`, `curve`.
        `data`: `counts` and `lengths` by folder, `problems`.
        `recipe`, `versions`, `seconds`, `artifacts` (`path`, `kind`, `version`, `inputs`, `settings`, `content_hash`,
            `num_files`, `num_bytes`).
    A cell: `suite`, `metric`, `length`, `value`, `n`, `low`, `high`, then `depth`, or `from` and `to`; for a mean over
        tasks also `tasks` and `of_tasks`; `baselines` (trivial ones: random, first and last item) if the suite has
        them; `unscored` if answers still need a judge.
    A sample: `suite`, `length`, `depth`, `index`, `hash`, `prompt_tokens`, `reference`, `output`, `score`, `prompt`
        (`start`, `end`, `cut_tokens`).
    """
    values = {
        "format": FORMAT,
        "unspool": __version__,
        "runs": [_run_values(run) for run in runs],
        "together": _together(runs) if len(runs) > 1 else None,
    }
    return cast(dict[str, Any], _strict(values))


def _strict(value: Any) -> Any:
    """Replace values that JSON or UTF-8 cannot represent: NaN, lone surrogates, non-string keys."""
    if isinstance(value, dict):
        return {_strict(str(key)): _strict(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(part) for part in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value.encode("utf-8", "replace").decode("utf-8") if isinstance(value, str) else value


def _run_values(results: RunResults) -> dict[str, Any]:
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
        "not_paired": not_paired(lines),
        "stages": [_stage(stage, results) for stage in results.stages],
        "positions": [_rope(rope) for rope in ropes(results, styles)],
        "data": _data(results),
        "recipe": results.recipe_text,
        "versions": results.versions,
        "seconds": results.seconds,
        "artifacts": [_artifact(one) for one in results.artifacts],
    }


def _together(runs: Sequence[RunResults]) -> dict[str, Any]:
    lines = lines_together(runs)
    measures = measures_for({line.label: line.scores for line in lines}, shared_context(runs))
    return {
        "models": [line.label for line in lines],
        "measures": [_measure(measure) for measure in measures],
        "comparisons": [_comparison(one) for one in compare(lines, measures)],
        "not_paired": not_paired(lines),
    }


def _model(line: Line) -> dict[str, Any]:
    return {
        "model": line.scores.name,
        "context_length": line.context,
        "asked": line.scores.asked,
        "cells": [cell_values(cell) for cell in line.scores.cells],
        "short": [cell_values(cell) for cell in line.scores.short],
        "holds_until": line.scores.holds_until,
        "comparability": line.scores.comparability,
        "samples": [asdict(sample) for sample in line.scores.samples],
    }


def cell_values(cell: Cell) -> dict[str, Any]:
    """A cell with the keys of summary.json. The suite of a task is written `ruler: vt`."""
    plain = {name: getattr(cell, name) for name in ("suite", "metric", "length", "value", "n", "low", "high")}
    plain |= {"beyond_context": cell.beyond_context} if cell.beyond_context else {}
    if cell.start is not None:
        return {**plain, "from": cell.start, "to": cell.stop}
    more: dict[str, Any] = {"depth": cell.depth}
    if cell.of_tasks is not None:
        more |= {"tasks": cell.tasks, "of_tasks": cell.of_tasks}
    more |= {KEY: cell.baselines} if cell.baselines else {}
    return {**plain, **more, **({"unscored": cell.unscored} if cell.unscored else {})}


def _measure(measure: Measure) -> dict[str, Any]:
    return {
        "title": measure.title,
        "suite": measure.suite,
        "lengths": list(measure.lengths),
        "positions": [list(span) for span in measure.spans],
        "higher_is_better": measure.higher_is_better,
        "cells": {name: None if cell is None else cell_values(cell) for name, cell in measure.cells.items()},
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
        "context_length": stage.context_length,
        "planned_tokens": stage.planned_tokens,
        "tokens": stage.tokens if stage.steps else None,
        "finished": stage.finished,
        "rope": stage.rope,
        "mix_asked": stage.mix,
        "mix_came": realized_mix(stage, {one.path.removeprefix("datasets/"): one for one in results.artifacts}),
        "rows_trained_on": stage.drawn,
        "seconds": results.seconds.get(f"stages/{stage.name}"),
        "steps": [asdict(step) for step in stage.steps],
        "validation": [asdict(one) for one in stage.validation],
    }


def _rope(rope: Rope) -> dict[str, Any]:
    return {
        "models": list(rope.names),
        "summary": rope.summary,
        "context_length": rope.context,
        "frequencies": rope.inv_freq.tolist(),
        "first_negative_distance": rope.reach,
        "lowest": rope.lowest,
        "curve": [list(point) for point in rope.curve],
    }


def _data(results: RunResults) -> dict[str, Any]:
    counted = [one for one in results.artifacts if one.path.startswith(("corpus/", "datasets/"))]
    return {
        "counts": {one.path: one.counts for one in counted},
        "lengths": {
            one.path: [dict(zip(("at_least", "documents", "tokens"), found, strict=True)) for found in bins]
            for one in counted
            if (bins := length_bins(one.counts.get("lengths")))
        },
        "problems": [asdict(problem) for problem in results.problems],
    }


def _artifact(one: Any) -> dict[str, Any]:
    plain = asdict(one)
    plain.pop("counts")
    return plain
