"""Everything a page prints, of one run or of several side by side.

In: what gather.py read. Out: `PageView`.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from unspool import __version__
from unspool.core.errors import ConfigError
from unspool.core.html import templates_in, write_html
from unspool.core.sizes import format_size
from unspool.reporting.bars import bar_key
from unspool.reporting.blocks import Block, Group, PageView, RunView, Section, Tile, TileRow
from unspool.reporting.charts import MODEL_STYLES, heat_scale, swatch
from unspool.reporting.comparisons import compare, comparison_table, headline, missing_parts
from unspool.reporting.figures import Line, loss_figure, loss_table, recall_figure
from unspool.reporting.gather import gather
from unspool.reporting.measures import key_measures, measures_for
from unspool.reporting.number_format import plain_text, show_interval, show_n, show_value, unbroken
from unspool.reporting.overview import category_tables, length_table, trade_off
from unspool.reporting.run_results import BASE, RunResults
from unspool.reporting.sections import legend_of, missing, sections

MAX_TILES = 4


def page_view(runs: Sequence[RunResults]) -> PageView:
    return PageView(
        title=plain_text(" · ".join(run.name for run in runs)),
        runs=[_run_view(run, f"run{position}") for position, run in enumerate(runs, start=1)],
        together=_side_by_side(runs) if len(runs) > 1 else None,
        version=__version__,
    )


def _run_view(results: RunResults, anchor: str) -> RunView:
    styles = {name: position for position, name in enumerate(results.model_names)}
    sizes = (results.original_context, results.target_context)
    return RunView(
        anchor=anchor,
        name=plain_text(results.name),
        contexts=" → ".join(format_size(size) for size in sizes if size),
        base_model=plain_text(results.base_model or ""),
        lines=[plain_text(line) for line in headline(results)],
        notes=[plain_text(note) for note in missing_parts(results)],
        tiles=_tiles(results, styles),
        sections=sections(results, styles, anchor),
    )


def _tiles(results: RunResults, styles: dict[str, int]) -> list[Tile]:
    tiles = []
    for measure in key_measures(results)[:MAX_TILES]:
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


def lines_together(runs: Sequence[RunResults]) -> list[Line]:
    """The models of all runs, each under a label of its own; runs that extend the same model share its line."""
    names = Counter(run.name for run in runs)
    lines: list[Line] = []
    for run in runs:
        label = run.name if names[run.name] == 1 else f"{run.name} ({run.run_dir.name})"
        for model in run.models:
            if model.name == BASE and any(line.scores.cells == model.cells for line in lines):
                continue
            context = run.context_of(model.name)
            lines.append(Line(label=f"{label} · {model.name}", style=len(lines), scores=model, context=context))
    return lines


def shared_context(runs: Sequence[RunResults]) -> int | None:
    """The original context, where all runs have the same."""
    olds = {run.original_context for run in runs}
    return olds.pop() if len(olds) == 1 else None


def _side_by_side(runs: Sequence[RunResults]) -> Section:
    lines, old = lines_together(runs), shared_context(runs)
    measures = measures_for({line.label: line.scores for line in lines}, old)
    suites = [measure.suite for measure in measures if measure.higher_is_better]
    with_loss = [line for line in lines if line.scores.losses()]
    figures = [recall_figure(lines, suite, old) for suite in suites]
    tables = [length_table(lines, suite) for suite in suites] + category_tables(lines)
    blocks: list[Block] = [Group(tables=tables, wide=True)] if tables else []
    if with_loss:
        figures.append(loss_figure(with_loss, old))
    if figures:
        blocks.append(Group(figures=figures, legend=legend_of(lines)))
    found = trade_off(lines, measures)
    if found:
        blocks.append(Group(title="Long against short", figures=found.figures, legend=legend_of(lines)))
        blocks.append(Group(tables=[found.table], wide=True))
    paired = comparison_table(compare(lines, measures))
    if paired:
        blocks.append(Group(tables=[paired], wide=True))
    if with_loss:
        losses = loss_table(with_loss)
        blocks.append(Group(tables=[losses], wide=True, folded=losses.caption))
    return Section(
        anchor="together",
        title=f"{len(runs)} runs side by side",
        blocks=blocks or [missing("No run has scores yet.")],
    )


# Write the report: one HTML file that needs nothing else, from the result files of one or several runs.


def write_report(run_dirs: list[Path], out_file: Path) -> None:
    """One page for one run, or for several with a comparison on top."""
    if not run_dirs:
        raise ConfigError("A report needs at least one run folder, such as runs/tiny.")
    check_file(out_file, "report.html")
    write_html(out_file, render([gather(run_dir) for run_dir in run_dirs]))


def check_file(out_file: Path, name: str) -> None:
    if out_file.is_dir():
        raise ConfigError(f"{out_file} is a folder. Name the file to write, such as {out_file / name}.")


def render(runs: Sequence[RunResults]) -> str:
    environment = templates_in(Path(__file__).parent)
    # Beside escaping: no text may hide or turn around what stands next to it.
    environment.finalize = lambda value: (
        plain_text(value) if isinstance(value, str) and not isinstance(value, Markup) else value
    )
    environment.filters["unbroken"] = unbroken
    environment.globals.update(swatch=swatch, bar_key=bar_key, heat_scale=heat_scale, styles=MODEL_STYLES)
    return environment.get_template("page.html.j2").render(page=page_view(runs))
