"""The page of the Python API: the public names, with signatures and docstrings by mkdocstrings."""

import inspect
import re
from pathlib import Path

import unspool
from reference.markdown import anchor, code, page, summary, table
from unspool.evals.eval_request import EvalSettings
from unspool.evals.generate import GenerateSettings
from unspool.reporting.judge import JudgeSettings


def public_names() -> dict[str, dict[str, str]]:
    """Module of each public name, by the heading under which `__init__.pyi` lists it."""
    text = Path(unspool.__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    groups: dict[str, dict[str, str]] = {}
    for heading, home, name in re.findall(r"^    (?:# (.+)|from (\S+) import (\w+) as \3)$", text, re.MULTILINE):
        if heading:
            groups[heading] = {}
        else:
            groups[list(groups)[-1]][name] = home
    return groups


# Types of `**settings`, whose keys are described by comments.
SETTINGS = (EvalSettings, GenerateSettings, JudgeSettings)


def settings_table(cls: type) -> str:
    """The keys of a TypedDict, with their types and comments."""
    lines = re.findall(r"^    (\w+): (.+?)(?:  # (.+))?$", inspect.getsource(cls), re.MULTILINE)
    return table(("setting", "type", "meaning"), ((code(name), code(kind), text) for name, kind, text in lines))


def api_page() -> str:
    intro = (
        "Every name can be imported from `unspool`, such as `unspool.load`. Names are loaded when they are first used, "
        "so `import unspool` is fast."
    )
    parts = []
    for heading, names in public_names().items():
        rows = ((f"[`{name}`](#{name})", summary(getattr(unspool, name))) for name in names)
        parts += [f"## {heading}\n", table(("name", "summary"), rows)]
        for name, home in names.items():
            options = f"    options:\n      heading: unspool.{name}\n      toc_label: unspool.{name}\n"
            parts.append(f"{anchor(name)}\n\n::: {home}.{name}\n{options}")
    parts.append("## Settings { #settings }\n\nKeyword arguments that functions take as `**settings`.\n")
    for cls in SETTINGS:
        parts.append(f"### {cls.__name__} {{ #{cls.__name__} }}\n\n{cls.__doc__}\n\n{settings_table(cls)}")
    return page("Python API", intro, parts)
