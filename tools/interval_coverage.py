"""How often do 95% intervals contain the true difference of two arms? `python tools/interval_coverage.py [--trials N]`.

Arms answer questions rightly or wrongly. The log-odds of a right answer are the sum of the arm's level, the question's
difficulty (common to both arms), the arm's own difficulty with the question, and a shift for each arm and training
seed. The true difference is the mean over all questions and seeds. Four intervals are compared:

- `questions`: over questions alone, as if the seeds were the only ones possible;
- `bootstrap`: hierarchical percentile bootstrap, which draws seeds, then questions, paired over arms;
- `t`: Student's t over seeds, with the spread over questions as a lower bound of the error (`over_seeds`);
- `two-level`: `unspool.studies.two_level`, which the results pages use.

The table is written to docs/results/data/coverage.csv.
"""

import argparse
import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import expit

from unspool.studies.arm_comparison import over_prompts, over_seeds
from unspool.studies.two_level import difference_interval

OUT = Path(__file__).parents[1] / "docs" / "results" / "data" / "coverage.csv"
METHODS = ("questions", "bootstrap", "t", "two-level")
DRAWS = 1000
DIFFICULTY, OWN_DIFFICULTY = 1.5, 0.5  # standard deviations of log-odds over questions
ARMS = (-1.0, 0.5)  # levels of the two arms: 33% and 59% right
COLLAPSE = -3.0  # shift of a seed that fails


@dataclass(frozen=True, kw_only=True)
class Scenario:
    name: str
    seeds: int
    questions: int = 100
    spread: float  # standard deviation of log-odds over seeds
    shared: bool = False  # do all seeds answer the same questions?
    failing: float = 0.0  # share of seeds of the second arm that fail


def scenarios() -> Iterator[Scenario]:
    for seeds in (2, 3, 5):
        for spread in (0.0, 0.2, 0.5):
            yield Scenario(name=f"seeds vary by {spread:g}", seeds=seeds, spread=spread)
    three = Scenario(name="", seeds=3, spread=0.2)
    yield replace(three, name="shared questions, seeds do not vary", shared=True, spread=0.0)
    yield replace(three, name="shared questions, seeds vary by 0.2", shared=True)
    yield replace(three, name="shared questions, seeds vary by 0.5", shared=True, spread=0.5)
    yield replace(three, name="25 questions, seeds vary by 0.2", questions=25)
    yield replace(three, name="one seed in ten fails, seeds vary by 0.2", failing=0.1)


def shifts(scenario: Scenario, rng: np.random.Generator, size: int) -> np.ndarray:
    """Return shifts of log-odds by arm and seed, of shape (2, size)."""
    drawn = rng.normal(0, scenario.spread, size=(2, size))
    drawn[1] += COLLAPSE * (rng.random(size) < scenario.failing)
    return drawn


def true_difference(scenario: Scenario) -> float:
    """Return the mean difference over questions and seeds, from a million of each."""
    rng = np.random.default_rng(0)
    seeds = shifts(scenario, rng, 1_000_000)
    common = rng.normal(0, DIFFICULTY, size=1_000_000)
    own = rng.normal(0, OWN_DIFFICULTY, size=(2, 1_000_000))
    right = expit(np.array(ARMS)[:, None] + common + own + seeds)
    return float((right[1] - right[0]).mean())


def trial(scenario: Scenario, rng: np.random.Generator) -> np.ndarray:
    """Return differences of scores, −1 to 1, of shape (seeds, questions)."""
    k, n = scenario.seeds, scenario.questions
    sets = 1 if scenario.shared else k
    common = rng.normal(0, DIFFICULTY, size=(1, sets, n))
    own = rng.normal(0, OWN_DIFFICULTY, size=(2, sets, n))
    odds = np.array(ARMS)[:, None, None] + common + own + shifts(scenario, rng, k)[:, :, None]
    right = (rng.random((2, k, n)) < expit(odds)).astype(float)
    return right[1] - right[0]


def bootstrap(gains: np.ndarray, rng: np.random.Generator, *, shared: bool) -> tuple[float, float]:
    """Hierarchical percentile bootstrap: draw seeds, then questions, the same for all seeds if they share them."""
    k, n = gains.shape
    seeds = rng.integers(k, size=(DRAWS, k))
    questions = rng.integers(n, size=(DRAWS, 1 if shared else k, n))
    means = gains[seeds[:, :, None], questions].mean(axis=(1, 2))
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def intervals(gains: np.ndarray, rng: np.random.Generator, *, shared: bool) -> dict[str, tuple[Any, Any]]:
    k, n = gains.shape
    found = {
        seed: {f"{0 if shared else seed}-{at}": float(gain) / n for at, gain in enumerate(gains[seed])}
        for seed in range(k)
    }
    tests = {"questions": over_prompts(found, bounded=True), "t": over_seeds(found, bounded=True)}
    both = difference_interval(found, bounded=True)
    assert both is not None
    return {name: (one.low, one.high) for name, one in (tests | {"two-level": both}).items()} | {
        "bootstrap": bootstrap(gains, rng, shared=shared)
    }


def coverage(scenario: Scenario, trials: int) -> dict[str, tuple[float, float]]:
    """Return by method the share of intervals with the truth, and their mean width."""
    truth = true_difference(scenario)
    rng = np.random.default_rng([scenario.seeds, trials])
    inside, width = dict.fromkeys(METHODS, 0), dict.fromkeys(METHODS, 0.0)
    for _ in range(trials):
        found = intervals(trial(scenario, rng), rng, shared=scenario.shared)
        for name, (low, high) in found.items():
            inside[name] += low <= truth <= high
            width[name] += high - low
    return {name: (inside[name] / trials, width[name] / trials) for name in METHODS}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=2000, help="simulated studies per row (default: 2000)")
    parser.add_argument("--out", type=Path, default=OUT)
    chosen = parser.parse_args(arguments)
    rows = []
    for scenario in scenarios():
        found = coverage(scenario, chosen.trials)
        cells = {
            f"{name} {what}": f"{value:.3f}"
            for name in METHODS
            for what, value in zip(("coverage", "width"), found[name], strict=True)
        }
        rows.append(
            {
                "seeds": scenario.seeds,
                "questions": scenario.questions,
                "study": scenario.name,
                **cells,
                "trials": chosen.trials,
            }
        )
        print(rows[-1], flush=True)
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    with chosen.out.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
