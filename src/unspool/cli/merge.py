"""`unspool merge`: average the weights of an extended model and its base."""

from pathlib import Path
from typing import Annotated

import typer

from unspool.core.console import print_json


def merge(
    first: Annotated[
        str, typer.Argument(metavar="A", help="Model that gives config, RoPE settings and tokenizer: the extended one.")
    ],
    second: Annotated[str, typer.Argument(metavar="B", help="Model of the same architecture, such as the base.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write.")],
    weight: Annotated[float, typer.Option(help="Share of A, from 0 to 1; B has the rest.")] = 0.9,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Average the weights of two models: weight × A + (1 − weight) × B.

    Averaging an extended model with its base can recover short tasks. The
    merged model has the RoPE settings, the context length, the tokenizer and
    the data type of A, even if B has others. Architecture, shapes and tokenizer
    must agree. Weights are read and written one tensor at a time.

        unspool merge runs/my-64k HuggingFaceTB/SmolLM2-135M --weight 0.9 --out merged

        unspool eval merged --suite niah --lengths 8K,64K
    """
    from unspool.models.merge import merge as average  # import late, so that --help is fast: it loads torch

    merged = average(first, second, weight=weight, out=out)
    if as_json:
        print_json(merged.to_dict())
        return
    from unspool.core.formatting import format_bytes
    from unspool.core.sizes import format_size

    typer.echo(f"RoPE of A, kept: {merged.rope}, context length {format_size(merged.context_length)}")
    if not merged.same_rope:
        typer.echo(f"RoPE of B, not used: {merged.second_rope}")
    if merged.own_tokens:
        typer.echo(f"{merged.own_tokens} tokens are only in A; their embeddings are those of A.")
    parts = f"{merged.weight:g} × {merged.first} + {1 - merged.weight:g} × {merged.second}"
    typer.echo(f"Merged: {merged.folder} ({parts}, {merged.tensors} tensors, {format_bytes(merged.num_bytes)})")
