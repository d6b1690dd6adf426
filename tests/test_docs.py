"""The documents name only what exists, and leave out nothing they promise to hold."""

import re
import shlex
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from typer.testing import CliRunner

from test_imports import BESIDE, ORDER, PACKAGES
from unspool.cli.main import build_app
from unspool.core.config import Config
from unspool.data.corpus.config import EngineConfig
from unspool.data.packing.config import DatasetConfig, ReplaceConfig
from unspool.data.sources.registry import SOURCES
from unspool.data.strategies.cip import CIP
from unspool.data.strategies.nextlong import NExtLong
from unspool.data.strategies.pose import PoSE
from unspool.data.strategies.upsample import Upsample
from unspool.data.strategies.utk import UtK
from unspool.evals.suites.helmet import HelmetEval
from unspool.evals.suites.infbench import InfbenchEval
from unspool.evals.suites.key_value import KeyValueEval
from unspool.evals.suites.lveval import LvEval
from unspool.evals.suites.niah import NiahEval
from unspool.evals.suites.nocha import NochaEval
from unspool.evals.suites.perplexity import PerplexityEval
from unspool.evals.suites.ruler import RulerEval
from unspool.evals.suites.short_suite import ShortEval
from unspool.models.config import NewModel
from unspool.recipe.load import load_recipe
from unspool.recipe.paths import bundled_recipes
from unspool.recipe.schema import Recipe
from unspool.rope.harpe import HARPE
from unspool.rope.methods import ABF, NTK, PI, Dynamic, Llama3, LongRoPE, NTKByParts, SelfExtend, Unchanged, YaRN
from unspool.synthesis.config import (
    ChecksConfig,
    DecontaminateConfig,
    LocalGenerator,
    MockGenerator,
    ServerGenerator,
    SynthConfig,
)
from unspool.training.config import (
    AttentionDistillationConfig,
    GuardConfig,
    ReportedHours,
    SamplesConfig,
    StageConfig,
    ValidationConfig,
)
from unspool.training.optim.config import AdamWConfig
from unspool.training.parallel.config import ParallelConfig

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "unspool"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
RECIPES = ROOT / "docs" / "recipes.md"
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((PACKAGE / "assets").rglob("*.md")),
]
# Where a path written in a document begins, as opposed to a path of the reader's.
FOLDERS = ("src/", "tests/", "docs/", "tools/", "benchmarks/", ".ci/")


def code_spans(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


def code(text: str) -> str:
    """Everything set as code, inline or in blocks."""
    return "\n".join([*re.findall(r"```[a-z]*\n(.*?)```", text, re.DOTALL), *code_spans(text)])


def sections(path: Path) -> dict[str, str]:
    """The text under each heading, up to the next heading of any depth."""
    parts = re.split(r"^#+ (.+)$", path.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def by_name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def verbs() -> set[str]:
    command: Any = typer.main.get_command(build_app())
    return set(command.commands)


# Every document


@pytest.mark.parametrize("document", DOCUMENTS, ids=by_name)
def test_every_path_named_exists(document):
    named = [span for span in code_spans(document.read_text()) if span.startswith(FOLDERS) and " " not in span]
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=by_name)
def test_every_link_leads_somewhere(document):
    links = re.findall(r"\]\(([^)\s]+)\)", document.read_text())
    for link in (link for link in links if "://" not in link):
        path, _, anchor = link.partition("#")
        target = (document.parent / path) if path else document
        assert target.exists(), link
        if anchor:
            assert anchor in {_anchor(heading) for heading in sections(target)}, link


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("document", DOCUMENTS, ids=by_name)
def test_every_verb_named_is_one(document):
    named = set(re.findall(r"\bunspool ([a-z]+)\b", code(document.read_text())))
    assert named <= verbs()


@pytest.mark.parametrize("document", DOCUMENTS, ids=by_name)
def test_every_make_target_named_is_one(document):
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"setup", "demo", "test", "check", "bench", "clean"} <= targets
    assert set(re.findall(r"\bmake ([a-z]+)\b", code(document.read_text()))) <= targets


def test_every_dependency_has_its_version_in_the_constraints_and_nothing_else_stands_there():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    wanted = {re.split(r"[<>=\[]", text)[0] for text in [*project["dependencies"], *(t for e in extras for t in e)]}
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    # A build tag such as +cpu would decide for everybody which torch they get.
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    assert {_plain(name) for name in wanted} - {_plain(line.split("==")[0]) for line in lines} == set()


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")


# The map


def test_every_package_has_its_line():
    named = re.findall(r"^\| `(\w+)` \|", sections(ARCHITECTURE)["Packages"], re.MULTILINE)
    assert sorted(named) == sorted(PACKAGES)


def test_the_map_shows_the_import_order_that_is_enforced():
    order = " → ".join(" | ".join([name, *(other for other, at in BESIDE.items() if at == name)]) for name in ORDER)
    assert order in ARCHITECTURE.read_text()
    assert order in (ROOT / "CONTRIBUTING.md").read_text()


def test_the_map_fits_two_screens():
    assert len(ARCHITECTURE.read_text().split()) < 1200


