"""Load a study file and check it: a recipe, the arms that change it, seeds, and the measures to compare.

All problems are reported before any work, one line each, with the line of the study file and the arm. The recipe
checker checks the recipe of each arm.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from unspool.core.artifacts import digest
from unspool.core.config import did_you_mean
from unspool.core.errors import ConfigError, DataError
from unspool.models.location import expand_home, path_exists
from unspool.recipe.context import RunContext
from unspool.recipe.extends import find_file, read_text
from unspool.recipe.json_schema import refuse
from unspool.recipe.load import LoadedRecipe, Overrides, check_inputs, load_recipe, override_texts
from unspool.recipe.overrides import override_label
from unspool.recipe.paths import bundled_recipes, bundled_studies
from unspool.recipe.prepare import check_data_inputs
from unspool.recipe.schema import FOLDER_NAME
from unspool.recipe.yaml_lines import Marks, Place, Problem, read_yaml
from unspool.studies.arm_scores import Measure, chosen_names, compare_problems, find_measures, measures_of
from unspool.studies.merged_arms import BASE, merged_recipe
from unspool.studies.paper_numbers import Paper, paper_problems, read_paper
from unspool.studies.schema import (
    DEFAULT_SEEDS,
    MAX_RUNS,
    Margin,
    Merge,
    seed_problems,
    study_problems,
    unknown_arm,
)


@dataclass(frozen=True, kw_only=True)
class ArmSpec:
    name: str
    place: Place
    sets: dict[str, tuple[Any, Place]]  # key of the recipe: its value, and the value's place in the study file
    seeds: list[int] | None = None
    stage: str | None = None
    against: list[str] | None = None
    merge: Merge | None = None


def expand(data: Mapping[str, Any]) -> tuple[list[ArmSpec], list[Problem]]:
    """Return the product of the arms and the grid of a study file, each with a name."""
    listed: dict[str, dict[str, Any]] = {name: arm or {} for name, arm in (data.get("arms") or {"": {}}).items()}
    points = [dict(point) for point in product(*(_values(*entry) for entry in (data.get("grid") or {}).items()))]
    specs: list[ArmSpec] = []
    problems: list[Problem] = []
    for arm, point in product(listed, points):
        spec = _spec(arm, listed[arm], point)
        is_taken = spec.name in {known.name for known in specs}
        if is_taken or not FOLDER_NAME.fullmatch(spec.name):
            who = "two arms" if is_taken else "an arm"
            text = f"{who} would be called {spec.name!r}; give the values of the grid names: {{name: value}}."
            problems.append(Problem(place=("grid",), text=text))
        else:
            specs.append(spec)
    num_runs = sum(len(_seeds(spec, data)) for spec in specs)
    if num_runs > MAX_RUNS:
        text = f"makes {num_runs:,} runs; the limit is {MAX_RUNS:,}."
        problems.append(Problem(place=("grid",), text=text))
    return specs, [*problems, *_name_problems(data, specs), *paper_problems(data, [spec.name for spec in specs])]


def _values(key: str, values: Any) -> list[tuple[str, tuple[str, Any, Place]]]:
    """List the values of one grid key, each with its part of the arm's name and its place."""
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
    suffix = [name for name, _, _ in point.values()]
    merge = Merge.model_validate(given["merge"]) if given.get("merge") else None
    return ArmSpec(
        name=_joined(arm, suffix),
        place=("arms", arm) if arm else ("grid",),
        sets=sets | {key: (value, place) for key, (_, value, place) in point.items()},
        seeds=given.get("seeds"),
        stage=given.get("stage"),
        against=[against] if isinstance(against, str) else against,
        merge=merge and merge.model_copy(update={"arm": _joined(merge.arm, suffix)}),
    )


def _joined(arm: str, values: Sequence[str]) -> str:
    return "-".join(part for part in (arm, *values) if part)


def _name_problems(data: Mapping[str, Any], specs: list[ArmSpec]) -> list[Problem]:
    """Check references to arms."""
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
                problems.append(
                    Problem(
                        place=(*spec.place, "against"), text="an arm cannot be compared with itself; name another arm."
                    )
                )
    return problems


@dataclass(frozen=True, kw_only=True)
class StudyRun:
    """One arm under one seed."""

    arm: str
    seed: int
    stage: str  # the stage with the compared scores
    loaded: LoadedRecipe
    merge: Merge | None = None  # an arm that is not trained

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
    against: dict[str, list[str]]  # by arm: the arms that it is compared with
    measures: list[Measure]
    compare: list[str] | None  # measures that rank the arms; None: those beyond the model's context
    margin: Margin
    paper: Paper | None = None

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(run.arm for run in self.runs))

    def run_dir(self, run: StudyRun) -> Path:
        return self.out / run.name


