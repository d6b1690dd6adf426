"""`unspool export`: write a trained model for plain `transformers`, and check it."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unspool.core.console import PlainConsole, print_json

if TYPE_CHECKING:
    from unspool.recipe.export import Exported


def export(
    checkpoint: Annotated[Path, typer.Argument(metavar="CKPT", help="A run, one of its stages/, or a model folder.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    stage: Annotated[str | None, typer.Option(help="Stage of the run. Default: its final stage.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Data type: bf16, fp32 or fp16. Default: the checkpoint's.")] = None,
    run: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Run whose recipe and scores the model card shows.")
    ] = None,
    device: Annotated[str, typer.Option(help="Device of the check: auto, cpu or cuda.")] = "auto",
    push: Annotated[
        str | None, typer.Option(metavar="USER/NAME", help="Also upload the folder to this repository on the Hub.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository of --push private.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Write a model folder that plain transformers loads: weights, config, tokenizer and model card.

    Before the folder appears, a fresh process loads it with plain
    transformers and computes logits, also at positions beyond the original context length. They must equal ours.

        unspool export runs/my-64k exported/my-64k

        unspool export runs/tiny exported/abf --stage abf --dtype bf16

        unspool export runs/my-64k exported/my-64k --push me/my-model-64k
    """
    from unspool.recipe.export import export as write  # import late, so that --help is fast: it loads torch

    exported = write(checkpoint, out, stage=stage, dtype=dtype, run=run, device=device, push=push, private=private)
    if as_json:
        print_json(as_plain(exported))
        return
    _print(exported)


def as_plain(exported: "Exported") -> dict[str, Any]:
    """The JSON of `--json`."""
    return {
        "folder": str(exported.folder),
        "model": str(exported.checkpoint.model),
        "run": str(exported.checkpoint.run_dir) if exported.checkpoint.run_dir else None,
        "stage": exported.checkpoint.stage,
        "dtype": exported.dtype,
        "bytes": exported.num_bytes,
        "remote_code": exported.own_code,
        "checks": [asdict(check) for check in exported.checks],
        **({} if exported.url is None else {"url": exported.url}),
    }


def _print(exported: "Exported") -> None:
    from rich.table import Table

    from unspool.core.formatting import format_bytes

    table = Table("pass", "computed in")
    for column in ("tokens", "last position", "error", "tolerance"):
        table.add_column(column, justify="right")
    for check in exported.checks:
        numbers = (f"{check.tokens:,}", f"{check.last_position:,}", f"{check.error:.1e}", f"{check.tolerance:.0e}")
        table.add_row(check.name, check.dtype, *numbers)
    PlainConsole(highlight=True).print(table)
    typer.echo("Plain transformers computes the same logits (error: share of the largest logit).")
    if exported.own_code:
        typer.echo("HARPE needs the code in this folder: load the model with trust_remote_code=True.")
    typer.echo(f"Exported: {exported.folder} ({exported.dtype}, {format_bytes(exported.num_bytes)})")
    if exported.url is not None:
        typer.echo(f"Uploaded: {exported.url}")
