"""The recipes that come with the package."""

from dataclasses import dataclass
from pathlib import Path

from unspool.base.lookup import lookup

FOLDER = Path(__file__).parent / "bundled"


@dataclass(frozen=True, kw_only=True)
class BundledRecipe:
    name: str
    path: Path
    summary: str


def bundled_recipes() -> dict[str, BundledRecipe]:
    """Every bundled recipe by name; its summary is the comment on its first line."""
    found = {}
    for path in sorted(FOLDER.glob("*.yaml")):
        first_line = path.read_text(encoding="utf-8").split("\n", 1)[0]
        found[path.stem] = BundledRecipe(name=path.stem, path=path, summary=first_line.removeprefix("#").strip())
    return found


def find_bundled(name: str) -> BundledRecipe:
    return lookup(bundled_recipes(), name, kind="recipe")