def load_study(
    path_or_name: str | Path, *, overrides: Overrides = None, seeds: Sequence[int] = (), out: Path | None = None
) -> Study:
    """Load and check a study; `overrides` apply to every arm, after its own, and `seeds` replace those of all arms."""
    changes = override_texts(overrides)
    file, root, label = find_file(str(path_or_name), bundled_studies(), kind="study")
    text = read_text(file, label, kind="study")
    data, marks, problems = read_yaml(text, label)
    if not isinstance(data, dict):
        raise ConfigError(
            f"{label}:1: a study must be a mapping with keys such as name, recipe and arms; `unspool study show tiny` "
            "prints an example."
        )
    if "stages" in data and "recipe" not in data:
        raise ConfigError(f"{label} is a recipe, not a study; run it with `unspool run {label}`.")
    refuse([*problems, *study_problems(data)], marks, data)
    if seeds:
        data = _with_seeds(data, list(seeds))
    specs, grid_problems = expand(data)
    refuse(grid_problems, marks, data)
    name = str(data["name"])
    folder = out or Path(data.get("out") or Path("runs", name))
    recipe = _recipe(str(data["recipe"]), root, marks)
    runs: list[StudyRun] = []
    errors: list[str] = []
    for spec in (spec for spec in specs if spec.merge is None):
        try:
            runs += _runs_of(spec, data, recipe, folder, marks, changes)
        except ConfigError as error:
            # A problem of every arm is reported once.
            errors += [line for line in str(error).splitlines() if _bare(line) not in {_bare(one) for one in errors}]
    if errors:
        raise ConfigError("\n".join(errors))
    runs = _with_merged(specs, runs, data, folder, marks)
    measures = measures_of([run.loaded.recipe for run in runs])
    if any(text.startswith("evals") for text in changes):
        # Other evals than those that the study was written for: what they do not measure cannot rank the arms.
        data |= {"compare": [name for name in data.get("compare") or [] if find_measures(name, measures)]}
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
        paper=read_paper(data),
    )


def check_study_inputs(runs: list[StudyRun]) -> None:
    """Reject runs whose inputs are not on this machine; each message names the first arm that needs the input."""
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


def check_arms(runs: list[StudyRun]) -> None:
    """Reject arms that would stop later, once per arm: their models, stages, sources and evals."""
    from unspool.models.extend import pick_device  # import late: these load torch
    from unspool.recipe.run import check_evals
    from unspool.training.parallel.mesh import single_rank

    errors: list[str] = []
    checked: set[str] = set()  # evals of one model, which most arms share
    for run in {run.arm: run for run in reversed(runs)}.values():
        recipe = run.loaded.recipe
        context = RunContext(loaded=run.loaded, ranks=single_rank(pick_device(recipe.device)))
        try:
            check_data_inputs(context)
            key = digest([recipe.model, recipe.seed, recipe.evals])
            if key not in checked:
                check_evals(context)
            checked.add(key)
        except (ConfigError, DataError) as error:
            errors.insert(0, f"arm {run.arm}: {error}")
    if errors:
        raise ConfigError("\n".join(errors))


def _check_nothing_generated(loaded: LoadedRecipe) -> None:
    """Reject generated sources: each arm would generate different training data."""
    sets = loaded.generated(loaded.recipe.sources)
    if sets:
        raise ConfigError(
            f"synth:{sets[0]} would be generated again for each arm; generate it once with `unspool synth`, and set "
            "the source's path to its folder."
        )


def _runs_of(
    spec: ArmSpec, data: dict[str, Any], recipe: str, folder: Path, marks: Marks, overrides: list[str]
) -> list[StudyRun]:
    common = data.get("set") or {}
    texts: dict[str, Place] = {f"{path}={_spell(value)}": ("set", path) for path, value in common.items()}
    texts |= {f"{path}={_spell(value)}": place for path, (value, place) in spec.sets.items()}
    runs = []
    for seed in _seeds(spec, data):
        name = f"{spec.name}-s{seed}"
        own = [f"name={name}", f"seed={seed}", f"out={_spell(str(folder / name))}"]
        try:
            loaded = load_recipe(recipe, [*texts, *overrides, *own])
        except ConfigError as error:
            raise ConfigError("\n".join(_placed(error, spec, texts, overrides, marks))) from None
        runs.append(StudyRun(arm=spec.name, seed=seed, stage=_stage(spec, loaded, marks), loaded=loaded))
    return runs


