"""Self-contained HTML pages: escaping templates, SVG elements, and atomic writing."""

import base64
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from unspool.core.artifacts import write_atomic
from unspool.core.formatting import printable


def load_templates(*folders: Path) -> Environment:
    """Load templates from some folders and this one; a missing variable is an error, not an empty string."""
    return Environment(
        loader=FileSystemLoader([*folders, Path(__file__).parent]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def write_text(out_file: Path, content: str) -> None:
    """Write a page or another text atomically; lone surrogates from JSON or file names become question marks."""
    out_file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out_file, content.encode("utf-8", "replace").decode("utf-8"))


def element(name: str, *children: object, **attributes: object) -> Markup:
    """Build one SVG or HTML element; children and attribute values are escaped unless they are markup.

    Attributes that are None are omitted, `class_` is written as `class`, and floats get one decimal.
    """
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    written = "".join(f' {key}="{_escape(value)}"' for key, value in given.items())
    return Markup(f"<{name}{written}>{''.join(map(_escape, children))}</{name}>")


def _escape(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1f}".removesuffix(".0")
    return escape(printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value)


def embedded(page: str, height: int = 600) -> str:
    """Embed a whole page in another one, such as a notebook, without changing its styles."""
    return element(
        "iframe", srcdoc=Markup(escape(page)), width="100%", height=height, style="border: 0; background: white"
    )


def svg(width: float, height: float, label: str, *children: Markup, **attributes: object) -> Markup:
    """Build a drawing that scales with its page; screen readers read `label`."""
    shared = {"class_": "chart", "viewBox": f"0 0 {width:g} {height:g}", "role": "img", "aria_label": label}
    return element("svg", *children, **(shared | attributes))


def picture(drawing: str, label: str) -> Markup:
    """Show an SVG file as an image, so that it cannot run scripts or load anything."""
    source = "data:image/svg+xml;base64," + base64.b64encode(drawing.encode()).decode()
    return Markup('<img class="picture" alt="{}" src="{}">').format(printable(label), source)


def svg_text(x: float, y: float, shown: object, anchor: str = "middle", class_: str | None = "tick") -> Markup:
    return element("text", shown, class_=class_, x=x, y=y, text_anchor=anchor)


def svg_line(x1: float, y1: float, x2: float, y2: float, class_: str = "grid") -> Markup:
    return element("line", class_=class_, x1=x1, x2=x2, y1=y1, y2=y2)
