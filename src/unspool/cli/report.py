"""`unspool report`: the page of one run, or of several side by side; also as Markdown and JSON."""

from pathlib import Path
from typing import Annotated

import typer

from unspool.core.console import PlainConsole, print_json


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="Run folders (`out` in recipes), or folders that `eval --out` wrote."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Page to write. Default: report.html in the run folder; for several runs, in this folder.",
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

    The page shows scores by length, depth and category with intervals,
    paired comparisons, loss by position, training curves, RoPE, data
    counts, samples, recipe and hashes. It needs no network and lists
    missing results. Several runs are compared side by side.

        unspool report runs/tiny

        unspool report runs/abf runs/utk --out both.html --markdown both.md

        unspool report scores/mine scores/theirs --out compared.html

        unspool report runs/tiny --json | jq '.runs[0].measures'
    """
    from unspool.reporting.page import check_file
    from unspool.reporting.report import report as gather

    page = out
    if page is None and not as_json:
        page = runs[0] / "report.html" if len(runs) == 1 else Path("report.html")
    for file, name in ((page, "report.html"), (markdown, "report.md")):
        if file is not None:
            check_file(file, name)
    found = gather(runs)
    if page is not None:
        found.save(page, "html")
    if markdown is not None:
        found.save(markdown, "markdown")
    if as_json:
        print_json(found.to_dict())
        return
    found.print(PlainConsole())
    typer.echo(f"Report: {page}")
    if markdown is not None:
        typer.echo(f"Markdown: {markdown}")
