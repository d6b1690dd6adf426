"""`unspool rope`: advice before training on extending a model to a context length, and trials of RoPE methods."""

from pathlib import Path
from typing import Annotated, Any

import typer

from unspool.cli.inspect_views import check_page
from unspool.core.console import PlainConsole, print_json
from unspool.core.errors import ConfigError

TRIAL = "With --trial"  # heading of these options in the help


def rope(
    context_length: Annotated[str, typer.Option("--context", help="Context length to extend to, such as 128K.")],
    model: Annotated[
        str | None,
        typer.Option(help="Advise on this model: Hub id, folder, .gguf file or asset:NAME; only its config is read."),
    ] = None,
    trial: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Measure the loss of this model with several RoPE methods.")
    ] = None,
    candidates: Annotated[
        list[str] | None,
        typer.Option(
            "--candidate",
            metavar="METHOD",
            rich_help_panel=TRIAL,
            help="A method to try, such as yarn or abf:base=8e6. Repeatable. Default: unchanged, ntk, abf at two "
            "bases, pi, yarn, llama3, cope and harpe. The word default stands for all of these.",
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=TRIAL,
            help="Text with long documents: JSONL or plain. Default: two bundled books.",
        ),
    ] = None,
    windows: Annotated[
        int | None, typer.Option(metavar="N", rich_help_panel=TRIAL, help="Number of windows of text. Default: 8.")
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=TRIAL,
            help="Train each method for so many tokens first, such as 2M. Default: train nothing.",
        ),
    ] = None,
    train_text: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=TRIAL,
            help="Text to train on. Default: the documents of --text that no window is from, or bundled books.",
        ),
    ] = None,
    stage_settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            rich_help_panel=TRIAL,
            help="Set a key of the training stage, such as lr=1e-4. Repeatable.",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, rich_help_panel=TRIAL, help="Seed of the windows and of the training. Default: 0."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(rich_help_panel=TRIAL, help="Device: auto, cpu or cuda. Default: auto.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(rich_help_panel=TRIAL, help="Folder for the results. Default: runs/rope-MODEL-CONTEXT."),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page with plots to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Advise on RoPE settings for a longer context, or try RoPE methods on a text.

    With --model: bounds, settings and published recipes. B(m) is how much
    higher a similar key scores than a random one at distance m (Men et al.).
    Each method is shown with the distance up to which B(m) is not negative.
    Nothing is trained and no weights are read.

        unspool rope --model HuggingFaceTB/SmolLM2-135M --context 32K

        unspool rope --model asset:tiny-base --context 8K --html page.html

    With --trial: the model reads the same windows of text with each method,
    and the methods are ranked by the loss beyond the model's old context.
    --tokens first trains each method on the same rows. An interrupted trial
    continues when you run the same command again.

        unspool rope --trial HuggingFaceTB/SmolLM2-135M --context 32K --text books.jsonl

        unspool rope --trial asset:tiny-base --context 1K --candidate default --candidate abf:base=5e3

        unspool rope --trial asset:tiny-base --context 1K --tokens 64K --set lr=1e-3
    """
    if (model is None) == (trial is None):
        raise ConfigError("give either --model MODEL for advice, or --trial MODEL to measure the loss.")
    given: dict[str, Any] = {
        "--candidate": candidates or None,
        "--text": text,
        "--windows": windows,
        "--tokens": tokens,
        "--train-text": train_text,
        "--set": stage_settings or None,
        "--seed": seed,
        "--device": device,
        "--out": out,
    }
    if trial is not None:
        if html is not None:
            raise ConfigError("--html writes the page of --model; a trial has none, so remove it or use --json.")
        _try(trial, context_length, given, as_json=as_json)
        return
    for option, value in given.items():
        if value is not None:
            raise ConfigError(f"{option} works only with --trial; remove it, or replace --model by --trial.")
    _advise(model or "", context_length, html, as_json=as_json)


def _advise(model: str, context_length: str, html: Path | None, *, as_json: bool) -> None:
    check_page(html)
    from unspool.models.advise_rope import advise_rope

    advice = advise_rope(model, context_length)
    if html is not None:
        advice.save(html, "html")
    if as_json:
        print_json(advice.to_dict())
        return
    advice.print(PlainConsole())
    if html is not None:
        typer.echo(f"\npage: {html.absolute()}")


def _try(model: str, context_length: str, given: dict[str, Any], *, as_json: bool) -> None:
    from unspool.cli.eval_options import read_settings
    from unspool.studies.rope_trial.trial import try_rope

    names = {"--candidate": "candidates", "--set": "stage_settings"}
    options = {
        names.get(option, option.removeprefix("--").replace("-", "_")): value
        for option, value in given.items()
        if value is not None
    }
    options["stage_settings"] = read_settings(options.get("stage_settings", []), example="lr=1e-4")
    found = try_rope(model, context_length, **options)
    if as_json:
        print_json(found.to_dict())
        return
    found.print(PlainConsole())
    typer.echo(f"\nall numbers: {(found.folder / 'trial.json').absolute()}")
