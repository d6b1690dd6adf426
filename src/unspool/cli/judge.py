"""`unspool judge`: let a model grade answers that no rule can score, and check how far it agrees with people."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unspool.core.config import lookup
from unspool.core.console import PlainConsole, print_json
from unspool.core.errors import ConfigError
from unspool.core.lock import lock_output

if TYPE_CHECKING:
    from unspool.evals.judge.run import Judge


def judge(
    run: Annotated[
        Path | None, typer.Argument(metavar="RUN", help="Run directory, or a folder written by `unspool eval --out`.")
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(help="Compare the judge with people: JSONL with question, references, output and label (0 to 3)."),
    ] = None,
    url: Annotated[str | None, typer.Option(help="Server of the judge, such as http://localhost:8000/v1.")] = None,
    model_name: Annotated[str | None, typer.Option(help="Name of the judge on the server.")] = None,
    model: Annotated[str | None, typer.Option(help="Run the judge in this process: a model folder or Hub id.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Concurrent requests to the server.")] = 8,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait for a reply.")] = 600,
    price_in: Annotated[float, typer.Option(min=0, help="Price of a million prompt tokens, for the estimate.")] = 0.0,
    price_out: Annotated[float, typer.Option(min=0, help="Price of a million reply tokens.")] = 0.0,
    again: Annotated[
        str | None,
        typer.Option(help="unparsable: ask once more for replies that could not be parsed, with twice the room."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the estimate and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Let a model grade answers, by HELMET's protocols.

    The number of requests and their cost are printed first. Replies are
    cached, so that a killed run resumes and nothing is asked twice.

        unspool judge runs/mine --url http://localhost:8000/v1 --model-name llama --dry-run

        unspool judge --check graded.jsonl --url http://localhost:8000/v1 --model-name llama
    """
    from unspool.evals.judge.run import estimate, judge_folder, read_samples, replies_for, scores_folders

    if (run is None) == (check is None):
        raise ConfigError("give either a RUN or --check FILE.")
    repeats = again is not None and bool(lookup({"unparsable": True}, again, kind="--again"))
    chosen = _judge(url, model_name, model, requests, timeout, repeats)
    if check is not None:
        _check(check, chosen, repeats, as_json)
        return
    assert run is not None
    summaries = []
    scores = scores_folders(run)
    with lock_output(run):
        for folder in scores:
            with replies_for(folder, chosen.name) as replies:
                planned = estimate(read_samples(folder), replies, again=repeats)
            price = f", about {planned.cost(price_in, price_out):.2f}" if price_in or price_out else ""
            typer.echo(f"{folder.name}: {planned}{price}", err=True)
            if not dry_run:
                summaries.append(judge_folder(folder, chosen, again=repeats))
    if as_json:
        print_json(summaries)
    else:
        _print(summaries)


def _check(path: Path, chosen: "Judge", again: bool, as_json: bool) -> None:
    from unspool.evals.judge.run import JUDGEMENTS, JudgeReplies, check_judge

    beside = path.with_name(f"{path.name}.{JUDGEMENTS}")
    with lock_output(beside), JudgeReplies(beside, chosen.name) as replies:
        found = vars(check_judge(path, chosen, replies, again=again))
    if as_json:
        print_json(found)
        return
    for name, value in found.items():
        shown = "–" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
        typer.echo(f"{name.replace('_', ' ')}: {shown}")


def _judge(
    url: str | None, model_name: str | None, model: str | None, requests: int, timeout: float, again: bool
) -> "Judge":
    from unspool.core.http_client import RetryPolicy
    from unspool.evals.backends.openai import Server
    from unspool.evals.judge.run import Judge, local_judge, reply_tokens

    tokens = reply_tokens(again)
    if (url is None) == (model is None):
        raise ConfigError("give either a server (--url and --model-name) or a model (--model).")
    if url is not None:
        if model_name is None:
            raise ConfigError("--url needs --model-name, the name of the judge on the server.")
        server = Server(url=url, model=model_name, retry=RetryPolicy(seconds=timeout), width=requests)
        return Judge(name=model_name, ask=lambda prompt: server.chat(prompt, tokens), width=requests)
    from unspool.evals.backends.transformers import ModelBackend
    from unspool.models.extend import pick_device, pick_dtype

    assert model is not None
    target = pick_device("auto")
    dtype = pick_dtype(None, target)
    return Judge(name=model, ask=local_judge(ModelBackend(model, device=target, dtype=dtype), tokens))


def _print(summaries: list[dict[str, Any]]) -> None:
    from unspool.reporting.score_tables import print_scores

    for summary in summaries:
        typer.echo(summary["model"])
        print_scores(PlainConsole(highlight=True), summary)
