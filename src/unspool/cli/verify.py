"""`unspool verify`: check the numeric promises on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from unspool.core.console import PlainConsole, print_json

BROKEN = 1  # exit code when a check fails; 2 is a usage error


def verify(
    model: Annotated[
        list[str] | None,
        typer.Option(help="Model folder, .gguf file or Hub id, or the name of a small model. Repeatable."),
    ] = None,
    only: Annotated[list[str] | None, typer.Option(metavar="CHECK", help="Run only this check. Repeatable.")] = None,
    device: Annotated[str, typer.Option(help="auto (the CPU, and the GPU if there is one), cpu or cuda.")] = "auto",
    seed: Annotated[int, typer.Option(help="Random seed for tokens and for the weights of small models.")] = 0,
    kills: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="How often the check sigkill kills and restarts a run. Default: 3."),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=2, max=8, metavar="N", help="Also check a step on this many local ranks, in every layout that fits."
        ),
    ] = None,
    each: Annotated[
        bool, typer.Option("--each", help="Print a row for every model, instead of the worst model of each check.")
    ] = False,
    show: Annotated[bool, typer.Option("--list", help="List checks and small models; run nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print every result as JSON.")] = False,
) -> None:
    """Check the numeric promises on this machine's devices.

    Packed documents, micro-batches, exports and memory settings are compared
    with plain transformers, which gets one document at a time and computes
    all logits at once. Killed and resumed runs are compared with an
    uninterrupted one. Without --model, small random models of many families
    are checked. The exit code is 1 if a check fails.

        unspool verify

        unspool verify --model path/to/model --device cuda

        unspool verify --model gemma2 --only packing --only isolation

        unspool verify --only sigkill --kills 20

        unspool verify --ranks 4 --only ranks
    """
    from unspool.models.location import model_path
    from unspool.models.weight_files import check_weights
    from unspool.verification import verify as checks
    from unspool.verification.fixtures import FAMILIES

    console = PlainConsole()
    if show:
        console.print(checks.list_checks(only or (), ranks))
        console.print("\npromises", soft_wrap=True)
        for line in checks.list_promises():
            console.print(line, soft_wrap=True)
        return
    for ref in set(model or []) - set(FAMILIES):
        check_weights(model_path(ref, Path()))  # before the checks of other models
    result = checks.verify(model or (), only=only or (), device=device, seed=seed, kills=kills, ranks=ranks)
    if as_json:
        print_json(result.to_dict())
    else:
        result.print(console, each=each)
    if not result.ok:
        raise typer.Exit(BROKEN)
