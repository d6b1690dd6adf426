"""The generated reference holds everything that the code has, and no description is empty."""

import importlib
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
import yaml
from packaging.version import Version
from pydantic import Field, TypeAdapter

import unspool
from unspool.core.config import Config, key_description
from unspool.core.sizes import Size
from unspool.data.packing.config import STRATEGIES, DatasetConfig
from unspool.data.sources.registry import SOURCES
from unspool.evals.backends.base import BACKENDS
from unspool.evals.config import eval_adapter
from unspool.evals.suites import SUITES
from unspool.recipe.load import load_recipe
from unspool.recipe.paths import bundled_recipes, bundled_studies
from unspool.recipe.schema import Recipe
from unspool.rope.methods import ROPE_METHODS, AnyRopeMethod
from unspool.studies.paper_numbers import paper_problems
from unspool.studies.schema import study_problems
from unspool.training.config import StageConfig
from unspool.training.losses.config import LOSSES
from unspool.training.optim.config import OPTIMIZERS

TOOLS = Path(__file__).parents[1] / "tools"
sys.path.insert(0, str(TOOLS))

from reference.api_page import SETTINGS, public_names, settings_table  # noqa: E402
from reference.build import PAGES  # noqa: E402
from reference.command_page import commands, options_table  # noqa: E402
from reference.keys import keys_table, since  # noqa: E402
from reference.markdown import summary  # noqa: E402
from reference.recipe_page import examples, link, sections  # noqa: E402
from reference.registry_pages import backend_summary  # noqa: E402
from reference.study_page import SECTIONS  # noqa: E402

SENTENCES = r"[A-Z`].{8,}\."
INTRO = (TOOLS / "reference" / "recipe_intro.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return {name: build() for name, build in PAGES.items()}


# Recipe keys


def config_classes() -> list[type[Config]]:
    """Every config class of the package, registered or not."""
    for module in pkgutil.walk_packages(unspool.__path__, "unspool."):
        if module.name.endswith(("config", "schema")):
            importlib.import_module(module.name)
    return [cls for cls in _below(Config) if cls.__module__.startswith("unspool.")]


def _below(cls: type[Config]) -> Iterator[type[Config]]:
    for found in cls.__subclasses__():
        yield found
        yield from _below(found)


def undescribed(classes: Iterable[type[Config]]) -> list[str]:
    """Keys whose description is missing, or is no sentence."""
    return [
        f"{cls.__name__}.{name}: {key_description(cls, name)!r}"
        for cls in classes
        for name in cls.model_fields
        if not re.fullmatch(SENTENCES, key_description(cls, name), re.DOTALL)
    ]


def test_every_key_of_every_config_class_has_a_description():
    classes = config_classes()
    assert len(classes) > 50
    assert undescribed(classes) == []


def test_a_key_without_a_description_is_found():
    class Base(Config):
        kind: str = Field(description="Kind of toy.")

    class Toy(Base):
        kind: Literal["toy"]
        speed: float = 1.0
        color: str = Field("red", description="")
        size: int = Field(1, description="size in tokens")
        length: int = Field(1, description="Length in tokens.")

    assert undescribed([Base, Toy]) == ["Toy.speed: ''", "Toy.color: ''", "Toy.size: 'size in tokens'"]


def test_descriptions_consist_of_short_sentences():
    texts = {key_description(cls, name) for cls in config_classes() for name in cls.model_fields}
    parts = [part for text in texts for part in re.split(r"[.;:] ", text)]
    assert [part for part in parts if len(part.split()) > 25] == []


def test_a_table_shows_type_default_and_version_of_each_key():
    class Toy(Config):
        speed: float = Field(gt=0, description="Speed of the toy.")
        color: Literal["red", "blue"] = Field("red", description="Its color.", json_schema_extra={"since": "0.3.0"})
        length: Size | None = Field(None, description="Length of the toy.")

    rows = [line.split("|")[1:-1] for line in keys_table(Toy, "toy", link).splitlines() if "<span" in line]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ['<span id="toy-speed"></span>`speed`', "number above 0<br>required<br>since 0.1.0", "Speed of the toy."],
        [
            '<span id="toy-color"></span>`color`',
            "`red` or `blue`<br>default: `red`<br>since 0.3.0",
            "Its color.",
        ],
        ['<span id="toy-length"></span>`length`', "size<br>optional<br>since 0.1.0", "Length of the toy."],
    ]


