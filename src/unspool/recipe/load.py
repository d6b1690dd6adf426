"""Load a recipe and check it whole: what it says (`load_recipe`) and what it needs (`check_inputs`).

In: a file or the name of a bundled recipe, and `--set` texts. Out: a `LoadedRecipe`.
Promise: every problem found is told at once, one line each, with where it was written, the
key, the value, what is allowed and the nearest valid name; nothing is read or built before.
"""

import re
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from unspool.core.config import nearest
from unspool.core.errors import ConfigError
from unspool.evals.config import EvalConfig
from unspool.recipe.json_schema import (
    Shape,
    child,
    describe,
    form_of,
    forms,
    keys,
    misplaced_booleans,
    recipe_schema,
    refuse,
    unknown_key,
    validation_problems,
)
from unspool.recipe.paths import ASSET_PREFIX, SYNTH_PREFIX, bundled_recipes, expand_home, path_exists, resolve_path
from unspool.recipe.schema import Recipe, reference_problems
from unspool.recipe.yaml_lines import Marks, Place, Problem, read_yaml

# `--set stages.0.lr=2e-5`: change a recipe from the command line.


def apply_overrides(data: dict[str, Any], marks: Marks, overrides: list[str]) -> list[Problem]:
    problems = []
    for given in overrides:
        path, equals, value_text = given.partition("=")
        text = " ".join(given.split())  # sentences quote it on one line
        try:
            if not equals or not all(path.strip().split(".")):
                raise ConfigError("write a path and a value, such as stages.0.lr=2e-5.")
            value, _, value_problems = read_yaml(value_text, "the value")
            changed = deepcopy(data)  # a path that leads nowhere must leave no half of itself behind
            place, new = _set(changed, path.strip(), value)
        except ConfigError as error:
            problems.append(Problem(place=(), where=f"--set {text}", text=str(error)))
            continue
        data.update(changed)
        marks.override(new, text)
        problems += [Problem(place=(*place, *problem.place), text=problem.text) for problem in value_problems]
    return problems


def _set(data: dict[str, Any], path: str, value: Any) -> tuple[Place, Place]:
    """Put `value` at `path`, making the mappings the file leaves out: its place, and the first place that is new."""
    rest = path.split(".")
    place: Place = ()
    new: Place | None = None
    shape = recipe_schema()
    holder: Any = data
    while True:
        form = form_of(shape, holder)
        key, rest = _step(holder, form, rest, _dotted_key(place))
        place = (*place, key)
        below = child(form, key)
        if below is None:
            raise ConfigError(f"{_dotted_key(place[:-1])} may only be {describe(shape)}.")
        if not rest:
            _put(holder, key, value)
            return place, new or place
        if isinstance(holder, dict) and holder.get(str(key)) is None:
            # Only mappings with known keys can be begun here: `engine.workers` without `engine`.
            if keys(form) is None:
                raise ConfigError(_no_such_name(str(key), list(holder), _dotted_key(place[:-1])))
            _put(holder, key, [] if "array" in {form.get("type") for form in forms(below)} else {})
            new = new or place
        holder, shape = holder[key], below


def _put(holder: Any, key: str | int, value: Any) -> None:
    if isinstance(holder, list) and key == len(holder):
        holder.append(value)
    else:
        holder[key] = value


def _step(holder: Any, form: Shape, rest: list[str], path: str) -> tuple[str | int, list[str]]:
    """The next key of the path and what is left of it. Names may contain dots, so the longest that fits is taken."""
    if isinstance(holder, list):
        return _index(holder, rest, path)
    if not isinstance(holder, dict):
        raise ConfigError(f"{path} is {holder!r} and has nothing below it; it may be {describe(form)}.")
    allowed = keys(form)
    known, left = _longest(rest, list(holder) if allowed is None else allowed)
    if known is not None:
        return known, left
    if allowed is not None:
        raise ConfigError(f"{path + '.' if path else ''}{rest[0]}: {unknown_key(rest[0], allowed)}")
    return rest[0], rest[1:]


def _index(holder: list[Any], rest: list[str], path: str) -> tuple[int, list[str]]:
    if rest[0].isascii() and rest[0].isdigit():
        # One past the end adds a whole entry, but there is nothing yet to change a part of.
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


