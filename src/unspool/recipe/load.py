"""Load a recipe and check it: its values (`load_recipe`) and its inputs on this machine (`check_inputs`).

All problems are reported together, one line each: where it is written, the key, the value, and what is allowed.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from unspool.core.config import did_you_mean
from unspool.core.errors import ConfigError
from unspool.evals.config import EvalConfig
from unspool.models.location import ASSET_PREFIX, HUB_ID, expand_home, model_path, path_exists, resolve_path, suggestion
from unspool.recipe.json_schema import (
    Shape,
    child,
    describe,
    dotted,
    form_of,
    forms,
    keys,
    misplaced_booleans,
    recipe_schema,
    refuse,
    unknown_key,
    validation_problems,
)
from unspool.recipe.paths import SYNTH_PREFIX, Bundled, bundled_recipes
from unspool.recipe.schema import Recipe, reference_problems
from unspool.recipe.yaml_lines import Marks, Place, Problem, read_yaml

# Changes to a recipe: `--set` texts such as `stages.0.lr=2e-5`, or values by their path.
Overrides = Mapping[str, Any] | Sequence[str] | None


def apply_overrides(data: dict[str, Any], marks: Marks, overrides: list[str]) -> list[Problem]:
    """Apply `--set` texts, such as `stages.0.lr=2e-5`, to the data of a recipe."""
    problems = []
    for given in overrides:
        path, equals, value_text = given.partition("=")
        text = " ".join(given.split())  # messages quote it on one line
        try:
            if not equals or not all(path.strip().split(".")):
                raise ConfigError("write a path and a value, such as stages.0.lr=2e-5.")
            value, _, value_problems = read_yaml(value_text, "the value")
            changed = deepcopy(data)  # a wrong path must change nothing
            place, new = _set(changed, path.strip(), value)
        except ConfigError as error:
            problems.append(Problem(place=(), where=f"--set {text}", text=str(error)))
            continue
        data.update(changed)
        marks.override(new, text)
        problems += [Problem(place=(*place, *problem.place), text=problem.text) for problem in value_problems]
    return problems


def _set(data: dict[str, Any], path: str, value: Any) -> tuple[Place, Place]:
    """Set `value` at `path`, adding mappings that are missing; returns its place and the first place that is new."""
    rest = path.split(".")
    place: Place = ()
    new: Place | None = None
    shape = recipe_schema()
    holder: Any = data
    while True:
        form = form_of(shape, holder)
        key, rest = _step(holder, form, rest, dotted(place))
        place = (*place, key)
        below = child(form, key)
        if below is None:
            raise ConfigError(f"{dotted(place[:-1])} may only be {describe(shape)}.")
        if not rest:
            _put(holder, key, value)
            return place, new or place
        if isinstance(holder, dict) and holder.get(str(key)) is None:
            # Only mappings with known keys can be added: `engine.workers` without `engine`.
            if keys(form) is None:
                raise ConfigError(_no_such_name(str(key), list(holder), dotted(place[:-1])))
            _put(holder, key, [] if "array" in {form.get("type") for form in forms(below)} else {})
            new = new or place
        holder, shape = holder[key], below


def _put(holder: Any, key: str | int, value: Any) -> None:
    if isinstance(holder, list) and key == len(holder):
        holder.append(value)
    else:
        holder[key] = value


def _step(holder: Any, form: Shape, rest: list[str], path: str) -> tuple[str | int, list[str]]:
    """The next key of the path and the rest. Names may contain dots, so the longest match wins."""
    if isinstance(holder, list):
        return _index(holder, rest, path)
    if not isinstance(holder, dict):
        raise ConfigError(f"{path} is {holder!r}, which has no keys; it may be {describe(form)}.")
    allowed = keys(form)
    known, left = _longest(rest, list(holder) if allowed is None else allowed)
    if known is not None:
        return known, left
    if allowed is not None:
        raise ConfigError(f"{path + '.' if path else ''}{rest[0]}: {unknown_key(rest[0], allowed)}")
    return rest[0], rest[1:]


def _index(holder: list[Any], rest: list[str], path: str) -> tuple[int, list[str]]:
    if rest[0].isascii() and rest[0].isdigit():
        # One past the end adds an entry, but only a whole one.
        if int(rest[0]) < len(holder) + (len(rest) == 1):
            return int(rest[0]), rest[1:]
        raise ConfigError(f"{path} has entries 0 to {len(holder) - 1}; there is no {path}.{rest[0]}.")
    names = [str(item.get("name", "")) if isinstance(item, dict) else "" for item in holder]
    known, left = _longest(rest, names)
    if known is None:
        raise ConfigError(_no_such_name(rest[0], [name for name in names if name], path))
    return names.index(known), left


def _longest(rest: list[str], names: list[str]) -> tuple[str | None, list[str]]:
    for end in range(len(rest), 0, -1):
        name = ".".join(rest[:end])
        if name in names:
            return name, rest[end:]
    return None, rest


def _no_such_name(name: str, known: list[str], path: str) -> str:
    return f"{path} has no {name!r}{did_you_mean(name, known)} Known: {', '.join(known) or 'none'}."


# A larger file is a model or data file that was passed by mistake.
MAX_BYTES = 1 << 20
# Keys of an evaluation that name a file.
EVAL_PATHS = ("text", "wording", "reference")
# A name that ends so is a file's, although it could be a Hub id's.
DATA_SUFFIXES = {".jsonl", ".json", ".txt", ".csv", ".tsv", ".parquet", ".zst", ".gz"}


@dataclass(frozen=True, kw_only=True)
class LoadedRecipe:
    """A recipe, with the folder of its relative paths and the lines of its keys."""

    recipe: Recipe
    root: Path  # relative paths are tried here first
    text: str
    marks: Marks

    def path(self, value: str) -> str:
        if value.startswith(SYNTH_PREFIX):
            return str(self.recipe.out / "synth" / value.removeprefix(SYNTH_PREFIX))
        return resolve_path(value, self.root)

    def model_path(self, value: str) -> str:
        """The path or Hub id of a model or tokenizer; of a run or stage folder that of its model."""
        return model_path(value, self.root)

    def generated(self, sources: Iterable[str]) -> list[str]:
        """The sets of `synth` that these sources read, in the recipe's order."""
        paths = {path for name in sources for path in self.recipe.sources[name].paths.values()}
        return [name for name in self.recipe.synth if SYNTH_PREFIX + name in paths]

    def evals(self, after: str | None = None) -> list[EvalConfig]:
        """The recipe's evaluations, or those of one stage (or `base`), with their paths resolved."""
        chosen = [entry for entry in self.recipe.evals if after is None or entry.after is None or after in entry.after]
        return [self._found(entry) for entry in chosen]

    def _found(self, entry: EvalConfig) -> EvalConfig:
        changed: dict[str, Any] = {key: self.path(value) for key in EVAL_PATHS if (value := getattr(entry, key, None))}
        paths: dict[str, str] = getattr(entry, "paths", {})
        if paths:
            changed["paths"] = {
                name: path if path.startswith("hub:") else self.path(path) for name, path in paths.items()
            }
        return entry.model_copy(update=changed) if changed else entry


