"""`unspool report`: the page of one run, or of several side by side; also as Markdown and JSON."""

from pathlib import Path
from typing import Annotated

import typer

from unspool.core.console import print_json

MAX_SENTENCES = 12  # of paired comparisons; the page has all


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Run folders (`out` in recipes), or folders of eval --out.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Page to write. Default: report.html in the run folder, or here for several runs.",
        ),
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", help="Also write tables and samples as Markdown to this file.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print every number as JSON; write a page only with --out.")
    ] = False,
) -> None:
    """Write one self-contained HTML page from the results of a run.

    Shows scores by length, depth and category with intervals, paired
    comparisons, loss by position, training curves, RoPE, data counts,
    samples, recipe and hashes. Several runs are shown side by side.
    The page needs no network and lists what is missing. Folders that
    `unspool eval --out` wrote work too, and are compared if there are several.

        unspool report runs/tiny

        unspool report runs/abf runs/utk --out both.html --markdown both.md

        unspool report scores/mine scores/theirs --out compared.html

        unspool report runs/tiny --json | jq '.runs[0].measures'
    """
    from unspool.core.html import write_text
    from unspool.reporting.comparisons import compare, comparison_lines, headline, not_paired
    from unspool.reporting.gather import gather
    from unspool.reporting.measures import measures_for
    from unspool.reporting.page import check_file, lines_together, render, shared_context
    from unspool.reporting.text_formats import report_values, write_markdown

    page = out
    if page is None and not as_json:
        page = runs[0] / "report.html" if len(runs) == 1 else Path("report.html")
    for file, name in ((page, "report.html"), (markdown, "report.md")):
        if file is not None:
            check_file(file, name)
    results = [gather(run) for run in runs]
    if page is not None:
        write_text(page, render(results))
    if markdown is not None:
        write_markdown(results, markdown)
    if as_json:
        print_json(report_values(results))
        return
    for one in results:
        for line in headline(one):
            typer.echo(line)
    if len(results) > 1:
        lines = lines_together(results)
        measures = measures_for({line.label: line.scores for line in lines}, shared_context(results))
        for sentence in comparison_lines(compare(lines, measures)[:MAX_SENTENCES]):
            typer.echo(sentence)
        for sentence in not_paired(lines):
            typer.echo(sentence)
    typer.echo(f"Report: {page}")
    if markdown is not None:
        typer.echo(f"Markdown: {markdown}")
