"""`unspool report`: the page of one run, or of several side by side."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from unspool.report.gather import gather
from unspool.report.headline import headline
from unspool.report.results import Cell, RunResults


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run folders: what recipes name as `out`.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="The file to write. By default report.html in the run folder, or here for several."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the numbers as JSON; write a page only with --out.")
    ] = False,
) -> None:
    """Write one self-contained HTML page from the results of a run."""
    from unspool.report.render import write_report

    results = [gather(run) for run in runs]
    out_file = out
    if out_file is None and not as_json:
        out_file = runs[0] / "report.html" if len(runs) == 1 else Path("report.html")
    if out_file is not None:
        write_report(runs, out_file)
    if as_json:
        typer.echo(json.dumps([as_plain(one) for one in results], indent=1, ensure_ascii=False))
        return
    for one in results:
        for line in headline(one):
            typer.echo(line)
    typer.echo(f"Report: {out_file}")


def as_plain(results: RunResults) -> dict[str, Any]:
    """What `--json` prints of one run: the headline and every cell."""
    return {
        "name": results.name,
        "original_context": results.original_context,
        "target_context": results.target_context,
        "headline": headline(results),
        "models": [{"model": model.name, "cells": [_cell(cell) for cell in model.cells]} for model in results.models],
    }


def _cell(cell: Cell) -> dict[str, Any]:
    """A cell under the names it has in summary.json."""
    plain = asdict(cell)
    start, stop = plain.pop("start"), plain.pop("stop")
    if start is None:
        return plain
    del plain["depth"]
    return {**plain, "from": start, "to": stop}
