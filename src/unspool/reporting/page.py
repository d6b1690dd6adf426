"""The report page of one or several runs, as one self-contained HTML file."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup, escape

from unspool import __version__
from unspool.core.artifacts import check_writable
from unspool.core.charts import MODEL_STYLES, bar_key, heat_scale, swatch
from unspool.core.errors import ConfigError
from unspool.core.formatting import printable
from unspool.core.html import load_templates, write_text
from unspool.core.sizes import format_size
from unspool.core.table import Table
from unspool.reporting.comparisons import compare, comparison_table, headline, missing_parts, not_paired
from unspool.reporting.figures import Line, loss_figure, loss_table, recall_figure
from unspool.reporting.gather import gather
from unspool.reporting.measures import format_interval, format_n, format_value, key_measures, measures_for
from unspool.reporting.overview import category_tables, length_table, trade_off
from unspool.reporting.run_results import BASE, RunResults
from unspool.reporting.score_curves import curves_together
from unspool.reporting.sections import (
    Block,
    Group,
    PageView,
    RunView,
    Section,
    Text,
    Tile,
    TileRow,
    legend_of,
    missing,
    sections,
)

MAX_TILES = 4


def page_view(runs: Sequence[RunResults], tables: Sequence[Table] = ()) -> PageView:
    return PageView(
        title=printable(" · ".join(run.name for run in runs)),
        runs=[_run_view(run, f"run{position}") for position, run in enumerate(runs, start=1)],
        together=_side_by_side(runs, tables) if len(runs) > 1 or tables else None,
        version=__version__,
    )


def _run_view(results: RunResults, anchor: str) -> RunView:
    styles = {name: position for position, name in enumerate(results.model_names)}
    sizes = (results.original_context, results.target_context)
    return RunView(
        anchor=anchor,
        name=printable(results.name),
        contexts=" → ".join(format_size(size) for size in sizes if size),
        base_model=printable(results.base_model or ""),
        lines=[printable(line) for line in headline(results)],
        notes=[printable(note) for note in missing_parts(results)],
        tiles=_tiles(results, styles),
        sections=sections(results, styles, anchor),
    )


def _tiles(results: RunResults, styles: dict[str, int]) -> list[Tile]:
    tiles = []
    for measure in key_measures(results)[:MAX_TILES]:
        counts = list(dict.fromkeys(format_n(cell) for cell in measure.cells.values() if cell is not None))
        rows = []
        for name, cell in measure.cells.items():
            detail = format_interval(cell)
            if len(counts) > 1 and cell is not None:
                detail = f"{detail} · {format_n(cell)}".strip(" ·")
            rows.append(TileRow(model=name, style=styles[name], value=format_value(cell), detail=detail))
        note = " · ".join([*(counts if len(counts) == 1 else []), "95% interval"])
        tiles.append(Tile(title=measure.title, note=note, rows=rows))
    return tiles


def lines_together(runs: Sequence[RunResults]) -> list[Line]:
    """Models of all runs with unique labels. Runs that extend the same base model share its line."""
    names = Counter(run.name for run in runs)
    lines: list[Line] = []
    for run in runs:
        label = run.name if names[run.name] == 1 else f"{run.name} ({run.run_dir.name})"
        for model in run.models:
            if model.name == BASE and any(line.scores.cells == model.cells for line in lines):
                continue
            context = run.context_of(model.name)
            # A folder of `unspool eval` is often named after its model.
            name = model.name if label == model.name else f"{label} · {model.name}"
            lines.append(Line(label=name, style=len(lines), scores=model, context=context))
    return lines


def shared_context(runs: Sequence[RunResults]) -> int | None:
    """The original context, or None if runs differ."""
    olds = {run.original_context for run in runs}
    return olds.pop() if len(olds) == 1 else None


def _side_by_side(runs: Sequence[RunResults], more: Sequence[Table]) -> Section:
    lines, old = lines_together(runs), shared_context(runs)
    measures = measures_for({line.label: line.scores for line in lines}, old)
    suites = [measure.suite for measure in measures if measure.higher_is_better]
    with_loss = [line for line in lines if line.scores.losses()]
    figures = [recall_figure(lines, suite, old) for suite in suites]
    tables = [*(length_table(lines, suite) for suite in suites), *category_tables(lines), *more]
    blocks: list[Block] = [Group(tables=tables, wide=True)] if tables else []
    if with_loss:
        figures.append(loss_figure(with_loss, old))
    figures += curves_together(runs, lines)
    if figures:
        blocks.append(Group(figures=figures, legend=legend_of(lines)))
    found = trade_off(lines, measures)
    if found:
        blocks.append(Group(title="Long and short context", figures=found.figures, legend=legend_of(lines)))
        blocks.append(Group(tables=[found.table], wide=True))
    paired = comparison_table(compare(lines, measures))
    blocks += [Text(text=note, role="note") for note in not_paired(lines)]
    if paired:
        blocks.append(Group(tables=[paired], wide=True))
    if with_loss:
        losses = loss_table(with_loss)
        blocks.append(Group(tables=[losses], wide=True, folded=losses.caption))
    return Section(
        anchor="together",
        title=f"{len(runs)} runs side by side" if len(runs) > 1 else "Comparison with the paper",
        blocks=blocks or [missing("No run has scores yet.")],
    )


def write_report(run_dirs: list[Path], out_file: Path, *, tables: Sequence[Table] = ()) -> None:
    """Write the report page. With several runs, a comparison comes first, with the extra `tables`."""
    if not run_dirs:
        raise ConfigError("A report needs at least one run folder, such as runs/tiny.")
    check_file(out_file, "report.html")
    write_text(out_file, render([gather(run_dir) for run_dir in run_dirs], tables))


def check_file(out_file: Path, name: str) -> None:
    if out_file.is_dir():
        raise ConfigError(f"{out_file} is a folder. Name the file to write, such as {out_file / name}.")
    check_writable(out_file, "page")


def render(runs: Sequence[RunResults], tables: Sequence[Table] = ()) -> str:
    environment = load_templates(Path(__file__).parent)
    # Also remove control characters: text from a file must not hide or reorder the text around it.
    environment.finalize = lambda value: (
        printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value
    )
    environment.filters["keep_together"] = keep_together
    environment.globals.update(swatch=swatch, bar_key=bar_key, heat_scale=heat_scale, styles=MODEL_STYLES)
    return environment.get_template("page.html.j2").render(page=page_view(runs, tables))


def keep_together(line: str) -> Markup:
    """Keep `1K–2K`, `n = 40` and `3.70 ±0.09` each on one line when a page wraps."""
    joined = escape(printable(line)).replace("–", "\u2060–\u2060").replace(" = ", "\u00a0=\u00a0")
    return joined.replace(" ±", "\u00a0±").replace("→ ", "→\u00a0")
