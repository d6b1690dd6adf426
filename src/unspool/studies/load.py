"""Load a study and check it whole: one recipe, the arms that change it, seeds, and what they are compared by.

In: a study file or the name of a bundled one, and `--set` texts for all arms. Out: a `Study`, each of its runs with a
checked recipe.
Promise: every problem is told before any work, one line each, with the line of the study file and the arm; each arm's
recipe goes through the checker of recipes. Nothing is written here.
Elsewhere: writing and running (study_run.py), what is shared (study_store.py), comparing (study_results.py).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from unspool.core.config import nearest
from unspool.core.errors import ConfigError
from unspool.recipe.json_schema import refuse
from unspool.recipe.load import LoadedRecipe, check_inputs, load_recipe, read_text
from unspool.recipe.paths import bundled_recipes, bundled_studies, expand_home, path_exists
from unspool.recipe.schema import FOLDER_NAME
from unspool.recipe.yaml_lines import Marks, Place, Problem, read_yaml
from unspool.studies.arm_scores import Measure, chosen_names, compare_problems, measures_of
from unspool.studies.schema import DEFAULT_SEEDS, MOST_RUNS, Margin, study_problems, unknown_arm

# From what a study file lists to its arms: the product of arms and grid, each with a name.


@dataclass(frozen=True, kw_only=True)
class ArmSpec:
    name: str
    place: Place
    sets: dict[str, tuple[Any, Place]]
    """Key of the recipe: its value, and where in the study file that stands."""
    seeds: list[int] | None = None
    stage: str | None = None
    against: list[str] | None = None


def expand(data: Mapping[str, Any]) -> tuple[list[ArmSpec], list[Problem]]:
    listed: dict[str, dict[str, Any]] = {name: arm or {} for name, arm in (data.get("arms") or {"": {}}).items()}
    points = [dict(point) for point in product(*(_values(*entry) for entry in (data.get("grid") or {}).items()))]
    specs: list[ArmSpec] = []
    problems: list[Problem] = []
    for arm, point in product(listed, points):
        spec = _spec(arm, listed[arm], point)
        if spec.name in {known.name for known in specs}:
            text = f"two arms would be called {spec.name!r}; give the values of the grid names: {{name: value}}."
            problems.append(Problem(place=("grid",), text=text))
        elif not FOLDER_NAME.fullmatch(spec.name):
            text = f"an arm would be called {spec.name!r}; give the values of the grid names: {{name: value}}."
            problems.append(Problem(place=("grid",), text=text))
        else:
            specs.append(spec)
    num_runs = sum(len(spec.seeds or data.get("seeds") or DEFAULT_SEEDS) for spec in specs)
    if num_runs > MOST_RUNS:
        problems.append(
            Problem(place=("grid",), text=f"makes {num_runs:,} runs; more than {MOST_RUNS:,} is a mistake.")
        )
    return specs, [*problems, *_name_problems(data, specs)]


def _values(key: str, values: Any) -> list[tuple[str, tuple[str, Any, Place]]]:
    """Every value of one key of the grid: its part of the arm's name, and where it stands."""
    if isinstance(values, dict):
        return [(key, (name, value, ("grid", key, name))) for name, value in values.items()]
    last = key.rsplit(".", 1)[-1]
    return [(key, (f"{last}-{_short(value)}", value, ("grid", key, at))) for at, value in enumerate(values)]


