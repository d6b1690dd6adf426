"""`unspool recipes`: list, print and check recipes, and print their JSON schema."""

from typing import Annotated, Any

import typer
from rich.table import Table

from unspool.core.console import PlainConsole, print_json

Override = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Change one value, such as stages.0.lr=2e-5. Repeatable."),
]


def list_recipes(
    ctx: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """List the bundled recipes, print one, check a recipe, or print the JSON schema."""
    if ctx.invoked_subcommand:
        return
    from unspool.recipe.load import load_recipe
    from unspool.recipe.paths import bundled_recipes

    entries: list[dict[str, Any]] = []
    for bundled in bundled_recipes().values():
        recipe = load_recipe(bundled.name).recipe
        entries.append(
            {
                "name": bundled.name,
                "summary": bundled.summary,
                "model": recipe.model if isinstance(recipe.model, str) else recipe.model.size,
                "stages": [
                    {"name": s.name, "context_length": s.context_length, "tokens": s.tokens} for s in recipe.stages
                ],
                "path": str(bundled.path),
            }
        )
    entries.sort(key=lambda entry: max(stage["context_length"] for stage in entry["stages"]))
    if as_json:
        print_json(entries)
    else:
        _print_table(entries)


def _print_table(entries: list[dict[str, Any]]) -> None:
    from unspool.core.sizes import format_size

    table = Table("recipe", "context", "tokens", "what it does", box=None, pad_edge=False)
    for entry in entries:
        contexts = dict.fromkeys(format_size(stage["context_length"]) for stage in entry["stages"])
        tokens = [format_size(stage["tokens"]) for stage in entry["stages"]]
        table.add_row(entry["name"], " ".join(contexts), " + ".join(tokens), entry["summary"])
    PlainConsole().print(table)
    print("\nunspool recipes show NAME > my.yaml   copies one to edit.")


def show(name: Annotated[str, typer.Argument(help="Name of a bundled recipe.")]) -> None:
    """Print a bundled recipe."""
    from unspool.recipe.paths import find_bundled

    print(find_bundled(name).path.read_text(encoding="utf-8"), end="")


def check(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of a bundled recipe.")],
    overrides: Override = None,
    inputs: Annotated[bool, typer.Option("--inputs", help="Also check that the files and the model exist.")] = False,
) -> None:
    """Check a recipe without running it."""
    from unspool.recipe.load import check_inputs, load_recipe

    loaded = load_recipe(recipe, overrides)
    if inputs:
        from unspool.models.location import location

        check_inputs(loaded)
        model = loaded.recipe.model
        location(loaded.model_path(model if isinstance(model, str) else model.tokenizer))
    print(f"{recipe}: no problems found.")


def schema() -> None:
    """Print the JSON schema of recipes, with which editors complete keys.

    Save the schema next to your recipe:

        unspool recipes schema > unspool.schema.json

    Then begin the recipe with this line:

        # yaml-language-server: $schema=unspool.schema.json

    Editors with a YAML language server, such as VS Code, then complete keys, show their descriptions and mark errors.
    """
    from unspool.recipe.json_schema import editor_schema

    print_json(editor_schema())