def load_recipe(path_or_name: str | Path, overrides: Overrides = None) -> LoadedRecipe:
    """Load and check a recipe: a file or the name of a bundled one, changed by `--set` texts.

    Raises ConfigError with one line per problem.
    """
    file, root, label = find_file(str(path_or_name), bundled_recipes(), kind="recipe")
    text = read_text(file, label, kind="recipe")
    data, marks, problems = read_yaml(text, label)
    if data is None:
        raise ConfigError(f"{label}: the recipe is empty; see `unspool recipes show tiny` for a complete one.")
    if not isinstance(data, dict):
        kind = "list" if isinstance(data, list) else "single value"
        raise ConfigError(f"{label}:1: a recipe is a mapping of keys such as name, model and stages, not a {kind}.")
    problems += apply_overrides(data, marks, _override_texts(overrides))
    problems += misplaced_booleans(recipe_schema(), data)
    recipe = None
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        # In this order: of two messages about one place the first is kept.
        problems += [*validation_problems(error, data), *reference_problems(data)]
    refuse(problems, marks, data)
    assert recipe is not None, "a recipe was refused without a message"
    return LoadedRecipe(recipe=recipe, root=root, text=text, marks=marks)


def _override_texts(overrides: Overrides) -> list[str]:
    if isinstance(overrides, Mapping):
        # JSON is YAML, in which the values of overrides are written.
        return [f"{key}={json.dumps(value, default=str)}" for key, value in overrides.items()]
    return list(overrides or [])


def find_file(given: str, bundled: Mapping[str, Bundled], *, kind: str) -> tuple[Path, Path, str]:
    """Find a recipe or study by file or bundled name: the file, the folder of its paths, its name in messages."""
    path = expand_home(given)
    if path_exists(str(path)) and path.is_file():
        return path, path.parent, given
    if given in bundled:
        return bundled[given].path, Path(), f"{given}.yaml"
    if path_exists(str(path)) and path.is_dir():
        raise ConfigError(f"{given} is a folder, not a {kind} file; name a .yaml file in it.")
    if path.suffix or len(path.parts) > 1:
        beside = [str(other) for other in sorted(path.parent.glob("*.y*ml"))] if path_exists(str(path.parent)) else []
        raise ConfigError(f"{kind} file {given} does not exist{did_you_mean(given, [*beside, *bundled])}")
    hint = did_you_mean(given, bundled)
    raise ConfigError(f"{given!r} is neither a file nor a bundled {kind}{hint} Bundled: {', '.join(bundled)}.")