def _dotted_key(place: Place) -> str:
    return ".".join(map(str, place))


def _no_such_name(name: str, known: list[str], path: str) -> str:
    guess = nearest(name, known)
    hint = f"; did you mean {guess!r}?" if guess else "."
    return f"{path} has no {name!r}{hint} Known: {', '.join(known) or 'none'}."


# Whoever passes a model or a data file by mistake should hear so at once.
MAX_BYTES = 1 << 20
# Keys of an evaluation that name a file.
EVAL_PATHS = ("text", "wording")
# A name that ends so is a file's, although it could be a Hub id's.
DATA_SUFFIXES = {".jsonl", ".json", ".txt", ".csv", ".tsv", ".parquet", ".zst", ".gz"}
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True, kw_only=True)
class LoadedRecipe:
    """A recipe with what is needed to find its files and to point at its lines."""

    recipe: Recipe
    root: Path  # relative paths are tried here first
    text: str
    marks: Marks

    def path(self, value: str) -> str:
        if value.startswith(SYNTH_PREFIX):
            return str(self.recipe.out / "synth" / value.removeprefix(SYNTH_PREFIX))
        return resolve_path(value, self.root)

    def generated(self, sources: Iterable[str]) -> list[str]:
        """The sets of `synth` that some sources read, in the recipe's order."""
        paths = {path for name in sources for path in self.recipe.sources[name].paths.values()}
        return [name for name in self.recipe.synth if SYNTH_PREFIX + name in paths]

    def evals(self) -> list[EvalConfig]:
        """The recipe's evaluations, with their files found."""
        return [self._found(entry) for entry in self.recipe.evals]

    def _found(self, entry: EvalConfig) -> EvalConfig:
        changed: dict[str, Any] = {key: self.path(value) for key in EVAL_PATHS if (value := getattr(entry, key, None))}
        paths: dict[str, str] = getattr(entry, "paths", {})
        if paths:
            # A `hub:` name is no path.
            changed["paths"] = {
                name: path if path.startswith("hub:") else self.path(path) for name, path in paths.items()
            }
        return entry.model_copy(update=changed) if changed else entry


def load_recipe(path_or_name: str | Path, overrides: list[str] | None = None) -> LoadedRecipe:
    file, root, label = _find(str(path_or_name))
    text = read_text(file, label, kind="recipe")
    data, marks, problems = read_yaml(text, label)
    if data is None:
        raise ConfigError(f"{label}: the recipe is empty; see `unspool recipes show tiny` for a complete one.")
    if not isinstance(data, dict):
        raise ConfigError(
            f"{label}:1: a recipe is a mapping of keys such as name, model and stages, not a {_kind(data)}."
        )
    problems += apply_overrides(data, marks, overrides or [])
    problems += misplaced_booleans(recipe_schema(), data)
    recipe = None
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        # In this order: of two sentences about one place the first is kept.
        problems += [*validation_problems(error, data), *reference_problems(data)]
    refuse(problems, marks, data)
    assert recipe is not None, "a recipe was refused without a sentence"
    return LoadedRecipe(recipe=recipe, root=root, text=text, marks=marks)


def _find(given: str) -> tuple[Path, Path, str]:
    """The file, the folder its paths start from, and what to call it."""
    path = expand_home(given)
    bundled = bundled_recipes()
    if path_exists(str(path)) and path.is_file():
        return path, path.parent, given
    if given in bundled:
        return bundled[given].path, Path(), f"{given}.yaml"
    if path_exists(str(path)) and path.is_dir():
        raise ConfigError(f"{given} is a folder, not a recipe file; name a .yaml file in it.")
    if path.suffix or len(path.parts) > 1:
        beside = [str(other) for other in sorted(path.parent.glob("*.y*ml"))] if path_exists(str(path.parent)) else []
        guess = nearest(given, [*beside, *bundled])
        raise ConfigError(f"recipe file {given} does not exist{_did_you_mean(guess)}")
    guess = nearest(given, bundled)
    raise ConfigError(
        f"{given!r} is neither a file nor a bundled recipe{_did_you_mean(guess)} Bundled: {', '.join(bundled)}."
    )


