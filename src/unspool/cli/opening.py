"""What the commands of `unspool look` share: which rows sets are meant, and how they are read."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unspool.base.errors import ConfigError
from unspool.base.lookup import nearest

if TYPE_CHECKING:
    from unspool.inspect.place import Place
    from unspool.inspect.reading import Reading

Paths = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="RUN|ROWS…",
        help="Runs, or folders of their rows/; the current folder if none is given.",
        show_default=False,
    ),
]
Name = Annotated[list[str] | None, typer.Option(help="Only the rows set of this name; may be given several times.")]
Tokenizer = Annotated[str | None, typer.Option(help="A folder or Hub id; by default the one that the run names.")]


def find_rows(paths: list[Path] | None, names: list[str] | None) -> "list[Place]":
    """The rows sets in these paths, in order, or in that of `names`; ConfigError if there are none such."""
    from unspool.inspect.place import boxes, find_place

    found = []
    for path in paths or [Path()]:
        place = find_place(path)
        if place.kind == "run":
            found += [find_place(box.folder) for box in boxes(path) if box.kind == "rows"]
        elif place.kind == "rows":
            found.append(place)
        else:
            raise ConfigError(f"{path} holds no rows; give a run or a folder of its rows/.")
    there = [place.path.name for place in found]
    for name in names or []:
        if name not in there:
            guess = nearest(name, there)
            hint = f"did you mean {guess!r}?" if guess else f"there are {', '.join(there) or 'none'}."
            raise ConfigError(f"--name {name!r}: no rows set is called so; {hint}")
    if names:
        found = [place for name in names for place in found if place.path.name == name]
    if not found:
        raise ConfigError(f"{', '.join(map(str, paths or [Path()]))}: no rows have been made here yet.")
    return found


def find_reading(place: "Place", tokenizer: str | None) -> "Reading":
    # Only now: tokenizers come with torch and transformers, which take seconds to import.
    from unspool.inspect.tokenizer import find_tokenizer
    from unspool.recipes.paths import resolve_path

    # What is named on the command line starts from the current folder, what a recipe names also from the run's.
    root = Path() if tokenizer or place.run_dir is None else place.run_dir
    return find_tokenizer(place, tokenizer, lambda name: resolve_path(name, root))


def check_page(html: Path | None) -> None:
    if html is not None and html.is_dir():
        raise ConfigError(f"--html {html} is a folder; name the file to write, such as {html / 'look.html'}.")
