"""Small pieces of Markdown that the generated pages share."""

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, stacked: bool = False) -> str:
    """A Markdown table. `stacked` shows each row as a block on narrow screens (docs/stylesheets/site.css)."""
    lines = [header, ["---"] * len(header), *rows]
    text = "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines)
    return f'<div class="stacked" markdown>\n\n{text}\n\n</div>\n' if stacked else f"{text}\n"


def cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def fence(text: str, language: str) -> str:
    return f"```{language}\n{text.strip()}\n```\n"


def code(text: object) -> str:
    return f"`{text}`"


def either(names: Sequence[str]) -> str:
    """Names as code: `a`, `b` or `c`."""
    *others, last = map(code, names)
    return f"{', '.join(others)} or {last}" if others else last


def summary(cls: object) -> str:
    """The first line of a docstring."""
    return (cls.__doc__ or "").strip().split("\n", 1)[0]


def anchor(key: str) -> str:
    """An invisible anchor, for tables, whose rows have none."""
    return f'<span id="{key}"></span>'


def page(title: str, intro: str, parts: Iterable[str]) -> str:
    return f"# {title}\n\n{intro.strip()}\n\n" + "\n".join(parts)
