"""Find and read recipe files; complete those that extend another recipe."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unspool.core.config import did_you_mean
from unspool.core.errors import ConfigError
from unspool.data.packing.known_mixes import expand_mix
from unspool.models.location import expand_home, path_exists, resolve_path
from unspool.recipe.json_schema import refuse
from unspool.recipe.overrides import set_value
from unspool.recipe.paths import Bundled, bundled_recipes
from unspool.recipe.yaml_lines import Marks, Problem, read_yaml

EXTENDS, SET = "extends", "set"
# A larger file is probably a model or data file passed by mistake.
MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class RecipeFile:
    """A recipe as plain data, with the line of each value."""

    data: dict[str, Any]
    marks: Marks
    problems: list[Problem]
    root: Path  # folder that its relative paths refer to
    text: str


def find_file(given: str, bundled: Mapping[str, Bundled], *, kind: str) -> tuple[Path, Path, str]:
    """Find a recipe or study by file or bundled name: the file, the folder for its paths, its label in messages."""
    path = expand_home(given)
    if path_exists(str(path)) and path.is_file():
        return path, path.parent, given
    if given in bundled:
        return bundled[given].path, Path(), f"{given}.yaml"
    if path_exists(str(path)) and path.is_dir():
        raise ConfigError(f"{given} is a folder, not a {kind} file; give a .yaml file in it.")
    if path.suffix or len(path.parts) > 1:
        beside = [str(other) for other in sorted(path.parent.glob("*.y*ml"))] if path_exists(str(path.parent)) else []
        raise ConfigError(f"{kind} file {given} does not exist{did_you_mean(given, [*beside, *bundled])}")
    hint = did_you_mean(given, bundled)
    raise ConfigError(f"{given!r} is neither a file nor a bundled {kind}{hint} Bundled: {', '.join(bundled)}.")


def read_text(file: Path, label: str, *, kind: str) -> str:
    """Read a recipe or study file."""
    try:
        if file.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{label} is too large for a {kind}; give a YAML file of a few kilobytes.")
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{label} is not UTF-8 text, so it is not a {kind}; give a YAML file.") from None
    except OSError as error:
        raise ConfigError(f"{label} cannot be read: {error.strerror}; correct the path or its permissions.") from None


def read_recipe(given: str, root: Path | None = None, seen: tuple[Path, ...] = ()) -> RecipeFile:
    """Read a recipe file or bundled recipe. Complete one that extends another; paths are relative to its folder."""
    path = given if root is None else resolve_path(given, root)
    found, folder, label = find_file(path, bundled_recipes(), kind="recipe")
    text = read_text(found, label, kind="recipe")
    data, marks, problems = read_yaml(text, label)
    if data is None:
        raise ConfigError(f"{label}: the recipe is empty; see `unspool recipes show tiny` for a complete one.")
    if not isinstance(data, dict):
        kind = "list" if isinstance(data, list) else "single value"
        raise ConfigError(
            f"{label}:1: this is a {kind}, but a recipe must be a mapping with keys such as name, model and stages."
        )
    if found in seen:
        raise ConfigError(
            f"{label}: the recipes extend each other in a circle; remove `extends` from one of them and complete it."
        )
    if EXTENDS not in data and SET not in data:
        return RecipeFile(data, marks, problems, folder, text)
    refuse([*problems, *_problems(data)], marks, data)
    base = read_recipe(data[EXTENDS], folder, (*seen, found))
    return _extend(RecipeFile(data, marks, [], folder, text), base)


def _problems(data: Mapping[str, Any]) -> Iterator[Problem]:
    """Check the keys of a recipe that extends another."""
    if not isinstance(data.get(EXTENDS), str):
        yield Problem(place=(EXTENDS,), text="give the recipe to extend: a bundled name or a file.")
    if not isinstance(data.get(SET, {}), dict):
        yield Problem(place=(SET,), text="must be a mapping from paths to values, such as {stages.0.lr: 2e-5}.")
    if "name" not in data:
        yield Problem(place=(EXTENDS,), text="add `name`, because two recipes cannot share a run folder.")


def _extend(own: RecipeFile, base: RecipeFile) -> RecipeFile:
    data, marks, problems = dict(base.data), base.marks, list(base.problems)
    keys = {key: value for key, value in own.data.items() if key not in (EXTENDS, SET)}
    wanted = keys.get("stages")
    keeps_some = isinstance(wanted, list) and bool(wanted) and all(isinstance(name, str) for name in wanted)
    if keeps_some and wanted:
        problems += _keep_stages(data, marks, wanted, own.marks.where(("stages",)))
        del keys["stages"]
    for key in keys:
        marks.override((key,), own.marks.where((key,)))
    marks.overrides |= {place: own.marks.where(place) for place in own.marks.lines if place[:1] and place[0] in keys}
    data |= keys
    for path, value in own.data.get(SET, {}).items():
        where = own.marks.where((SET, path))
        try:
            set_value(data, marks, path, value, where)
        except ConfigError as error:
            problems.append(Problem(place=(), where=where, text=f"{SET}: {error}"))
    if keeps_some:
        _drop_unused(data)
    return replace(own, data=data, marks=marks, problems=problems)


def _keep_stages(data: dict[str, Any], marks: Marks, wanted: list[str], where: str) -> list[Problem]:
    """Keep the listed stages and the evaluations of their models."""
    known = {stage.get("name"): stage for stage in data.get("stages") or [] if isinstance(stage, dict)}
    missing = [name for name in wanted if name not in known]
    if missing:
        text = f"stages: {marks.file} has no stage {missing[0]!r}{did_you_mean(missing[0], list(map(str, known)))}"
        return [Problem(place=(), where=where, text=text)]
    kept = {"base", *wanted}
    data["stages"] = [known[name] for name in wanted]
    evals = [(entry, _after(entry)) for entry in data.get("evals") or []]
    data["evals"] = [
        entry if after is None else entry | {"after": [name for name in after if name in kept]}
        for entry, after in evals
        if after is None or kept & set(after)
    ]
    # Entries of these lists now have another index than in their file.
    for key in ("stages", "evals"):
        marks.override((key,), marks.where((key,)))
    return []


def _drop_unused(data: dict[str, Any]) -> None:
    """Drop datasets that no stage uses and sources that no dataset uses."""
    for key, users in (("datasets", ["stages"]), ("sources", ["datasets", "synth"])):
        names = {text for user in users for text in _texts(data.get(user))}
        if isinstance(data.get(key), dict):
            data[key] = {name: entry for name, entry in data[key].items() if name in names}


def _after(entry: Any) -> list[Any] | None:
    after = entry.get("after") if isinstance(entry, dict) else None
    return after if isinstance(after, list) else None


def _texts(value: Any) -> Iterator[str]:
    """Yield all keys and strings below a value; a known mix counts as the sources that it names."""
    with suppress(ValueError):  # the dataset's class rejects an unknown mix
        value = expand_mix(value)
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        yield from (text for item in value.values() for text in _texts(item))
    elif isinstance(value, list):
        yield from (text for item in value for text in _texts(item))
