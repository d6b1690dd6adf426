"""The keys of a study file, and checks of their values."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import Field, ValidationError

from unspool.core.config import Config, did_you_mean
from unspool.recipe.json_schema import unknown_key
from unspool.recipe.schema import folder_problems
from unspool.recipe.yaml_lines import Place, Problem

DEFAULT_SEEDS = [0, 1]
# The keys of a study file with their descriptions.
KEYS = {
    "name": "Name of the study, and of its folder in runs/.",
    "recipe": "Recipe that all arms start from: a file or a bundled recipe.",
    "out": "Folder of the study. Default: runs/NAME.",
    "set": "Values to change in all arms, by path, as with `--set`.",
    "arms": "The arms by name. Required, unless there is a `grid`.",
    "grid": "Paths with several values each; every combination becomes an arm. Use a mapping to name the values.",
    "seeds": "Seeds under which each arm runs. Default: [0, 1].",
    "baseline": "Arm that the others are compared with. Default: the first arm.",
    "compare": "Measures that rank the arms, such as niah/32K, helmet/rag/32K or perplexity/16K-32K; `*` matches any "
    "text. Default: all measures beyond the model's own context length.",
    "margin": "Differences that count as equal.",
    "paper": "Numbers of a paper's table, shown next to the results.",
}
ARM_KEYS = {
    "set": "Values that this arm changes, by path, after the study's values.",
    "seeds": "Seeds of this arm. Default: the study's `seeds`.",
    "stage": "Stage whose scores count for this arm. Default: the last stage.",
    "against": "Arm, or list of arms, to compare this arm with instead of the baseline.",
    "merge": "Instead of training, average the weights of a trained arm with those of the recipe's model: "
    "`{arm: abf, weight: 0.9}` is 0.9 × abf + 0.1 × model.",
}
# Keys of a recipe that the study sets for each run.
OWN = {"name": "the study names each run", "seed": "use seeds", "out": "use the study's out"}
MAX_RUNS = 1000


class Margin(Config):
    """Irrelevant differences: arms are equal if the interval of their difference is within these bounds."""

    score: float = Field(0.05, gt=0, le=1, description="Largest difference of scores that counts as equal.")
    loss: float = Field(0.02, gt=0, description="Largest difference of losses that counts as equal, in nats per token.")


class Merge(Config):
    """Weights of an arm that is not trained: an average of a trained arm's and those of the recipe's model."""

    arm: str = Field(min_length=1, description="Arm whose trained weights are averaged, under the same seed.")
    weight: float = Field(0.9, ge=0, le=1, description="Share of the trained weights; the recipe's model has the rest.")


def study_problems(data: Mapping[str, Any]) -> Iterator[Problem]:
    yield from _unknown_keys(data, KEYS, ())
    for key, what in (
        ("name", "a name, which is also the study's folder in runs/"),
        ("recipe", "a recipe's name or file"),
    ):
        if not isinstance(data.get(key), str) or not data[key].strip():
            yield Problem(place=(key,), text=f"missing; write {what}.")
    if isinstance(data.get("name"), str):
        yield from folder_problems(data["name"], ("name",))
    if data.get("out") is not None and not isinstance(data["out"], str):
        yield Problem(place=("out",), text="must be a folder.", show_value=True)
    yield from _set_problems(data.get("set"), ("set",))
    yield from seed_problems(data.get("seeds"), ("seeds",))
    yield from _arm_problems(data)
    yield from _grid_problems(data.get("grid"))
    if data.get("baseline") is not None and not isinstance(data["baseline"], str):
        yield Problem(place=("baseline",), text="must be the name of an arm.", show_value=True)
    compare = data.get("compare")
    if compare is not None and not (isinstance(compare, list) and all(isinstance(one, str) for one in compare)):
        yield Problem(
            place=("compare",), text="must be a list of measures, such as [niah/32K, perplexity].", show_value=True
        )
    yield from _margin_problems(data.get("margin"))


def _unknown_keys(data: Mapping[str, Any], allowed: Iterable[str], place: Place) -> Iterator[Problem]:
    for key in data:
        if key not in allowed:
            yield Problem(place=(*place, key), text=unknown_key(key, list(allowed)))


def _arm_problems(data: Mapping[str, Any]) -> Iterator[Problem]:
    arms = data.get("arms")
    if arms is None and data.get("grid"):
        return
    if not isinstance(arms, dict) or not arms:
        text = "missing; write the arms by name, such as {plain: {}, faster: {set: {stages.0.lr: 1e-4}}}, or a grid."
        yield Problem(place=("arms",), text=text)
        return
    for name, arm in arms.items():
        place = ("arms", name)
        yield from folder_problems(name, place)
        if arm is None:  # an arm without changes
            continue
        if not isinstance(arm, dict):
            yield Problem(place=place, text=f"must be a mapping with the keys {', '.join(ARM_KEYS)}.", show_value=True)
            continue
        yield from _unknown_keys(arm, ARM_KEYS, place)
        yield from _set_problems(arm.get("set"), (*place, "set"))
        yield from seed_problems(arm.get("seeds"), (*place, "seeds"))
        if arm.get("stage") is not None and not isinstance(arm["stage"], str):
            yield Problem(place=(*place, "stage"), text="must be the name of a stage.", show_value=True)
        yield from _merge_problems(arm, place, arms)
        against = arm.get("against")
        names = [against] if isinstance(against, str) else against
        if names is not None and not (isinstance(names, list) and all(isinstance(one, str) for one in names)):
            yield Problem(place=(*place, "against"), text="must be an arm or a list of arms.", show_value=True)


def _merge_problems(arm: Mapping[str, Any], place: Place, arms: Mapping[str, Any]) -> Iterator[Problem]:
    given = arm.get("merge")
    if given is None:
        return
    place = (*place, "merge")
    try:
        merge = Merge.model_validate(given)
    except ValidationError:
        text = "must be {arm: NAME, weight: SHARE} with a share from 0 to 1, such as {arm: abf, weight: 0.9}."
        yield Problem(place=place, text=text, show_value=True)
        return
    extra = [key for key in ("set", "stage") if arm.get(key) is not None]
    if extra:
        text = f"an arm with merge is not trained, so it cannot have {extra[0]!r}; change arm {merge.arm} instead."
        yield Problem(place=place, text=text)
    if merge.arm not in arms:
        trained = [name for name, arm in arms.items() if not (isinstance(arm, dict) and arm.get("merge") is not None)]
        yield Problem(place=place, text=unknown_arm(merge.arm, trained))
    elif isinstance(arms[merge.arm], dict) and arms[merge.arm].get("merge") is not None:
        yield Problem(place=place, text=f"arm {merge.arm} is not trained either; name a trained arm.")


def _set_problems(sets: Any, place: Place) -> Iterator[Problem]:
    if sets is None:
        return
    if not isinstance(sets, dict):
        text = "must be a mapping from keys of the recipe to values, such as {stages.0.lr: 1e-4}."
        yield Problem(place=place, text=text, show_value=True)
        return
    for key in sets:
        if key in OWN:
            yield Problem(place=(*place, key), text=f"cannot be set by an arm; {OWN[key]}.")


def _grid_problems(grid: Any) -> Iterator[Problem]:
    if grid is None:
        return
    if not isinstance(grid, dict) or not grid:
        text = "must be a mapping from keys of the recipe to their values, such as {stages.0.lr: [1e-4, 3e-4]}."
        yield Problem(place=("grid",), text=text, show_value=True)
        return
    yield from _set_problems(grid, ("grid",))
    for key, values in grid.items():
        place = ("grid", key)
        if isinstance(values, list) and values and not any(isinstance(value, dict | list) for value in values):
            continue
        if isinstance(values, dict) and values:
            for name in values:
                yield from folder_problems(name, (*place, name))
            continue
        text = "must be a list of plain values, or a mapping from names to values of any kind."
        yield Problem(place=place, text=text, show_value=True)


def seed_problems(seeds: Any, place: Place) -> Iterator[Problem]:
    if seeds is None:
        return
    whole = isinstance(seeds, list) and all(isinstance(seed, int) and not isinstance(seed, bool) for seed in seeds)
    if not whole or not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        yield Problem(
            place=place, text="must be a list of different whole numbers from 0, such as [0, 1].", show_value=True
        )


def _margin_problems(margin: Any) -> Iterator[Problem]:
    if margin is None:
        return
    allowed = tuple(Margin.model_fields)
    if not isinstance(margin, dict):
        yield Problem(place=("margin",), text="must be a mapping such as {score: 0.05, loss: 0.02}.", show_value=True)
        return
    yield from _unknown_keys(margin, allowed, ("margin",))
    for key in allowed:
        value = margin.get(key, 0.05)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value <= (1 if key == "score" else 1e9):
            most = " and of at most 1" if key == "score" else ""
            yield Problem(place=("margin", key), text=f"must be a number above 0{most}.", show_value=True)


def unknown_arm(name: str, known: list[str]) -> str:
    return f"no arm is called {name!r}{did_you_mean(name, known)} Known: {', '.join(known)}."
