"""From what a study file lists to its arms: the product of arms and grid, each with a name.

In: data that study_schema.py found nothing wrong with. Out: `ArmSpec`s in the order of the file, and problems.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from unspool.recipes.lines import Place, Problem
from unspool.recipes.schema import FOLDER_NAME
from unspool.recipes.study_schema import DEFAULT_SEEDS, MOST_RUNS, unknown_arm


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
