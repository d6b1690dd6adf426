"""`unspool.verify`: check the numeric promises on this machine."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from unspool.core.config import lookup
from unspool.core.errors import ConfigError
from unspool.core.progress import progress_bar
from unspool.core.result import Result as Printable
from unspool.models.export import PlainProcess
from unspool.models.location import model_path
from unspool.verification.case import Check
from unspool.verification.fixtures import FAMILIES, build_small_models, user_model
from unspool.verification.interruptions import KILLS
from unspool.verification.rank_layouts import RankProcesses
from unspool.verification.run import PROMISES, Result, build_checks, reasons, run_checks, summary_line, table_rows

DEVICES = ("auto", "cpu", "cuda")
TABLE_WIDTH = 100  # a number wrapped over two lines is unreadable, and a file has no width


@dataclass(frozen=True, kw_only=True)
class VerifyResult(Printable):
    """Every measured quantity with its tolerance, as `verify` returns it.

    Example:
        >>> import unspool
        >>> unspool.VerifyResult(results=()).ok
        True
    """

    results: tuple[Result, ...]

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return not self.failed

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the checks that failed."""
        return tuple(dict.fromkeys(result.check for result in self.results if result.status == "failed"))

    def to_dict(self) -> list[dict[str, Any]]:
        return [result.plain() for result in self.results]

    def print(self, console: Console, *, each: bool = False) -> None:
        """Print a row per check, for the model closest to its tolerance; with `each`, a row per model."""
        num_models = len({result.model for result in self.results})
        which = "model" if each or num_models == 1 else f"worst of {num_models}"
        table = Table("promise", "check", which, "device", box=None, pad_edge=False)
        for column in ("error", "tolerance", "", "s"):
            table.add_column(column, justify="right", no_wrap=True)
        for row in table_rows(self.results, each=each):
            table.add_row(*row)
        console.print(table, width=max(console.width, TABLE_WIDTH), crop=False)
        for line in [*reasons(self.results), summary_line(self.results)]:
            console.print(line, soft_wrap=True)


def verify(
    model: str | Path | Sequence[str | Path] = (),
    *,
    only: Sequence[str] = (),
    device: str = "auto",
    seed: int = 0,
    kills: int | None = None,
    ranks: int | None = None,
) -> VerifyResult:
    """Check the numeric promises on this machine's devices.

    Packed documents, micro-batches, exports and memory settings are compared with plain `transformers`, which gets one
    document at a time and computes all logits at once. Killed and resumed runs are compared with an uninterrupted one.

    Args:
        model: A model folder, a `.gguf` file, a Hub id, the name of a small model, or several of them. By default small
            random models of many families.
        only: Names of the checks to run, such as `packing`; all by default.
        device: `auto` (the CPU, and the GPU if there is one), `cpu` or `cuda`.
        seed: Random seed of tokens and of the weights of small models.
        kills: How often `sigkill` kills and restarts a run; 3 by default.
        ranks: Also check a step on this many local ranks, in every layout that fits.

    Returns:
        Errors, tolerances and verdicts: `ok`, `failed`, `to_dict()`; print it to see the table.

    Raises:
        ConfigError: There is no such model, check or device.

    Example:
        >>> import unspool
        >>> unspool.verify("llama", only=["packing"], device="cpu").ok
        True
    """
    if device not in DEVICES:
        raise ConfigError(f"`device` {device!r} is not known; use {', '.join(DEVICES)}.")
    models = [str(each) for each in ([model] if isinstance(model, str | Path) else model)]
    with ExitStack() as stack:
        checks = _checks(stack, only, kills, ranks)
        return VerifyResult(results=tuple(_run(models, checks, _devices(device), seed=seed)))


def list_checks(only: Sequence[str] = (), ranks: int | None = None) -> Table:
    """The checks by promise, as a table."""
    table = Table("promise", "check", "what it compares", box=None, pad_edge=False)
    with ExitStack() as stack:
        for check in _checks(stack, only, None, ranks):
            table.add_row(str(check.promise), check.name, check.what)
    return table


def list_promises() -> list[str]:
    """The promises and the small models, one line each."""
    return [*(f"{number}  {text}" for number, text in PROMISES.items()), f"\nsmall models: {', '.join(FAMILIES)}"]


def _checks(stack: ExitStack, only: Sequence[str], kills: int | None, ranks: int | None) -> list[Check]:
    plain = stack.enter_context(PlainProcess())
    ranks = 2 if ranks is None and "ranks" in only else ranks
    group = stack.enter_context(RankProcesses(ranks)) if ranks else None
    checks = build_checks(plain, kills=kills or KILLS, ranks=group)
    return [lookup(checks, name, kind="`only`") for name in only] if only else list(checks.values())


def _run(models: Sequence[str], checks: Sequence[Check], devices: Sequence[torch.device], *, seed: int) -> list[Result]:
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


def _for_model(checks: Sequence[Check], number: int) -> list[Check]:
    return [check for check in checks if number == 0 or not check.once]


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Set the number of torch threads inside; None keeps it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _devices(name: str) -> list[torch.device]:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("`device='cuda'`: torch finds no CUDA device here; use cpu.")
    names = [name] if name != "auto" else ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return [torch.device(each) for each in names]
