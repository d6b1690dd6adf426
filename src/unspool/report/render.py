"""Write the report: one HTML file that needs nothing else, from the result files of one or several runs.

Promise: no network, no scripts (a content policy in the page forbids both), every text from a file
escaped, the file replaced in one step.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from unspool import __version__
from unspool.base.errors import ConfigError
from unspool.base.html import templates_in, write_html
from unspool.base.sizes import format_size
from unspool.report.charts import MODEL_STYLES, heat_scale, swatch
from unspool.report.figures import (
    Figure,
    Line,
    heat_figure,
    loss_figure,
    recall_figure,
    training_figures,
    validation_figures,
)
from unspool.report.gather import gather
from unspool.report.headline import headline, missing_parts
from unspool.report.measures import key_measures
from unspool.report.results import BASE, RunResults, Sample
from unspool.report.tables import (
    Table,
    artefact_table,
    data_table,
    facts_table,
    loss_table,
    recall_table,
    timing_table,
    training_table,
)
from unspool.report.wording import show_interval, show_n, show_percent, show_value, suite_title, unbroken, visible


@dataclass(frozen=True, kw_only=True)
class TileRow:
    model: str
    style: int
    value: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class Tile:
    title: str
    note: str
    rows: list[TileRow]


@dataclass(frozen=True, kw_only=True)
class HeatSection:
    title: str
    figures: list[tuple[int, Figure]]
    note: str
    old_context: str


@dataclass(frozen=True, kw_only=True)
class Answer:
    model: str
    style: int
    mark: str
    output: str


@dataclass(frozen=True, kw_only=True)
class Question:
    place: str
    reference: str
    answers: list[Answer]


@dataclass(frozen=True, kw_only=True)
class RunView:
    """Everything the template prints of one run."""

    anchor: str
    name: str
    contexts: str
    base_model: str
    lines: list[str]
    notes: list[str]
    legend: list[tuple[str, int]]
    many: bool  # too many models for a table to stand beside another
    tiles: list[Tile]
    heat: list[HeatSection]
    recall: list[Figure]
    loss: Figure | None
    loss_table: Table | None
    training: list[Figure]
    stage_legend: list[tuple[str, int]]
    training_table: Table | None
    data: list[Table]
    questions: list[tuple[str, list[Question]]]  # by suite
    numbers: list[Table]
    numbers_by_depth: list[Table]
    recipe: str | None
    facts: list[Table]


@dataclass(frozen=True, kw_only=True)
class SideBySide:
    """The charts that hold all runs at once."""

    legend: list[tuple[str, int]]
    figures: list[Figure]
    tables: list[Table]


def write_report(run_dirs: list[Path], out_file: Path) -> None:
    """One page for one run, or for several with a comparison on top."""
    if not run_dirs:
        raise ConfigError("A report needs at least one run folder, such as runs/tiny.")
    if out_file.is_dir():
        raise ConfigError(f"{out_file} is a folder. Name the file to write, such as {out_file / 'report.html'}.")
    page = render([gather(run_dir) for run_dir in run_dirs])
    write_html(out_file, page)


def render(runs: list[RunResults]) -> str:
    environment = templates_in(Path(__file__).parent)
    environment.filters["unbroken"] = unbroken
    environment.globals.update(swatch=swatch, heat_scale=heat_scale, styles=MODEL_STYLES)
    return environment.get_template("page.html.j2").render(
        title=" · ".join(run.name for run in runs),
        runs=[_view(run, f"run{position}") for position, run in enumerate(runs, start=1)],
        together=_side_by_side(runs) if len(runs) > 1 else None,
        version=__version__,
    )


def _view(results: RunResults, anchor: str) -> RunView:
    styles = {name: position for position, name in enumerate(results.model_names)}
    lines = [Line(label=model.name, style=styles[model.name], scores=model) for model in results.models]
    suites, old = results.recall_suites, results.original_context
    has_loss = any(model.losses() for model in results.models)
    deep = [suite for suite in suites if results.depths(suite)]
    losses = loss_table(lines) if has_loss else None
    tables = [data_table(results.artefacts, *group) for group in (("corpus", "Documents"), ("rows", "Rows"))]
    return RunView(
        anchor=anchor,
        name=results.name,
        contexts=" → ".join(format_size(size) for size in (old, results.target_context) if size),
        base_model=results.base_model or "",
        lines=headline(results),
        notes=missing_parts(results),
        legend=[(line.label, line.style) for line in lines],
        many=len(lines) > 4,
        tiles=_tiles(results, styles),
        heat=[_heat_section(results, suite, styles) for suite in deep],
        recall=[recall_figure(lines, suite, old) for suite in results.main_suites],
        loss=loss_figure(lines, old) if has_loss else None,
        loss_table=losses,
        training=training_figures(results.stages, styles) + validation_figures(results.stages, styles),
        stage_legend=[(stage.name, styles[stage.name]) for stage in results.stages if stage.steps],
        training_table=training_table(results) if results.stages else None,
        data=[table for table in tables if table is not None],
        questions=_questions(results, styles),
        numbers=[recall_table(lines, suite, [None]) for suite in suites] + ([losses] if losses else []),
        numbers_by_depth=[recall_table(lines, suite, results.depths(suite)) for suite in deep],
        recipe=results.recipe_text,
        facts=[table for table in (facts_table(results), timing_table(results)) if table]
        + ([artefact_table(results.artefacts)] if results.artefacts else []),
    )


def _tiles(results: RunResults, styles: dict[str, int]) -> list[Tile]:
    tiles = []
    for measure in key_measures(results)[:4]:
        counts = list(dict.fromkeys(show_n(cell) for cell in measure.cells.values() if cell is not None))
        rows = []
        for name, cell in measure.cells.items():
            detail = show_interval(cell)
            if len(counts) > 1 and cell is not None:
                detail = f"{detail} · {show_n(cell)}".strip(" ·")
            rows.append(TileRow(model=name, style=styles[name], value=show_value(cell), detail=detail))
        note = " · ".join([*(counts if len(counts) == 1 else []), "95% interval"])
        tiles.append(Tile(title=measure.title, note=note, rows=rows))
    return tiles


def _heat_section(results: RunResults, suite: str, styles: dict[str, int]) -> HeatSection:
    cells = [cell for model in results.models for cell in model.cells if cell.suite == suite and cell.depth is not None]
    counts = sorted({cell.n for cell in cells if cell.n})
    per_cell = f"{counts[0]}–{counts[-1]}" if len(counts) > 1 else str(counts[0]) if counts else "0"
    return HeatSection(
        title=f"{suite_title(suite)} by length and depth",
        figures=[(styles[model.name], heat_figure(results, model, suite)) for model in results.models],
        note=f"percent of right answers; n = {per_cell} in each cell, “all” takes its depths together",
        old_context=f"old context {format_size(results.original_context)}" if results.original_context else "",
    )


def _questions(results: RunResults, styles: dict[str, int]) -> list[tuple[str, list[Question]]]:
    return [
        (suite_title(suite), [_question(answers, styles) for answers in asked])
        for suite in results.recall_suites
        if (asked := _same_question(results, suite))
    ]


def _same_question(results: RunResults, suite: str) -> list[list[tuple[str, Sample]]]:
    """What each model answered to one prompt, together; a model may lack some."""
    asked: dict[str, list[tuple[str, Sample]]] = {}
    for model in results.models:
        for sample in model.samples:
            if sample.suite == suite:
                asked.setdefault(sample.hash, []).append((model.name, sample))
    return list(asked.values())


def _question(answers: list[tuple[str, Sample]], styles: dict[str, int]) -> Question:
    first = answers[0][1]
    depth = f", depth {show_percent(first.depth)}" if first.depth is not None else ""
    tokens = f", {first.prompt_tokens:,} tokens" if first.prompt_tokens is not None else ""
    return Question(
        place=f"{format_size(first.length)}{depth}{tokens}",
        reference=visible(first.reference),
        answers=[
            Answer(model=name, style=styles[name], mark=_mark(sample.score), output=visible(sample.output))
            for name, sample in answers
        ],
    )


def _mark(score: float | None) -> str:
    if score is None:
        return "–"
    return "✓" if score >= 1 else "✗" if score <= 0 else show_percent(score)


def _side_by_side(runs: list[RunResults]) -> SideBySide:
    names = Counter(run.name for run in runs)
    lines: list[Line] = []
    for run in runs:
        label = run.name if names[run.name] == 1 else f"{run.name} ({run.run_dir.name})"
        for model in run.models:
            # Runs that extend the same model share its line.
            if model.name == BASE and any(line.scores.cells == model.cells for line in lines):
                continue
            lines.append(Line(label=f"{label} · {model.name}", style=len(lines), scores=model))
    olds = {run.original_context for run in runs}
    old = olds.pop() if len(olds) == 1 else None
    suites = list(dict.fromkeys(suite for run in runs for suite in run.recall_suites))
    with_loss = [line for line in lines if line.scores.losses()]
    figures = [recall_figure(lines, suite, old) for suite in suites]
    tables = [recall_table(lines, suite, [None]) for suite in suites]
    if with_loss:
        figures.append(loss_figure(with_loss, old))
        tables.append(loss_table(with_loss))
    return SideBySide(legend=[(line.label, line.style) for line in lines], figures=figures, tables=tables)
