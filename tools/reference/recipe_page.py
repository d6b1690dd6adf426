"""The page of recipe keys, with a section for every config class that only one place of a recipe can hold."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import yaml

from reference.keys import keys_table, nested_classes
from reference.markdown import code, fence, summary, table
from unspool.core.config import Config
from unspool.data.sources.base import Source
from unspool.data.sources.registry import SOURCES
from unspool.data.strategies.base import StrategyConfig
from unspool.evals.config import EvalConfig
from unspool.recipe.paths import bundled_recipes
from unspool.recipe.schema import Recipe
from unspool.rope.tables import RopeMethod
from unspool.training.losses.base import LossConfig
from unspool.training.optim.base import OptimizerConfig

HERE = Path(__file__).parent
# Classes that registries hold, with the page of each registry.
REGISTRY_PAGES: dict[type[Config], str] = {
    Source: "sources.md",
    StrategyConfig: "strategies.md",
    RopeMethod: "rope-methods.md",
    EvalConfig: "suites.md",
    OptimizerConfig: "optimizers.md",
    LossConfig: "losses.md",
}


class Section(NamedTuple):
    """A config class, and where a recipe holds it, such as `stages.guard`."""

    path: str
    cls: type[Config]

    @property
    def anchor(self) -> str:
        return self.path.replace(".", "-").replace(": ", "-")


@cache
def examples() -> dict[str, str]:
    """A short example for each section and each registered name."""
    return dict(yaml.safe_load((HERE / "examples.yaml").read_text(encoding="utf-8")))


def example(name: str) -> str:
    if name not in examples():
        raise SystemExit(f"tools/reference/examples.yaml: add an example for {name!r}.")
    return examples()[name]


def sections() -> list[Section]:
    """The sections of the page, in the order of the recipe's keys."""
    return list(dict.fromkeys(_sections(Recipe, "", set())))


def _sections(cls: type[Config], path: str, seen: set[type[Config]]) -> Iterator[Section]:
    for name, field in cls.model_fields.items():
        below = ".".join(filter(None, [path, field.alias or name]))
        if cls is Recipe and name == "sources":  # keys that sources of several kinds have
            for source in SOURCES.values():
                yield from _sections(source, below, seen)
        found = [one for one in nested_classes(field) if registry_page(one) is None and one not in seen]
        for one in found:
            seen.add(one)
            kind = one.model_fields["kind"] if len(found) > 1 else None
            yield Section(f"{below}: {kind.annotation.__args__[0]}" if kind and kind.annotation else below, one)
            yield from _sections(one, below, seen)


def registry_page(cls: type[Config]) -> str | None:
    return next((page for base, page in REGISTRY_PAGES.items() if issubclass(cls, base)), None)


def link(cls: type[Config]) -> str | None:
    """The address of the section that describes a class, from a page of the reference."""
    page = registry_page(cls)
    if page is not None:
        return f"{page}#{cls.name}" if issubclass(cls, StrategyConfig) else page
    return next((f"recipe.md#{one.anchor}" for one in sections() if one.cls is cls), None)


def recipe_page() -> str:
    parts = [(HERE / "recipe_intro.md").read_text(encoding="utf-8")]
    listed = ((code(recipe.name), recipe.summary) for recipe in bundled_recipes().values())
    parts.append("## Bundled recipes { #bundled }\n\n" + table(("name", "what it does"), listed))
    parts.append("## Top level { #top-level }\n\n" + keys_table(Recipe, "top-level", link))
    for section in sections():
        top = section.path.removeprefix("sources.")  # `sources` itself has a page of its own
        depth = "##" if "." not in top else "###"
        parts.append(f"{depth} {section.path} {{ #{section.anchor} }}\n\n{summary(section.cls)}\n")
        parts.append(fence(example(section.path), "yaml"))
        tag = "kind" if ": " in section.path else None
        parts.append(keys_table(section.cls, section.anchor, link, tag=tag))
    return "\n".join(parts)
