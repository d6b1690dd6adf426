"""`unspool rope`: advice before training on extending a model to a context length, and trials of RoPE methods."""

from pathlib import Path
from typing import Annotated

import typer

from unspool.cli.inspect_views import check_page
from unspool.core.console import PlainConsole, print_json
from unspool.core.errors import ConfigError


def rope(
    context_length: Annotated[str, typer.Option("--context", help="Context length to extend to, such as 128K.")],
    model: Annotated[
        str | None, typer.Option(help="Advise on this model: a Hub id, folder, .gguf file or asset:NAME.")
    ] = None,
    trial: Annotated[
        str | None,
        typer.Option("--trial", metavar="MODEL", help="Measure the loss of this model with several RoPE methods."),
    ] = None,
    candidates: Annotated[
        list[str] | None,
        typer.Option(
            "--candidate",
            metavar="METHOD",
            help="Trial: a method, as yarn or abf:base=8e6. Repeatable. Default: unchanged, ntk, abf at two bases, "
            "pi, yarn, llama3, cope and harpe, which the word default adds to others.",
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Trial: text with long documents, JSONL or plain. Default: two bundled books."
        ),
    ] = None,
    windows: Annotated[int, typer.Option(metavar="N", help="Trial: number of windows of text.")] = 8,
    tokens: Annotated[
        str | None, typer.Option(help="Trial: train each candidate for so many tokens first, such as 2M.")
    ] = None,
    train_text: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Trial: text to train on. Default: the documents of --text without windows, or bundled books.",
        ),
    ] = None,
    stage_settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Trial: key of the training stage, as lr=1e-4. Repeatable."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Trial: seed of the windows and of the training.")] = 0,
    device: Annotated[str, typer.Option(help="Trial: auto, cpu or cuda.")] = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Trial: folder for the results. Default: runs/rope-MODEL-CONTEXT.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page with plots to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Advise on RoPE settings for a longer context: bounds, settings, published recipes. Or try RoPE methods.

    B(m) is how much higher a similar key scores than a random one at
    distance m (Men et al.). Each method is shown with the distance up to
    which B(m) is not negative. Nothing is trained and no weights are read.

        unspool rope --model HuggingFaceTB/SmolLM2-135M --context 32K

        unspool rope --model asset:tiny-base --context 8K --html page.html

    With --trial, the model reads the same windows of text with each RoPE
    method. The methods are ranked by their loss beyond the model's context.
    --tokens trains each method first, on the same rows. An interrupted trial
    continues when you run the same command again.

        unspool rope --trial HuggingFaceTB/SmolLM2-135M --context 32K --text books.jsonl

        unspool rope --trial asset:tiny-base --context 1K --candidate default --candidate abf:base=5e3

        unspool rope --trial asset:tiny-base --context 1K --tokens 64K --set lr=1e-3
    """
    if (model is None) == (trial is None):
        raise ConfigError("give --model MODEL for advice, or --trial MODEL to measure the loss, but not both.")
    if trial is not None:
        if html is not None:
            raise ConfigError("--html writes the page of --model; a trial has none, so remove it or use --json.")
        from unspool.cli.eval_options import read_settings
        from unspool.studies.rope_trial.trial import try_rope

        tried = try_rope(
            trial,
            context_length,
            candidates or (),
            tokens=tokens,
            text=text,
            train_text=train_text,
            windows=windows,
            stage_settings=read_settings(stage_settings or []),
            seed=seed,
            device=device,
            out=out,
        )
        if as_json:
            print_json(tried.to_dict())
        else:
            tried.print(PlainConsole())
            typer.echo(f"\nall numbers: {(tried.folder / 'trial.json').absolute()}")
        return
    _refuse_trial_options(
        candidate=candidates, text=text, tokens=tokens, train_text=train_text, set=stage_settings, out=out
    )
    check_page(html)
    from unspool.models.advise_rope import advise_rope

    advice = advise_rope(model or "", context_length)
    if html is not None:
        advice.save(html, "html")
    if as_json:
        print_json(advice.to_dict())
        return
    advice.print(PlainConsole())
    if html is not None:
        typer.echo(f"\npage: {html.absolute()}")


def _refuse_trial_options(**given: object) -> None:
    for name, value in given.items():
        if value:
            raise ConfigError(f"--{name.replace('_', '-')} works only with --trial MODEL; remove it, or use --trial.")
