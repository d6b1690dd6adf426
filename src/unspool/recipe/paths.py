"""The bundled recipes and studies, by name."""

from dataclasses import dataclass
from pathlib import Path

from unspool.core.config import lookup

SYNTH_PREFIX = "synth:"  # conversations that the recipe itself generates


RECIPES = Path(__file__).parent / "bundled"
STUDIES = Path(__file__).parents[1] / "studies" / "bundled"


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
    """Find files by name; the comment on the first line is the summary."""
    found = {}
    for path in sorted(folder.glob("*.yaml"), key=lambda path: path.stem):
        first_line = path.read_text(encoding="utf-8").split("\n", 1)[0]
        found[path.stem] = Bundled(name=path.stem, path=path, summary=first_line.removeprefix("#").strip())
    return found


def find_bundled(name: str) -> Bundled:
    return lookup(bundled_recipes(), name, kind="recipe")
