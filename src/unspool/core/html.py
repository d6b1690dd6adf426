"""Self-contained HTML pages: templates that escape all they are given, and writing the result whole."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from unspool.core.artifacts import write_atomic


def templates_in(*folders: Path) -> Environment:
    """Templates of a package; a name that is not given is an error and not an empty place."""
    return Environment(
        loader=FileSystemLoader(folders),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def write_html(out_file: Path, page: str) -> None:
    out_file.parent.mkdir(parents=True, exist_ok=True)
    # JSON and names of files may carry lone surrogates, which no file can hold.
    write_atomic(out_file, page.encode("utf-8", "replace").decode("utf-8"))
