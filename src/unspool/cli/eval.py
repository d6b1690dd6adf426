"""`unspool eval`: how well one model uses its context, as a table or as JSON."""

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unspool.base.errors import ConfigError
from unspool.base.lookup import lookup
from unspool.base.sizes import format_size, parse_size
from unspool.eval.config import Eval, KvEval, LossEval, NiahEval

if TYPE_CHECKING:
    import torch

# Which suites know which kind of value.
VALUES = {"numbers": {"niah"}, "uuid": {"kv"}, "words": {"niah", "kv"}}
DEVICES = ("auto", "cpu", "cuda")
SUITES = {"niah": NiahEval, "kv": KvEval, "loss": LossEval}


def eval_(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model folder, a .gguf file or a Hub id.")],
    suite: Annotated[str, typer.Option(help="What to measure, comma-separated: niah, kv, loss.")] = "niah,kv,loss",
    lengths: Annotated[str, typer.Option(help="Context lengths in tokens, comma-separated.")] = "2K,8K",
    samples: Annotated[int, typer.Option(min=1, help="Questions per suite and length (windows for loss).")] = 20,
    text: Annotated[
        str | None,
        typer.Option(help="Held-out text files or a pattern (JSONL or plain); a shipped book by default."),
    ] = None,
    value: Annotated[
        str | None, typer.Option(help="What is to be recalled: words, numbers (niah) or uuid (kv).")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Keep samples.jsonl and summary.json here; a killed run then goes on.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Other seeds give other prompts.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Score a model by context length.

    niah hides a fact in a book and asks for it; kv asks for values of a
    long JSON object; loss shows whether text is still predicted better
    further on in the context. Scores come with n and a 95% interval:
    20 questions tell 50% from 90%, but not from 60%.

        unspool eval MODEL --suite niah --lengths 256,1K,2K --value words

        unspool eval MODEL --lengths 2K,8K --samples 50 --out scores/mine
    """
    evals = chosen_evals(suite, lengths, samples=samples, text=text, value=value)
    if out is not None:
        _check_out(out)
        summary = _score(model, evals, out, seed=seed, device=device)
    else:
        with tempfile.TemporaryDirectory() as folder:
            summary = _score(model, evals, Path(folder) / "scores", seed=seed, device=device)
    if as_json:
        typer.echo(json.dumps(summary, indent=1))
    else:
        _print_table(summary["cells"])


def chosen_evals(suites: str, lengths: str, *, samples: int, text: str | None, value: str | None) -> list[Eval]:
    """The evals of a recipe that the options stand for."""
    names = list(dict.fromkeys(name.strip() for name in suites.split(",") if name.strip()))
    sizes = sorted({_length(length) for length in lengths.split(",") if length.strip()})
    if not names or not sizes:
        raise ConfigError("eval needs at least one suite and one length, such as --suite niah --lengths 2K,8K.")
    for name in names:
        lookup(SUITES, name, kind="--suite")
    takers = lookup(VALUES, value, kind="--value") if value else set()
    if value and not takers & set(names):
        raise ConfigError(f"--value {value} is for {' and '.join(sorted(takers))}; the suites here are {suites}.")
    return [_eval(name, sizes, samples, text, value if name in takers else None) for name in names]


def _eval(name: str, lengths: list[int], samples: int, text: str | None, value: str | None) -> Eval:
    options: dict[str, Any] = {"suite": name, "samples": samples}
    if value:
        options["value"] = value
    if name == "kv":
        return KvEval(**options, lengths=lengths)
    if name == "niah":
        return NiahEval(**options, lengths=lengths, text=text)
    # Its ranges of positions cover the shorter lengths.
    return LossEval(**options, length=lengths[-1], text=text)


def _length(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"--lengths {text.strip()!r}: {error}.") from error


def _check_out(out_dir: Path) -> None:
    """Scores replace their folder whole, so it must not hold anything else."""
    from unspool.base.artefact import read_manifest

    if not out_dir.exists():
        return
    holds_scores = (read_manifest(out_dir) or {}).get("kind") == "scores"
    if not out_dir.is_dir() or (any(out_dir.iterdir()) and not holds_scores):
        raise ConfigError(f"--out {out_dir} exists and holds no scores; give a new folder, so that nothing is lost.")


def _score(model: str, evals: list[Eval], out_dir: Path, *, seed: int, device: str) -> dict[str, Any]:
    # Here and not above: torch and transformers take seconds to import, which `--help` should not.
    from unspool.eval.run import Scoring, score_model
    from unspool.model.load import model_digest

    target, dtype = _device(device)
    name = Path(model).name or model
    scoring = Scoring(
        model=name, model_hash=model_digest(model), evals=evals, seed=seed, out_dir=out_dir, root=Path.cwd()
    )
    return score_model(model, scoring, device=target, dtype=dtype)


def _device(name: str) -> "tuple[torch.device, torch.dtype]":
    import torch

    if name not in DEVICES:
        raise ConfigError(f"--device {name!r} is not known; use {', '.join(DEVICES)}.")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device here; use --device cpu.")
    cuda = name == "cuda" or (name == "auto" and torch.cuda.is_available())
    return (torch.device("cuda"), torch.bfloat16) if cuda else (torch.device("cpu"), torch.float32)


def _print_table(cells: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("suite", "length", "positions or depth")
    for column in ("value", "95% interval", "n"):
        table.add_column(column, justify="right")
    for cell in cells:
        table.add_row(*table_row(cell))
    Console().print(table)


def table_row(cell: dict[str, Any]) -> tuple[str, ...]:
    """One cell of a summary for reading: shares in percent, losses in nats."""

    def shown(number: float | None) -> str:
        if number is None:
            return "–"
        return f"{number:.3f}" if cell["metric"] == "loss" else f"{100 * number:.0f}%"

    if cell["metric"] == "loss":
        part = f"{format_size(cell['from'])}–{format_size(cell['to'])}"
    else:
        part = "all" if cell["depth"] is None else f"depth {cell['depth']:g}"
    interval = "–" if cell["low"] is None else f"{shown(cell['low'])} to {shown(cell['high'])}"
    return cell["suite"], format_size(cell["length"]), part, shown(cell["value"]), interval, str(cell["n"])
