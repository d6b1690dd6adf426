"""The documents name only what exists, and leave out nothing they promise to hold."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer

from test_imports import BESIDE, ORDER, PACKAGES
from unspool.cli.main import build_app

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "unspool"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
# Pages that the site generates from the code; links to them are checked when the site is built.
GENERATED = {
    ROOT / "docs" / "reference" / f"{name}.md"
    for name in (
        *("recipe", "commands", "api", "suites", "strategies", "rope-methods", "sources", "optimizers", "families"),
    )
}
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
        if target.resolve() in GENERATED:
            continue
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