def read_text(file: Path, label: str, *, kind: str) -> str:
    """What stands in a recipe, or in another file that is written by hand."""
    try:
        if file.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{label} is too large for a {kind}; a {kind} is a YAML file of some kilobytes.")
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{label} is not a text file in UTF-8, so it cannot be a {kind}.") from None
    except OSError as error:
        raise ConfigError(f"{label} cannot be read: {error.strerror}.") from None


def check_inputs(loaded: LoadedRecipe) -> None:
    """Refuse, before any work, what cannot be found on this machine or cannot be run yet."""
    data = loaded.recipe.model_dump(mode="json", by_alias=True)
    problems = [
        *_source_problems(loaded),
        *_model_problems(loaded),
        *_tracker_problems(loaded),
        *_eval_problems(loaded),
    ]
    refuse(problems, loaded.marks, data)


def _source_problems(loaded: LoadedRecipe) -> Iterator[Problem]:
    for name, source in loaded.recipe.sources.items():
        for key, value in source.paths.items():
            if value.startswith(SYNTH_PREFIX):
                yield from _synth_problems(loaded, ("sources", name, key), value.removeprefix(SYNTH_PREFIX))
            elif not source.may_be_remote(value):
                yield from _missing(loaded, ("sources", name, key), value)


def _synth_problems(loaded: LoadedRecipe, place: Place, wanted: str) -> Iterator[Problem]:
    """A source that reads what the recipe itself generates, which need not be there yet."""
    sets = loaded.recipe.synth
    if wanted not in sets:
        known = f"sets here: {', '.join(sets)}." if sets else "the recipe has no `synth`."
        guess = _did_you_mean(nearest(wanted, sets))
        yield Problem(place=place, text=f"{wanted!r} is no set of `synth`{guess} {known}")
    if not loaded.recipe.sources[str(place[1])].is_chat:
        yield Problem(place=place, text="conversations that `synth` makes are read by sources of kind: chat only.")


def _tracker_problems(loaded: LoadedRecipe) -> Iterator[Problem]:
    """Now, not after hours of preparing data."""
    for index, stage in enumerate(loaded.recipe.stages):
        for name in stage.loggers:
            if find_spec(name) is None:
                text = f"{name} is not installed here; pip install 'unspool[track]', or leave it out."
                yield Problem(place=("stages", index, "loggers"), text=text)


def _eval_problems(loaded: LoadedRecipe) -> Iterator[Problem]:
    for index, entry in enumerate(loaded.recipe.evals):
        text_path = getattr(entry, "text", None)
        if text_path is not None:
            yield from _missing(loaded, ("evals", index, "text"), text_path)
        wording = getattr(entry, "wording", None)
        if wording is not None:
            yield from _missing(loaded, ("evals", index, "wording"), wording)
        for name, path in getattr(entry, "paths", {}).items():
            # What could be a Hub id is left to the suite, which asks the Hub; what ends as files do is none.
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
        yield from found
        folder = None if found else Path(loaded.path(value))
        wanted = "config.json" if isinstance(model, str) else "tokenizer.json"
        if folder and folder.is_dir() and not (folder / wanted).is_file():
            yield Problem(place=place, text=f"the folder has no {wanted}, so it holds no {place[-1]}.", show_value=True)


def _missing(loaded: LoadedRecipe, place: Place, value: str) -> Iterator[Problem]:
    try:
        path = loaded.path(value)
    except ConfigError as error:
        yield Problem(place=place, text=str(error))
        return
    if not path_exists(path):
        tried = " or ".join(dict.fromkeys(str(folder.absolute()) for folder in (loaded.root, Path())))
        at = "" if Path(path).is_absolute() else f" in {tried}"
        yield Problem(
            place=place,
            text=f"no such file or folder{at}; correct it, or --set {_dotted(place)}=PATH.",
            show_value=True,
        )


def _dotted(place: Place) -> str:
    return ".".join(map(str, place))


def _did_you_mean(guess: str | None) -> str:
    return f"; did you mean {guess!r}?" if guess else "."


def _kind(data: Any) -> str:
    return "list" if isinstance(data, list) else "single value"