def _short(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _spec(arm: str, given: Mapping[str, Any], point: Mapping[str, tuple[str, Any, Place]]) -> ArmSpec:
    against = given.get("against")
    sets: dict[str, tuple[Any, Place]] = {
        key: (value, ("arms", arm, "set", key)) for key, value in (given.get("set") or {}).items()
    }
    return ArmSpec(
        name="-".join(part for part in (arm, *(name for name, _, _ in point.values())) if part),
        place=("arms", arm) if arm else ("grid",),
        sets=sets | {key: (value, place) for key, (_, value, place) in point.items()},
        seeds=given.get("seeds"),
        stage=given.get("stage"),
        against=[against] if isinstance(against, str) else against,
    )


def _name_problems(data: Mapping[str, Any], specs: list[ArmSpec]) -> list[Problem]:
    """Arms that are named but not there."""
    known = [spec.name for spec in specs]
    problems = []
    baseline = data.get("baseline")
    if baseline is not None and baseline not in known:
        problems.append(Problem(place=("baseline",), text=unknown_arm(baseline, known)))
    for spec in specs:
        for other in spec.against or []:
            if other not in known:
                problems.append(Problem(place=(*spec.place, "against"), text=unknown_arm(other, known)))
            elif other == spec.name:
                problems.append(Problem(place=(*spec.place, "against"), text="an arm cannot be compared with itself."))
    return problems


@dataclass(frozen=True, kw_only=True)
class StudyRun:
    """One arm under one seed."""

    arm: str
    seed: int
    stage: str
    """The stage whose scores stand for the arm."""
    loaded: LoadedRecipe

    @property
    def name(self) -> str:
        return f"{self.arm}-s{self.seed}"


@dataclass(frozen=True, kw_only=True)
class Study:
    name: str
    out: Path
    text: str
    runs: list[StudyRun]
    baseline: str
    against: dict[str, list[str]]
    """The arms that each arm is compared with."""
    measures: list[Measure]
    compare: list[str] | None
    """Names of the measures that rank the arms; None: those beyond the model's own context."""
    margin: Margin

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(run.arm for run in self.runs))

    def run_dir(self, run: StudyRun) -> Path:
        return self.out / run.name


def load_study(path_or_name: str | Path, *, overrides: list[str] | None = None, out: Path | None = None) -> Study:
    """`overrides` are `--set` texts that hold for every arm, after its own."""
    file, root, label = _find(str(path_or_name))
    text = read_text(file, label, kind="study")
    data, marks, problems = read_yaml(text, label)
    if not isinstance(data, dict):
        raise ConfigError(
            f"{label}:1: a study is a mapping of keys such as name, recipe and arms; see docs/studies.md."
        )
    refuse([*problems, *study_problems(data)], marks, data)
    specs, grid_problems = expand(data)
    refuse(grid_problems, marks, data)
    name = str(data["name"])
    folder = out or Path(data.get("out") or Path("runs", name))
    recipe = _recipe(str(data["recipe"]), root, marks)
    common = data.get("set") or {}
    runs: list[StudyRun] = []
    errors: list[str] = []
    for spec in specs:
        try:
            runs += _runs_of(spec, common, data, _Asked(recipe, folder, marks, overrides or []))
        except ConfigError as error:
            # What is wrong for every arm is said once.
            errors += [line for line in str(error).splitlines() if _bare(line) not in {_bare(one) for one in errors}]
    if errors:
        raise ConfigError("\n".join(errors))
    measures = measures_of([run.loaded.recipe for run in runs])
    refuse(list(compare_problems(data, measures)), marks, data)
    baseline = str(data.get("baseline") or specs[0].name)
    return Study(
        name=name,
        out=folder,
        text=text,
        runs=runs,
        baseline=baseline,
        against={spec.name: spec.against or [baseline] * (spec.name != baseline) for spec in specs},
        measures=measures,
        compare=chosen_names(data, measures),
        margin=Margin.model_validate(data.get("margin") or {}),
    )


def check_study_inputs(runs: list[StudyRun], label: str = "") -> None:
    """Refuse what cannot be found on this machine; each sentence names the first arm that needs it."""
    errors: list[str] = []
    for run in runs:
        try:
            check_inputs(run.loaded)
            _check_nothing_generated(run.loaded)
        except ConfigError as error:
            found = [line for line in str(error).splitlines() if not any(line in one for one in errors)]
            errors += [f"arm {run.arm}: {line}" for line in found]
    if errors:
        raise ConfigError("\n".join(errors))


def _check_nothing_generated(loaded: LoadedRecipe) -> None:
    """Each arm would ask for its own, and they would not be trained on the same."""
    sets = loaded.generated(loaded.recipe.sources)
    if sets:
        raise ConfigError(
            f"synth:{sets[0]} would be generated for each arm anew; make it once with `unspool synth`, and give the "
            "source the path of its folder."
        )


@dataclass(frozen=True)
class _Asked:
    """What all arms have in common."""

    recipe: str
    folder: Path
    marks: Marks
    overrides: list[str]