def test_no_key_is_newer_than_the_package():
    for cls in config_classes():
        for field in cls.model_fields.values():
            assert Version(since(field)) <= Version(unspool.__version__)


def test_every_part_of_a_recipe_has_a_section_with_all_its_keys(pages):
    shown = {cls: f"recipe.md#{anchor}" for anchor, cls in ((one.anchor, one.cls) for one in sections())}
    shown |= {Recipe: "recipe.md#top-level"}
    shown |= {cls: f"sources.md#{name}" for name, cls in SOURCES.items()}
    shown |= {cls: f"strategies.md#{name}" for name, cls in STRATEGIES.items()}
    shown |= {cls: f"rope-methods.md#{name}" for name, cls in ROPE_METHODS.items()}
    shown |= {cls: f"optimizers.md#{name}" for name, cls in OPTIMIZERS.items()}
    shown |= {cls: f"losses.md#{name}" for name, cls in LOSSES.items()}
    shown |= {suite.config: f"suites.md#{name}" for name, suite in SUITES.items()}
    parts = {cls.__name__ for cls in shown}
    # What pydantic's schema of a recipe is made of.
    assert parts >= {*Recipe.model_json_schema()["$defs"], "Recipe", "DatasetConfig"}
    for cls, address in shown.items():
        name, _, anchor = address.partition("#")
        text = pages[f"reference/{name}"]
        assert f"{{ #{anchor} }}" in text, address
        for key, field in cls.model_fields.items():
            assert f'<span id="{anchor}-{field.alias or key}"></span>' in text, (address, key)


def test_every_bundled_recipe_is_listed(pages):
    assert all(f"| `{name}` |" in pages["reference/recipe.md"] for name in bundled_recipes())


# Examples


def example_cases() -> dict[str, Any]:
    """What validates the example of each section and registered name."""
    cases: dict[str, Any] = {one.path: one.cls for one in sections()}
    cases |= {f"kind: {name}": cls for name, cls in SOURCES.items()}
    cases |= {f"dataset: {name}": DatasetConfig for name in STRATEGIES}
    cases |= {f"method: {name}": AnyRopeMethod for name in ROPE_METHODS}
    cases |= {f"name: {name}": cls for name, cls in OPTIMIZERS.items()}
    cases |= {f"weights: {name}": cls for name, cls in LOSSES.items()}
    return cases | {f"suite: {name}": None for name in SUITES}


def test_every_section_and_registered_name_has_an_example_and_nothing_else_has():
    studies = {f"study: {name}" for name in (*SECTIONS, "margin")}
    assert {*examples()} == {*example_cases()} | studies


@pytest.mark.parametrize("name", example_cases())
def test_every_example_is_valid(name):
    cls = example_cases()[name]
    adapter = eval_adapter() if cls is None else TypeAdapter(cls)
    (content,) = yaml.safe_load(examples()[name]).values()
    by_name = isinstance(content, dict) and name.startswith(("datasets", "dataset:", "kind:", "synth"))
    entries = content if isinstance(content, list) else [content]
    if by_name and "." not in name.partition(": ")[0].removesuffix(".replace"):
        entries = list(content.values())
    for entry in entries:
        # YAML 1.1 reads 1e-5 as text; pydantic turns it into a number.
        value = entry["replace"] if name == "datasets.replace" else entry
        assert adapter.validate_python(value)


def test_the_changes_that_the_page_shows_are_valid(tmp_path):
    changes = re.findall(r"--set (\S+)", INTRO)
    assert len(changes) == 3  # the first is the syntax
    load_recipe("tiny", changes[1:])
    (extending,) = re.findall(r"```yaml\n(extends: .*?)```", INTRO, re.DOTALL)
    (tmp_path / "mine.yaml").write_text(extending)
    stages = load_recipe(tmp_path / "mine.yaml").recipe.stages
    assert [(stage.name, stage.tokens) for stage in stages] == [("64k", 1 << 30)]
    assert all(isinstance(stage, StageConfig) for stage in stages)


