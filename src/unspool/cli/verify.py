"""`unspool verify`: check the numeric promises on this machine."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unspool.core.config import lookup
from unspool.core.console import PlainConsole, print_json
from unspool.core.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from unspool.verification.case import Check
    from unspool.verification.run import Result

BROKEN = 1  # exit code when a check fails; 2 is a usage error
TABLE_WIDTH = 100
DEVICES = ("auto", "cpu", "cuda")


def verify(
    model: Annotated[
        list[str] | None,
        typer.Option(help="Model folder, .gguf file or Hub id, or the name of a small model. Repeatable."),
    ] = None,
    only: Annotated[list[str] | None, typer.Option(metavar="CHECK", help="Run only this check. Repeatable.")] = None,
    device: Annotated[str, typer.Option(help="auto (the CPU, and the GPU if there is one), cpu or cuda.")] = "auto",
    seed: Annotated[int, typer.Option(help="Random seed for tokens and for the weights of small models.")] = 0,
    kills: Annotated[
        int | None, typer.Option(min=1, help="How often `sigkill` kills and restarts a run (default: 3).")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=2, max=8, help="Also check a step on this many local ranks, in every layout that fits."),
    ] = None,
    each: Annotated[bool, typer.Option("--each", help="Print a row for every model, not only for the worst.")] = False,
    show: Annotated[bool, typer.Option("--list", help="List checks and small models; run nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print every result as JSON.")] = False,
) -> None:
    """Check the numeric promises on this machine's devices.

    Packed documents, micro-batches, exports and memory settings are compared
    with plain transformers, which sees one document at a time and computes
    all logits at once. Killed and resumed runs are compared with an
    uninterrupted one. Without --model, small random models of many families
    are checked. The exit code is 1 if a check fails.

        unspool verify

        unspool verify --model path/to/model --device cuda

        unspool verify --model gemma2 --only packing --only isolation

        unspool verify --only sigkill --kills 20

        unspool verify --ranks 4 --only ranks
    """
    if device not in DEVICES:
        raise ConfigError(f"--device {device!r} is not known; use {', '.join(DEVICES)}.")
    from unspool.models.export import PlainProcess
    from unspool.verification.interruptions import KILLS
    from unspool.verification.rank_layouts import RankProcesses
    from unspool.verification.run import build_checks

    with ExitStack() as stack:
        plain = stack.enter_context(PlainProcess())
        if ranks is None and "ranks" in (only or []):
            ranks = 2
        group = stack.enter_context(RankProcesses(ranks)) if ranks else None
        checks = build_checks(plain, kills=kills or KILLS, ranks=group)
        chosen = [lookup(checks, name, kind="--only") for name in only] if only else list(checks.values())
        if show:
            _print_list(chosen)
            return
        results = _run(model or [], chosen, _devices(device), seed=seed)
    if as_json:
        print_json([result.plain() for result in results])
    else:
        _print_table(results, each=each)
    if any(result.status == "failed" for result in results):
        raise typer.Exit(BROKEN)


def _run(
    models: Sequence[str], checks: "Sequence[Check]", devices: "Sequence[torch.device]", *, seed: int
) -> "list[Result]":
    from unspool.core.progress import progress_bar
    from unspool.models.location import model_path
    from unspool.verification.fixtures import FAMILIES, build_small_models, user_model
    from unspool.verification.run import run_checks

    results: list[Result] = []
    small = [name for name in models or FAMILIES if name in FAMILIES]
    given = [user_model(model_path(ref, Path())) for ref in models if ref not in FAMILIES]
    with ExitStack() as stack:
        total = len(devices) * sum(len(_for_model(checks, number)) for number in range(len(small) + len(given)))
        advance = stack.enter_context(progress_bar("verify", total))
        for device in devices:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            specs = build_small_models(folder, seed=seed, wide=device.type == "cuda", names=small)
            for number, spec in enumerate([*specs, *given]):
                # On matrices of a few thousand numbers, threads only wait for each other.
                with _threads(1 if spec in specs else None):
                    for batch in run_checks([spec], _for_model(checks, number), device=device, seed=seed):
                        results += batch
                        advance(1, f"{batch[0].model} {batch[0].check}")
    for spec in given:
        mine = [result for result in results if result.model == spec.name]
        # If no check applies to a model that the user named, it is a usage error.
        if all(result.status == "skipped" for result in mine) and len({result.detail for result in mine}) == 1:
            raise ConfigError(mine[0].detail)
    return results


def _for_model(checks: "Sequence[Check]", number: int) -> "list[Check]":
    return [check for check in checks if number == 0 or not check.once]


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Set the number of torch threads inside; None keeps it."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _devices(name: str) -> "list[torch.device]":
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device here; use --device cpu.")
    names = [name] if name != "auto" else ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return [torch.device(each) for each in names]


def _print_list(checks: "Sequence[Check]") -> None:
    from rich.table import Table

    from unspool.verification.fixtures import FAMILIES
    from unspool.verification.run import PROMISES

    table = Table("promise", "check", "what it compares", box=None, pad_edge=False)
    for check in checks:
        table.add_row(str(check.promise), check.name, check.what)
    console = PlainConsole()
    console.print(table)
    console.print("\npromises", soft_wrap=True)
    for number, text in PROMISES.items():
        console.print(f"{number}  {text}", soft_wrap=True)
    console.print(f"\nsmall models: {', '.join(FAMILIES)}", soft_wrap=True)


def _print_table(results: "Sequence[Result]", *, each: bool) -> None:
    from rich.table import Table

    from unspool.verification.run import reasons, summary_line, table_rows

    num_models = len({result.model for result in results})
    which = "model" if each or num_models == 1 else f"worst of {num_models}"
    table = Table("promise", "check", which, "device", box=None, pad_edge=False)
    for column in ("error", "tolerance", "", "s"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in table_rows(results, each=each):
        table.add_row(*row)
    # A number wrapped over two lines is unreadable, and a file has no width.
    console = PlainConsole(width=max(PlainConsole().width, TABLE_WIDTH))
    console.print(table)
    for line in [*reasons(results), summary_line(results)]:
        console.print(line, soft_wrap=True)
