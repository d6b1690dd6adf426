"""The recipes and studies that come with the package."""

from dataclasses import dataclass
from pathlib import Path

from unspool.base.lookup import lookup

RECIPES = Path(__file__).parent / "bundled"
STUDIES = Path(__file__).parent / "studies"


@dataclass(frozen=True, kw_only=True)
class Bundled:
    name: str
    path: Path
    summary: str


def bundled_recipes() -> dict[str, Bundled]:
    return _bundled(RECIPES)


def bundled_studies() -> dict[str, Bundled]:
    return _bundled(STUDIES)


def _bundled(folder: Path) -> dict[str, Bundled]:
    """By name; the summary is the comment on the first line."""
    found = {}
    for path in sorted(folder.glob("*.yaml")):
        first_line = path.read_text(encoding="utf-8").split("\n", 1)[0]
        found[path.stem] = Bundled(name=path.stem, path=path, summary=first_line.removeprefix("#").strip())
    return found


def find_bundled(name: str) -> Bundled:
    return lookup(bundled_recipes(), name, kind="recipe")