def _with_merged(
    specs: list[ArmSpec], trained: list[StudyRun], data: dict[str, Any], folder: Path, marks: Marks
) -> list[StudyRun]:
    """Add the runs of arms that average trained weights; return all runs in the order of the arms."""
    by_name = {run.name: run for run in trained}
    runs: list[StudyRun] = []
    for spec in specs:
        if spec.merge is None:
            runs += [run for run in trained if run.arm == spec.name]
            continue
        for seed in _seeds(spec, data):
            source = by_name.get(f"{spec.merge.arm}-s{seed}")
            if source is None:
                raise ConfigError(
                    f"{marks.where((*spec.place, 'merge'))}: arm {spec.name}: arm {spec.merge.arm} has no run with "
                    f"seed {seed}; add the seed there, or set seeds here."
                )
            loaded = merged_recipe(source.loaded, source.stage, name=f"{spec.name}-s{seed}", folder=folder)
            runs.append(StudyRun(arm=spec.name, seed=seed, stage=BASE, loaded=loaded, merge=spec.merge))
    return runs


def _seeds(spec: ArmSpec, data: Mapping[str, Any]) -> list[int]:
    return spec.seeds or data.get("seeds") or DEFAULT_SEEDS


def _with_seeds(data: Mapping[str, Any], seeds: list[int]) -> dict[str, Any]:
    for problem in seed_problems(seeds, ()):
        raise ConfigError(f"seeds = {seeds}: {problem.text}")
    arms = {name: (arm or {}) | {"seeds": seeds} for name, arm in (data.get("arms") or {"": {}}).items()}
    return {**data, "arms": arms}


def _placed(
    error: ConfigError, spec: ArmSpec, texts: dict[str, Place], overrides: list[str], marks: Marks
) -> list[str]:
    """The recipe checker's messages, with lines of the study file in place of the `--set` texts made from them."""
    # Messages quote a text on one line.
    where = {f"{override_label(text)}: ": marks.where(place) for text, place in texts.items()}
    where |= {f"{override_label(text)}: ": override_label(text) for text in overrides}
    lines = []
    for line in str(error).splitlines():
        known = next((start for start in where if line.startswith(start)), "")
        lines.append(f"{where.get(known, marks.where(spec.place))}: arm {spec.name}: {line.removeprefix(known)}")
    return lines


def _bare(line: str) -> str:
    """Return a message without the name of its arm."""
    before, named, after = line.partition(": arm ")
    return f"{before}: {after.partition(': ')[2]}" if named else line


def _stage(spec: ArmSpec, loaded: LoadedRecipe, marks: Marks) -> str:
    names = [stage.name for stage in loaded.recipe.stages]
    if not names:
        raise ConfigError(f"{marks.where(spec.place)}: arm {spec.name}: its recipe has no stages; add one.")
    if spec.stage is None:
        return names[-1]
    if spec.stage not in names:
        hint = did_you_mean(spec.stage, names)
        where = marks.where((*spec.place, "stage"))
        raise ConfigError(
            f"{where}: arm {spec.name}: stage = {spec.stage}: not a stage of its recipe{hint} "
            f"Known: {', '.join(names)}."
        )
    return spec.stage


def _spell(value: Any) -> str:
    """Format a value for `--set`: JSON is YAML, except for escapes beyond 16 bits."""
    return json.dumps(value, ensure_ascii=False)


def _recipe(given: str, root: Path, marks: Marks) -> str:
    """Find the base recipe for `load_recipe`: next to the study, else in the current folder, else bundled."""
    beside = root / expand_home(given)
    if given not in bundled_recipes() and path_exists(str(beside)):
        given = str(beside)
    try:
        load_recipe(given)
    except ConfigError as error:
        where = marks.where(("recipe",))
        raise ConfigError("\n".join(f"{where}: recipe: {line}" for line in str(error).splitlines())) from None
    return given


def pick_runs(study: Study, only: Sequence[str]) -> list[StudyRun]:
    """The runs that `only` names, by arm or by run; all of them if it is empty."""
    known = [*study.arms, *(run.name for run in study.runs)]
    for name in only:
        if name not in known:
            raise ConfigError(f"`only={name!r}`: {unknown_arm(name, known)}")
    return [run for run in study.runs if not only or run.arm in only or run.name in only]
