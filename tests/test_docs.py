"""The documents name only what exists: paths, links, commands, make targets and packages."""

import re
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from test_imports import BESIDE, ORDER, PACKAGES
from unspool.cli.main import build_app

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from reference.build import PAGES  # noqa: E402

PACKAGE = ROOT / "src" / "unspool"
DOCS = ROOT / "docs"
ARCHITECTURE = DOCS / "architecture.md"
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted(DOCS.rglob("*.md")),
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


def test_every_page_that_the_code_names_exists():
    named = {
        (by_name(path), page)
        for path in PACKAGE.rglob("*")
        if path.suffix in (".py", ".yaml", ".j2")
        for page in re.findall(r"docs/([\w/-]+\.md)", path.read_text())
    }
    assert [(path, page) for path, page in sorted(named) if page not in PAGES and not (DOCS / page).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=by_name)
def test_every_link_leads_somewhere(document):
    assert broken_links(document.parent, document.read_text()) == []


@pytest.mark.parametrize("name", PAGES)
def test_every_link_of_a_generated_page_leads_somewhere(name):
    assert broken_links((DOCS / name).parent, generated(name)) == []


def test_a_broken_link_is_found(tmp_path):
    (tmp_path / "page.md").write_text('# Title\n\n## What it is { #what }\n\n<span id="cell"></span>\n')
    links = ("page.md#title", "page.md#what", "page.md#cell", "page.md#where", "other.md", "https://example.org/x")
    assert broken_links(tmp_path, " ".join(f"[x]({link})" for link in links)) == ["page.md#where", "other.md"]


@cache
def generated(name: str) -> str:
    return PAGES[name]()


def broken_links(folder: Path, text: str) -> list[str]:
    """Links to files and anchors that do not exist; pages that the site generates count as files of docs/."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = (folder / path).resolve()
        name = target.relative_to(DOCS).as_posix() if target.is_relative_to(DOCS) else ""
        if not path:
            content = text
        elif name in PAGES:
            content = generated(name)
        elif target.exists():
            content = target.read_text() if anchor else ""
        else:
            broken.append(link)
            continue
        if anchor and anchor not in anchors(content):
            broken.append(link)
    return broken


def anchors(text: str) -> set[str]:
    """What a link to a page may name: headings, and ids written out."""
    given = re.findall(r"\{ #([\w.-]+) \}|id=\"([\w.-]+)\"", text)
    headings = re.findall(r"^#+ (.+?)(?: \{ #.*)?$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {name for pair in given for name in pair if name} | {_anchor(heading) for heading in headings}


def _anchor(heading: str) -> str:
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", re.sub(r"[`*]", "", heading)).strip().lower())


def test_the_navigation_holds_every_page_and_only_pages():
    found = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]
    assert sorted(_nav(_settings()["nav"])) == sorted([*found, *PAGES])


def _settings() -> Any:
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def _nav(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    return [page for below in (entry.values() if isinstance(entry, dict) else entry) for page in _nav(below)]


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
