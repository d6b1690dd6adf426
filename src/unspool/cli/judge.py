"""`unspool judge`: scores for answers that no rule can score, and how far a judge can be trusted."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unspool.cli.eval_options import print_table
from unspool.core.errors import ConfigError

if TYPE_CHECKING:
    from unspool.evals.judge.run import Judge


def judge(
    run: Annotated[
        Path | None, typer.Argument(metavar="RUN", help="A run, or a folder that `unspool eval --out` wrote.")
    ] = None,
    check: Annotated[
        Path | None, typer.Option(help="Instead of a run: JSONL with question, references, output and label (0 to 3).")
    ] = None,
    url: Annotated[str | None, typer.Option(help="Of the judge's server, such as http://localhost:8000/v1.")] = None,
    model_name: Annotated[str | None, typer.Option(help="What the server calls the judge.")] = None,
    model: Annotated[str | None, typer.Option(help="A judge in this process: a model folder or Hub id.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Questions to the server at a time.")] = 8,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for one reply.")] = 600,
    price_in: Annotated[float, typer.Option(min=0, help="Of a million prompt tokens, for the estimate.")] = 0.0,
    price_out: Annotated[float, typer.Option(min=0, help="Of a million reply tokens.")] = 0.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say how much would be asked.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Let a model grade answers, by HELMET's protocols.

    Replies are kept by content, so that a killed run goes on and nothing
    is asked twice. What is to be asked is said first, with its price.

        unspool judge runs/mine --url http://localhost:8000/v1 --model-name llama --dry-run

        unspool judge --check graded.jsonl --url http://localhost:8000/v1 --model-name llama
    """
    from unspool.evals.judge.run import estimate, judge_folder, read_samples, replies_for, scores_folders

    if (run is None) == (check is None):
        raise ConfigError("judge needs either a RUN or --check FILE.")
    chosen = _judge(url, model_name, model, requests, timeout)
    if check is not None:
        _check(check, chosen, as_json)
        return
    assert run is not None
    summaries = []
    for folder in scores_folders(run):
        with replies_for(folder, chosen.name) as replies:
            planned = estimate(read_samples(folder), replies)
        price = f", about {planned.cost(price_in, price_out):.2f}" if price_in or price_out else ""
        typer.echo(f"{folder.name}: {planned}{price}", err=True)
        if not dry_run:
            summaries.append(judge_folder(folder, chosen))
    if as_json:
        typer.echo(json.dumps(summaries, indent=1))
    else:
        _print(summaries)


def _check(path: Path, chosen: "Judge", as_json: bool) -> None:
    from unspool.evals.judge.run import JUDGEMENTS, JudgeReplies, check_judge

    if not path.is_file():
        raise ConfigError(f"--check {path}: no such file.")
    with JudgeReplies(path.with_name(f"{path.name}.{JUDGEMENTS}"), chosen.name) as replies:
        found = vars(check_judge(path, chosen, replies))
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    for name, value in found.items():
        shown = "–" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
        typer.echo(f"{name.replace('_', ' ')}: {shown}")


def _judge(url: str | None, model_name: str | None, model: str | None, requests: int, timeout: float) -> "Judge":
    from unspool.evals.backends.openai import Patience, Server
    from unspool.evals.judge.protocols import REPLY_TOKENS
    from unspool.evals.judge.run import Judge

    if (url is None) == (model is None):
        raise ConfigError("judge needs either a server (--url and --model-name) or a model of this process (--model).")
    if url is not None:
        if model_name is None:
            raise ConfigError("--url needs --model-name: what the server calls the judge.")
        server = Server(url=url, model=model_name, patience=Patience(seconds=timeout), width=requests)
        return Judge(name=model_name, ask=lambda prompt: server.chat(prompt, REPLY_TOKENS), width=requests)
    from unspool.cli.eval import device_and_dtype
    from unspool.evals.backends.base import ModelBackend
    from unspool.evals.judge.run import local_judge

    assert model is not None
    target, dtype = device_and_dtype("auto")
    return Judge(name=model, ask=local_judge(ModelBackend(model, device=target, dtype=dtype)))


def _print(summaries: list[dict[str, Any]]) -> None:
    for summary in summaries:
        typer.echo(summary["model"])
        print_table(summary)
