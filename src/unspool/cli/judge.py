"""`unspool judge`: let a model grade answers that no rule can score, and compare its grades with human grades."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unspool.core.console import PlainConsole, print_json
from unspool.core.errors import ConfigError

if TYPE_CHECKING:
    from unspool.evals.judge.run import Agreement
    from unspool.reporting.judge import JudgeResult, JudgeSettings


def judge(
    run: Annotated[
        Path | None, typer.Argument(metavar="RUN", help="Run folder, or a folder that `unspool eval --out` wrote.")
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(
            help="Compare the judge with human grades: JSONL with question, references, output and label (0 to 3)."
        ),
    ] = None,
    url: Annotated[str | None, typer.Option(help="Server of the judge, such as http://localhost:8000/v1.")] = None,
    model_name: Annotated[str | None, typer.Option(help="Name of the judge on the server.")] = None,
    model: Annotated[str | None, typer.Option(help="Run the judge in this process: a model folder or Hub id.")] = None,
    requests: Annotated[int, typer.Option(min=1, metavar="N", help="Concurrent requests to the server.")] = 8,
    timeout: Annotated[float, typer.Option(min=1, metavar="N", help="Seconds to wait for a reply.")] = 600,
    price_in: Annotated[
        float, typer.Option(min=0, metavar="PRICE", help="Price of a million prompt tokens, for the estimate.")
    ] = 0.0,
    price_out: Annotated[float, typer.Option(min=0, metavar="PRICE", help="Price of a million reply tokens.")] = 0.0,
    again: Annotated[
        str | None,
        typer.Option(help="unparsable: ask once more for replies that could not be parsed, with twice the tokens."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the estimate; send no request.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Let a model grade answers that no rule can score, by HELMET's protocols.

    The estimated number of requests and their cost are printed first.
    Replies are cached, so a killed run resumes and no request is sent
    twice. With --check, the command compares the judge's grades with human grades.

        unspool judge runs/mine --url http://localhost:8000/v1 --model-name llama --dry-run

        unspool judge --check graded.jsonl --url http://localhost:8000/v1 --model-name llama
    """
    if (run is None) == (check is None):
        raise ConfigError("give either a RUN or --check FILE.")
    from unspool.reporting import judge as judges

    settings: JudgeSettings = {
        "url": url,
        "model_name": model_name,
        "model": model,
        "requests": requests,
        "timeout": timeout,
        "again": again,
    }
    found: JudgeResult | Agreement
    if run is not None:
        found = judges.judge(run, dry_run=dry_run, price_in=price_in, price_out=price_out, **settings)
    else:
        assert check is not None
        found = judges.check_judge(check, **settings)
    if as_json:
        print_json(found.to_dict())
    else:
        found.print(PlainConsole(highlight=check is None))