def test_every_command_is_named_in_some_document():
    named = {name for path in DOCUMENTS for name in re.findall(r"\bunspool ([a-z]+)\b", code(path.read_text()))}
    assert verbs() <= named


# The recipe file

TABLES: dict[str, type[Config]] = {
    "Top level": Recipe,
    "model": NewModel,
    "engine": EngineConfig,
    **{f"kind: {kind}": source for kind, source in SOURCES.items()},
    "datasets": DatasetConfig,
    "datasets: utk": UtK,
    "datasets: cip": CIP,
    "datasets: nextlong": NExtLong,
    "datasets: upsample": Upsample,
    "datasets: pose": PoSE,
    "datasets: replace": ReplaceConfig,
    "stages": StageConfig,
    "stages: attention_distillation": AttentionDistillationConfig,
    "stages: optimizer": AdamWConfig,
    "stages: parallel": ParallelConfig,
    "stages: guard": GuardConfig,
    "stages: validation": ValidationConfig,
    "stages: reported": ReportedHours,
    "stages: samples": SamplesConfig,
    "method: unchanged": Unchanged,
    "method: abf": ABF,
    "method: ntk": NTK,
    "method: pi": PI,
    "method: dynamic": Dynamic,
    "method: ntk-by-parts": NTKByParts,
    "method: yarn": YaRN,
    "method: longrope": LongRoPE,
    "method: llama3": Llama3,
    "method: harpe": HARPE,
    "method: self-extend": SelfExtend,
    "suite: niah": NiahEval,
    "suite: key_value": KeyValueEval,
    "suite: perplexity": PerplexityEval,
    "suite: ruler": RulerEval,
    "suite: helmet": HelmetEval,
    "suite: lveval": LvEval,
    "suite: infbench": InfbenchEval,
    "suite: nocha": NochaEval,
    "suite: short": ShortEval,
    "synth": SynthConfig,
    "synth: openai": ServerGenerator,
    "synth: transformers": LocalGenerator,
    "synth: mock": MockGenerator,
    "synth: checks": ChecksConfig,
    "synth: decontaminate": DecontaminateConfig,
}


def table(text: str) -> dict[str, str]:
    """Key and default of each line of a section's table."""
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|", text, re.MULTILINE)
    assert len(rows) == len(dict(rows)), "a key stands twice"
    return dict(rows)


def default_of(config: type[Config], name: str) -> Any:
    """A default as a recipe would spell it; "required" and "none" where there is no value to spell."""
    field = config.model_fields[name]
    if field.default_factory is not None:
        return "runs/NAME" if (config, name) == (Recipe, "out") else field.default_factory
    if field.default is PydanticUndefined or (name == "method" and config is not Unchanged):
        # Without a method, a recipe does not know the class.
        return "required"
    if field.default is None:
        return "none"
    if isinstance(field.default, BaseModel):
        # What it sets; options without a value stand in the table of their own.
        return {key: value for key, value in field.default.model_dump(mode="json").items() if value}
    return list(field.default) if isinstance(field.default, tuple) else field.default


@pytest.mark.parametrize("heading", TABLES)
def test_every_key_is_described_with_its_default(heading):
    config = TABLES[heading]
    described = {
        key: yaml.safe_load(cell.strip("`")) if cell.startswith("`") else cell
        for key, cell in table(sections(RECIPES)[heading]).items()
    }
    expected = {field.alias or name: default_of(config, name) for name, field in config.model_fields.items()}
    assert described == expected


def test_every_part_of_a_recipe_has_its_table():
    # What pydantic's schema of a recipe is made of, apart from the recipe itself and datasets, which stand inline.
    parts = {*Recipe.model_json_schema()["$defs"], "Recipe", "DatasetConfig"}
    assert {config.__name__ for config in TABLES.values()} == parts


def test_every_bundled_recipe_is_listed():
    names = re.findall(r"^\| `([\w-]+)` \| [^|]+ \|$", sections(RECIPES)["The recipe file"], re.MULTILINE)
    assert sorted(names) == sorted(bundled_recipes())


def test_the_example_recipe_is_valid(tmp_path):
    (example,) = re.findall(r"```yaml\n(name: .*?)```", RECIPES.read_text(), re.DOTALL)
    (tmp_path / "example.yaml").write_text(example)
    assert load_recipe(tmp_path / "example.yaml").recipe.name == "books-8k"


def test_what_the_console_shows_is_what_the_command_says():
    (shown,) = re.findall(r"```console\n(.*?)```", RECIPES.read_text(), re.DOTALL)
    examples = re.findall(r"^\$ unspool (.+)\n((?:(?!\$ ).+\n)+)", shown, re.MULTILINE)
    assert examples
    for command, output in examples:
        done = CliRunner().invoke(build_app(), command.split())
        assert (done.exit_code, done.stderr) == (2, output)


def test_the_example_overrides_are_taken():
    (shown,) = re.findall(r"```sh\n(.*?)```", RECIPES.read_text(), re.DOTALL)
    for line in shown.splitlines():
        words = shlex.split(line)
        given = [value for option, value in pairwise(words) if option == "--set"]
        assert given, line
        load_recipe("tiny", given)
