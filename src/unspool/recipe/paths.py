"""Resolve the paths of a recipe, and list the bundled recipes and studies."""

import glob
from dataclasses import dataclass
from pathlib import Path

from unspool.core.config import did_you_mean, lookup
from unspool.core.errors import ConfigError
from unspool.models.location import ASSET_PREFIX, ASSETS, final_model

SYNTH_PREFIX = "synth:"  # conversations that the recipe itself generates


def resolve_path(value: str, root: Path) -> str:
    """Return the path to open: `asset:…` in the package, else beside the recipe if it exists there, else as written.

    A path that does not exist is returned as written, so that a Hub id stays a Hub id.
    """
    if value.startswith(ASSET_PREFIX):
        return _asset(value.removeprefix(ASSET_PREFIX))
    path = expand_home(value)
    beside = root / path
    return str(beside if not path.is_absolute() and path_exists(str(beside)) else path)


def model_path(value: str, root: Path) -> str:
    """`resolve_path` of a model or tokenizer; of a run or stage folder the path of its model."""
    path = resolve_path(value, root)
    return str(final_model(Path(path))) if path_exists(path) else path


def path_exists(path: str) -> bool:
    """Whether a file, a folder, or a match of a glob pattern exists."""
    matches = glob.iglob(path, recursive=True) if glob.has_magic(path) else iter(())  # noqa: PTH207 (absolute)
    try:
        return Path(path).exists() or next(matches, None) is not None
    except OSError:  # a name that is too long, a folder without permission
        return False


def expand_home(value: str) -> Path:
    try:
        return Path(value).expanduser()
    except RuntimeError:  # ~name of an unknown user
        return Path(value)


def _asset(name: str) -> str:
    path = ASSETS / name
    if name and ASSETS.resolve() in path.resolve().parents and path_exists(str(path)):
        return str(path)
    shipped = sorted(file.relative_to(ASSETS).as_posix() for file in ASSETS.rglob("*"))
    hint = did_you_mean(name, shipped, prefix=ASSET_PREFIX)
    raise ConfigError(f"{ASSET_PREFIX + name!r} is not shipped with unspool{hint}")


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
    """Files by name, each with the comment on its first line as summary."""
    found = {}
    for path in sorted(folder.glob("*.yaml"), key=lambda path: path.stem):
        first_line = path.read_text(encoding="utf-8").split("\n", 1)[0]
        found[path.stem] = Bundled(name=path.stem, path=path, summary=first_line.removeprefix("#").strip())
    return found


def find_bundled(name: str) -> Bundled:
    return lookup(bundled_recipes(), name, kind="recipe")