# Study files


def test_every_key_of_a_study_is_described(pages):
    text = pages["reference/study.md"]
    for name, (_, keys) in SECTIONS.items():
        assert [key for key, described in keys.items() if not re.fullmatch(SENTENCES, described, re.DOTALL)] == []
        assert all(f'<span id="{name}-{key}"></span>' in text for key in keys)
    assert all(f"`{name}`" in text for name in bundled_studies())


def test_the_examples_of_a_study_file_are_valid():
    whole = yaml.safe_load(examples()["study: study"]) | yaml.safe_load(examples()["study: margin"])
    assert [*study_problems(whole)] == []
    arms = yaml.safe_load(examples()["study: arms"])
    assert [*study_problems({"name": "x", "recipe": "tiny"} | arms)] == []
    paper = yaml.safe_load(examples()["study: paper"])
    assert [*paper_problems(paper, ["no-masks", "masks"])] == []


# Commands


def without_help(found: Iterable[tuple[str, Any]]) -> list[str]:
    """Commands, arguments and options whose help is empty."""
    missing = []
    for name, command in found:
        missing += [] if (command.help or "").strip() else [name]
        missing += [
            f"{name} {one.opts[-1]}" for one in command.params if not one.hidden and not (one.help or "").strip()
        ]
    return missing


def test_every_command_argument_and_option_has_a_help_text():
    found = dict(commands())
    assert {"run", "recipes check", "inspect rows", "study"} <= {*found}
    assert without_help(found.items()) == []


def test_a_command_or_an_option_without_a_help_text_is_found():
    app = typer.Typer()

    @app.command()
    def silent(path: Annotated[str, typer.Argument()], fast: bool = False) -> None:
        pass

    @app.command()
    def spoken(path: Annotated[str, typer.Argument(help="A file.")]) -> None:
        """Say something."""

    group: Any = typer.main.get_command(app)
    assert without_help(group.commands.items()) == ["silent", "silent path", "silent --fast"]


def test_every_option_is_on_the_page(pages):
    text = pages["reference/commands.md"]
    for name, command in commands():
        assert f" {{ #{name.replace(' ', '-')} }}" in text, name
        assert options_table(command) in text, name


# Registries and the API


def unsummarized(entries: dict[str, Any]) -> list[str]:
    return [name for name, entry in entries.items() if not summary(entry)]


@pytest.mark.parametrize("registry", [SOURCES, STRATEGIES, ROPE_METHODS, OPTIMIZERS, LOSSES])
def test_every_registered_class_has_a_summary(registry):
    assert unsummarized(registry) == []


def test_every_suite_has_a_title_and_a_summary_and_every_task_a_metric():
    assert unsummarized({name: suite.config for name, suite in SUITES.items()}) == []
    for suite in SUITES.values():
        assert suite.title
        assert all(task.metric for task in suite.tasks.values())


def test_every_backend_has_a_summary():
    assert [name for name in BACKENDS if not backend_summary(name)] == []


def test_every_public_name_has_a_docstring_and_a_place_on_the_page(pages):
    names = [name for group in public_names().values() for name in group]
    assert names == unspool.__all__
    assert unsummarized({name: getattr(unspool, name) for name in names}) == []
    assert [name for name in names if f'<span id="{name}"></span>' not in pages["reference/api.md"]] == []


@pytest.mark.parametrize("cls", SETTINGS)
def test_every_setting_of_a_function_is_described(cls, pages):
    rows = [line.strip("| ").split(" | ") for line in settings_table(cls).splitlines()[2:]]
    assert [row[0].strip("`") for row in rows] == [*cls.__annotations__]
    assert settings_table(cls) in pages["reference/api.md"]


def test_an_entry_without_a_docstring_is_found():
    class Silent(Config):
        pass

    class Spoken(Config):
        """Something."""

    def function() -> None: ...

    assert unsummarized({"silent": Silent, "spoken": Spoken, "function": function}) == ["silent", "function"]