def read_text(file: Path, label: str, *, kind: str) -> str:
    """Read a recipe or study file."""
    try:
        if file.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{label} is too large for a {kind}; a {kind} is a YAML file of some kilobytes.")
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{label} is not a text file in UTF-8, so it cannot be a {kind}.") from None
    except OSError as error:
        raise ConfigError(f"{label} cannot be read: {error.strerror}.") from None


def check_inputs(loaded: LoadedRecipe) -> None:
    """Refuse a recipe whose inputs are not on this machine, before any work."""
    checks = (_source_problems, _model_problems, _logger_problems, _eval_problems)
    problems = [problem for check in checks for problem in check(loaded)]
    refuse(problems, loaded.marks, loaded.recipe.model_dump(mode="json", by_alias=True))


def _source_problems(loaded: LoadedRecipe) -> Iterator[Problem]:
    for name, source in loaded.recipe.sources.items():
        for key, value in source.paths.items():
            if value.startswith(SYNTH_PREFIX):
                yield from _synth_problems(loaded, ("sources", name, key), value.removeprefix(SYNTH_PREFIX))
            elif not source.may_be_remote(value):
                yield from _missing(loaded, ("sources", name, key), value)


def _synth_problems(loaded: LoadedRecipe, place: Place, wanted: str) -> Iterator[Problem]:
    """Check a source that reads what the recipe itself generates."""
    sets = loaded.recipe.synth
    if wanted not in sets:
        known = f"sets here: {', '.join(sets)}." if sets else "the recipe has no `synth`."
        yield Problem(place=place, text=f"{wanted!r} is no set of `synth`{did_you_mean(wanted, sets)} {known}")
    if not loaded.recipe.sources[str(place[1])].is_chat:
        yield Problem(place=place, text="only sources of kind: chat can read the conversations of `synth`.")


def _logger_problems(loaded: LoadedRecipe) -> Iterator[Problem]:
    for index, stage in enumerate(loaded.recipe.stages):
        for name in stage.loggers:
            if find_spec(name) is None:
                text = f"{name} is not installed here; pip install 'unspool[track]', or leave it out."
                yield Problem(place=("stages", index, "loggers"), text=text)


def _eval_problems(loaded: LoadedRecipe) -> Iterator[Problem]:
    for index, entry in enumerate(loaded.recipe.evals):
        for key in EVAL_PATHS:
            if (value := getattr(entry, key, None)) is not None:
                yield from _missing(loaded, ("evals", index, key), value)
        for name, path in getattr(entry, "paths", {}).items():
            # The suite checks Hub ids. A name with the ending of a data file is a file.
            is_file = Path(path).suffix in DATA_SUFFIXES
            if is_file or not (path.startswith("hub:") or HUB_ID.fullmatch(path)):
                yield from _missing(loaded, ("evals", index, "paths", name), path)


def _model_problems(loaded: LoadedRecipe) -> Iterator[Problem]:
    model = loaded.recipe.model
    place: Place = ("model",) if isinstance(model, str) else ("model", "tokenizer")
    value = model if isinstance(model, str) else model.tokenizer
    looks_like_path = value.startswith((ASSET_PREFIX, ".")) or value.endswith(".gguf") or not HUB_ID.fullmatch(value)
    if looks_like_path or path_exists(loaded.path(value)):
        found = list(_missing(loaded, place, value))
        yield from (replace(problem, text=problem.text + suggestion(str(loaded.root / value))) for problem in found)
        if found:
            return
        try:
            folder = Path(loaded.model_path(value))
        except ConfigError as error:
            yield Problem(place=place, text=str(error))
            return
        wanted = "config.json" if isinstance(model, str) else "tokenizer.json"
        if folder.is_dir() and not (folder / wanted).is_file():
            yield Problem(place=place, text=f"the folder has no {wanted}, so it is not a {place[-1]}.", show_value=True)


def _missing(loaded: LoadedRecipe, place: Place, value: str) -> Iterator[Problem]:
    try:
        path = loaded.path(value)
    except ConfigError as error:
        yield Problem(place=place, text=str(error))
        return
    if not path_exists(path):
        tried = " or ".join(dict.fromkeys(str(folder.absolute()) for folder in (loaded.root, Path())))
        at = "" if Path(path).is_absolute() else f" in {tried}"
        text = f"no such file or folder{at}; correct it, or --set {dotted(place)}=PATH."
        yield Problem(place=place, text=text, show_value=True)
