"""`unspool audit`: check any training setup by probing one step."""

from typing import Annotated

import typer

from unspool.core.console import PlainConsole, print_json

BROKEN = 1  # exit code when a promise is broken; 2 is a usage error


def audit(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE:FUNCTION",
            help="A function without arguments that returns a transformers.Trainer, or a model, its data and a step.",
        ),
    ] = None,
    attention: Annotated[
        str | None,
        typer.Option(help="Claimed attention: intra_document (default), or full if documents attend to each other."),
    ] = None,
    positions: Annotated[
        str | None, typer.Option(help="Claimed position ids: restart in every document (default), or continue.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print every verdict as JSON.")] = False,
) -> None:
    """Check a long-context training setup by probing one step of it.

    The step runs a few times, with real batches and with batches in which
    the tokens of some documents are replaced. Each promise gets a verdict
    with its evidence: whether documents are isolated, labels shifted once,
    the loss averaged over the step's tokens, and ten more. The exit code is
    1 if a promise is broken. Without an argument, Unspool's own collator is
    probed on the bundled model.

        unspool audit

        unspool audit train.py:build_trainer

        unspool audit my_package.training:build --attention full --json
    """
    from unspool.verification.audits.run import audit_file

    result = audit_file(target, attention=attention, positions=positions)
    if as_json:
        print_json(result.to_dict())
    else:
        PlainConsole().print(str(result), soft_wrap=True)
    if not result.ok:
        raise typer.Exit(BROKEN)