def _runs_of(spec: ArmSpec, common: dict[str, Any], data: dict[str, Any], asked: _Asked) -> list[StudyRun]:
    texts: dict[str, Place] = {f"{path}={_spell(value)}": ("set", path) for path, value in common.items()}
    texts |= {f"{path}={_spell(value)}": place for path, (value, place) in spec.sets.items()}
    runs = []
    for seed in spec.seeds or data.get("seeds") or DEFAULT_SEEDS:
        name = f"{spec.name}-s{seed}"
        own = [f"name={name}", f"seed={seed}", f"out={_spell(str(asked.folder / name))}"]
        try:
            loaded = load_recipe(asked.recipe, [*texts, *asked.overrides, *own])
        except ConfigError as error:
            raise ConfigError("\n".join(_placed(error, spec, texts, asked.overrides, asked.marks))) from None
        runs.append(StudyRun(arm=spec.name, seed=seed, stage=_stage(spec, loaded, asked.marks), loaded=loaded))
    return runs


def _placed(
    error: ConfigError, spec: ArmSpec, texts: dict[str, Place], overrides: list[str], marks: Marks
) -> list[str]:
    """The checker's sentences; what it knows as a `--set` of ours stands on a line of the study file."""
    lines = []
    for line in str(error).splitlines():
        where = {f"--set {_line(text)}: ": marks.where(place) for text, place in texts.items()}
        where |= {f"--set {_line(text)}: ": f"--set {_line(text)}" for text in overrides}
        known = next((start for start in where if line.startswith(start)), "")
        lines.append(f"{where.get(known, marks.where(spec.place))}: arm {spec.name}: {line.removeprefix(known)}")
    return lines


def _line(text: str) -> str:
    """As sentences quote it."""
    return " ".join(text.split())


def _bare(line: str) -> str:
    """A sentence without the arm it was found in."""
    before, named, after = line.partition(": arm ")
    return f"{before}: {after.partition(': ')[2]}" if named else line


def _stage(spec: ArmSpec, loaded: LoadedRecipe, marks: Marks) -> str:
    names = [stage.name for stage in loaded.recipe.stages]
    if not names:
        raise ConfigError(
            f"{marks.where(spec.place)}: arm {spec.name}: its recipe has no stages, so nothing is trained."
        )
    if spec.stage is None:
        return names[-1]
    if spec.stage not in names:
        guess = nearest(spec.stage, names)
        hint = f"; did you mean {guess!r}?" if guess else "."
        where = marks.where((*spec.place, "stage"))
        raise ConfigError(
            f"{where}: arm {spec.name}: stage = {spec.stage}: not a stage of its recipe{hint} "
            f"Known: {', '.join(names)}."
        )
    return spec.stage


def _spell(value: Any) -> str:
    """A value as `--set` reads it: JSON is YAML, but for characters beyond 16 bits."""
    return json.dumps(value, ensure_ascii=False)


def _recipe(given: str, root: Path, marks: Marks) -> str:
    """The base recipe as `load_recipe` finds it: beside the study first, then here, then bundled."""
    beside = root / expand_home(given)
    if given not in bundled_recipes() and path_exists(str(beside)):
        given = str(beside)
    try:
        load_recipe(given)
    except ConfigError as error:
        where = marks.where(("recipe",))
        raise ConfigError("\n".join(f"{where}: recipe: {line}" for line in str(error).splitlines())) from None
    return given


def _find(given: str) -> tuple[Path, Path, str]:
    """The file, the folder its paths start from, and what to call it."""
    path = expand_home(given)
    bundled = bundled_studies()
    if path_exists(str(path)) and path.is_file():
        return path, path.parent, given
    if given in bundled:
        return bundled[given].path, Path(), f"{given}.yaml"
    guess = nearest(given, bundled)
    hint = f"; did you mean {guess!r}?" if guess else "."
    raise ConfigError(f"{given!r} is neither a study file nor a bundled study{hint} Bundled: {', '.join(bundled)}.")


def pick_runs(study: Study, only: list[str] | None) -> list[StudyRun]:
    """The runs that were asked for, by arm or by run; all of them if none was."""
    known = [*study.arms, *(run.name for run in study.runs)]
    for name in only or []:
        if name not in known:
            raise ConfigError(f"--only {name}: {unknown_arm(name, known)}")
    return [run for run in study.runs if not only or run.arm in only or run.name in only]
