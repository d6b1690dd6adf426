"""Every interval and test that README and the results pages quote, computed again with `scipy.stats`.

From the answers and losses committed beside a page; where none are (runs on a CPU), intervals of right and
wrong answers follow from the share and n.
"""

import csv
import gzip
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
STUDY, EVALS = "smollm2-32k/study", "smollm2-evals"
K = 1024
LENGTHS = (2 * K, 4 * K, 8 * K, 16 * K, 32 * K)
SPANS = {"0–1K": (0, K), "1K–2K": (K, 2 * K), "2K–4K": (2 * K, 4 * K), "4K–8K": (4 * K, 8 * K)}
SPANS |= {"8K–16K": (8 * K, 16 * K), "16K–32K": (16 * K, 32 * K)}
ByPrompt = dict[str, float]


@cache
def samples(path: str) -> list[dict[str, Any]]:
    file = RESULTS / path
    text = gzip.decompress(file.read_bytes()).decode() if file.suffix == ".gz" else file.read_text()
    return [json.loads(line) for line in text.splitlines()]


def study(run: str) -> str:
    return f"{STUDY}/{run}/samples.jsonl.gz"


def needles(path: str, *lengths: int) -> ByPrompt:
    chosen = [one for one in samples(path) if one["suite"] == "niah" and one["length"] in lengths]
    return {one["hash"]: one["score"] for one in chosen}


def losses(path: str, *spans: tuple[int, int]) -> ByPrompt:
    """Mean over spans of the loss in each, by window."""
    return {
        one["hash"]: float(np.mean([_loss(one["losses"], *span) for span in spans]))
        for one in samples(path)
        if one["suite"] in ("loss", "perplexity")
    }


def _loss(buckets: Sequence[dict[str, Any]], start: int, stop: int) -> float:
    chosen = [one for one in buckets if one["from"] >= start and one["to"] <= stop]
    return sum(one["value"] * one["n"] for one in chosen) / sum(one["n"] for one in chosen)


def paired(first: ByPrompt, second: ByPrompt) -> np.ndarray:
    assert first.keys() == second.keys()
    return np.array([second[prompt] - first[prompt] for prompt in first])


def half_width(values: Sequence[float] | np.ndarray) -> float:
    """Half of the 95% interval of a mean, by Student's t."""
    low, high = stats.t.interval(0.95, len(values) - 1, loc=0, scale=stats.sem(values))
    return float(high - low) / 2


def percent(scores: Sequence[float]) -> str:
    """A share of right answers with Wilson's interval, as pages write it."""
    return wilson(sum(scores), len(scores))


def wilson(right: float, n: int) -> str:
    found = stats.binomtest(round(right), n).proportion_ci(0.95, "wilson")
    # Python rounds halves to even, as the pages do.
    return f"{100 * right / n:.0f}% ({100 * found.low:.0f}–{100 * found.high:.0f})"


def sign_test(differences: np.ndarray) -> float:
    more, fewer = int((differences > 0).sum()), int((differences < 0).sum())
    return float(stats.binomtest(more, more + fewer).pvalue) if more + fewer else 1.0


def table(path: str) -> list[dict[str, str]]:
    with (RESULTS / path).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8").replace("**", "")


def rows(text: str, label: str) -> list[list[str]]:
    """Cells after the first of every table row that begins with `label`."""
    found = [line.strip("|").split("|") for line in text.splitlines() if line.startswith(f"| {label}")]
    return [[cell.strip() for cell in cells[1:]] for cells in found]


ARMS = {"`ct`": "ct-s0", "`harpe`": "harpe-s0", "`harpe-shared`": "harpe-shared-s0", "`abf`": "abf-s0"}
ARMS |= {"untouched model": "base", "`documents`": "documents-s0", "`utk`": "utk-s0", "`cip2`": "cip2-s0"}
SEED_1 = {"untouched model": "base-s1", "`abf`": "abf-s1", "`utk`": "utk-s1"}
PAGE = page("docs/results/smollm2-32k.md")


@pytest.mark.parametrize("label", ARMS)
def test_needles_of_the_study(label: str) -> None:
    found = rows(PAGE, label)
    path = study(ARMS[label])
    assert found[0] == [percent(list(needles(path, length).values())) for length in LENGTHS[2:]]


def test_losses_of_the_study_by_position() -> None:
    found = {row.pop("run"): list(row.values()) for row in table(f"{STUDY}/losses.csv")}
    assert found.keys() == {*ARMS.values(), *SEED_1.values()}
    for run, cells in found.items():
        path = study(run)
        assert cells == [f"{np.mean(list(losses(path, span).values())):.3f}" for span in SPANS.values()], run


@pytest.mark.parametrize("label", SEED_1)
def test_needles_of_the_study_with_the_other_seed(label: str) -> None:
    path = study(SEED_1[label])
    wanted = [percent(list(needles(path, length).values())) for length in LENGTHS[2:]]
    assert rows(PAGE, f"{label}, seed 1")[0] == wanted


def test_losses_of_the_study_vary_over_windows_as_the_page_says() -> None:
    halves = [half_width(list(losses(study(arm), span).values())) for arm in ARMS.values() for span in SPANS.values()]
    assert f"±{min(halves):.2f} to ±{max(halves):.2f} over windows" in PAGE


COMPARED = ("cip2", "utk", "documents", "harpe-shared", "harpe", "ct")  # with `abf`, as the page lists them


def holm(p_values: Sequence[float]) -> np.ndarray:
    order = np.argsort(p_values)
    raised = np.maximum.accumulate(np.array(p_values)[order] * np.arange(len(p_values), 0, -1))
    return np.minimum(1, raised[np.argsort(order)])


def contrasts(measure: Callable[[str], ByPrompt]) -> Iterator[np.ndarray]:
    """Differences per prompt of all seven comparisons that the study made, in the order of the page, then the last."""
    for arm, against in [*((arm, "abf") for arm in COMPARED), ("harpe", "harpe-shared")]:
        seeds = (0, 1) if arm == "utk" else (0,)
        runs = [(study(f"{against}-s{seed}"), study(f"{arm}-s{seed}")) for seed in seeds]
        yield np.concatenate([paired(measure(first), measure(second)) for first, second in runs])


def as_p(value: float) -> str:
    return "<0.001" if value < 0.001 else f"{value:.3f}" if value < 0.1 else f"{value:.2f}"


def test_p_values_of_needles_are_sign_tests_corrected_by_holm() -> None:
    found = list(contrasts(lambda path: needles(path, 16 * K, 32 * K)))
    corrected = holm([sign_test(one) for one in found])
    for label, differences, p in zip(COMPARED, found[:-1], corrected[:-1], strict=True):
        cells = rows(PAGE, f"`{label}` |")[-1]
        assert float(cells[0].split()[0].replace("−", "-")) == pytest.approx(100 * differences.mean(), abs=0.051)
        assert cells[1] == as_p(p), label


def test_p_values_and_intervals_of_losses_are_paired_over_windows() -> None:
    found = list(contrasts(lambda path: losses(path, SPANS["8K–16K"], SPANS["16K–32K"])))
    flips = [
        stats.permutation_test((one,), np.mean, permutation_type="samples", n_resamples=20_000, rng=0).pvalue
        for one in found
    ]
    corrected = holm(flips)
    for label, differences, p in zip(COMPARED, found[:-1], corrected[:-1], strict=True):
        cells = rows(PAGE, f"`{label}` |")[-1]
        quoted = [float(text.replace("−", "-")) for text in re.findall(r"[−+]?\d+\.\d+", cells[2])]
        half, mean = half_width(differences), float(differences.mean())
        assert quoted == pytest.approx([mean, mean - half, mean + half], abs=0.00051), label
        # Of 20,000 random flips; only `harpe-shared` is near enough to a printed digit for chance to show.
        assert cells[3] == as_p(p) or (cells[3] == "0.002" and 0.001 < p < 0.004), (label, p)


def test_what_the_study_says_of_two_seeds() -> None:
    means = {
        arm: [np.mean(list(needles(study(f"{arm}-s{seed}"), 16 * K, 32 * K).values())) for seed in (0, 1)]
        for arm in ("abf", "utk")
    }
    plain = stats.ttest_rel(means["utk"], means["abf"]).pvalue
    prompts = next(one for at, one in enumerate(contrasts(lambda path: needles(path, 16 * K, 32 * K))) if at == 1)
    # Agresti and Min add half an observation to each of a pair's four outcomes.
    floor = math.sqrt((np.sum(np.abs(prompts)) + 1) / (len(prompts) + 2) - (prompts.sum() / (len(prompts) + 2)) ** 2)
    floor /= math.sqrt(len(prompts) + 2)
    floored = 2 * stats.t.sf(prompts.mean() / floor, 1)
    assert f"With the two seeds as units, `utk` against `abf` has p = {floored:.2f}" in PAGE
    assert f"({plain:.2f} without the spread" in PAGE


def test_readmes_earlier_study() -> None:
    abf, utk, cip2 = (percent(list(needles(study(f"{arm}-s0"), 32 * K).values())) for arm in ("abf", "utk", "cip2"))
    assert f"ABF finds {abf}, UtK {utk} and CIP-2 {cip2}" in page("README.md")


def test_needles_on_one_gpu() -> None:
    text = page("docs/results/smollm2-evals.md")
    pairs = [
        [needles(f"{EVALS}/h200/{model}-s0/niah.jsonl.gz", length) for model in ("base", "utk")] for length in LENGTHS
    ]
    change = np.concatenate([paired(*one) for one in pairs])
    assert f"of {len(change)} prompts the extended model, arm `utk`" in text
    assert f"gains {(change > 0).sum()} and loses one" in text
    assert (change < 0).sum() == 1
    beyond = [score for untouched, _ in pairs[3:] for score in untouched.values()]
    assert sum(beyond) == 0 and f"Beyond 8K the untouched model finds none of {len(beyond)}" in text


def test_every_task_of_ruler_on_one_gpu() -> None:
    text = page("docs/results/smollm2-evals.md")
    cells = json.loads((RESULTS / EVALS / "ruler-h200.json").read_text())["cells"]
    stored = {(one["task"], one["length"]): one for one in cells if one["depth"] is None}
    answers = samples(f"{EVALS}/h200/base-s0/ruler.jsonl.gz")
    tasks = list(dict.fromkeys(one["task"] for one in answers))
    assert len(tasks) == 13
    halves: dict[int, list[float]] = {length: [] for length in LENGTHS}
    for task in tasks:
        for length in LENGTHS:
            scores = [one["score"] for one in answers if one["task"] == task and one["length"] == length]
            low, high = _graded(scores)
            one = stored[task, length]
            assert (one["n"], one["value"]) == (len(scores), pytest.approx(np.mean(scores)))
            # A bootstrap has its own chance of about a point.
            assert [one["low"], one["high"]] == pytest.approx([low, high], abs=1e-5 if set(scores) <= {0, 1} else 0.01)
            halves[length].append((high - low) / 2)
    for length in LENGTHS:
        one = stored[None, length]
        assert one["value"] == pytest.approx(np.mean([each["score"] for each in answers if each["length"] == length]))
        half = math.sqrt(sum(each**2 for each in halves[length])) / len(halves[length])
        assert (one["high"] - one["low"]) / 2 == pytest.approx(half, abs=0.006)
    for task, label in [*((task, f"`{task}`") for task in tasks), (None, "mean of 13 tasks")]:
        wanted = [_cell(stored[task, length]) for length in LENGTHS]
        assert rows(text, label) in ([], [wanted]), task
    assert len(rows(text, "`niah_")) == 2
    assert rows(text, "mean of 13 tasks")


def _cell(one: dict[str, Any]) -> str:
    return f"{100 * one['value']:.0f}% ({100 * one['low']:.0f}–{100 * one['high']:.0f})"


def _graded(scores: Sequence[float]) -> tuple[float, float]:
    if set(scores) <= {0, 1}:
        found = stats.binomtest(int(sum(scores)), len(scores)).proportion_ci(0.95, "wilson")
        return found.low, found.high
    found = stats.bootstrap((scores,), np.mean, method="percentile", rng=0).confidence_interval
    return float(found.low), float(found.high)


def test_positions_without_training() -> None:
    text = page("docs/results/smollm2-evals.md")
    numbers = json.loads((RESULTS / "training-free" / "numbers.json").read_text())
    for one in numbers["results"]:
        expected = [f"{b['value']:.2f} ±{b['half']:.2f}" for b in one["buckets"][::4]]
        assert rows(text, f"`{one['position']['method']}`") == [expected]


def test_instruction_tuning() -> None:
    text = page("docs/results/smollm2-evals.md")
    summaries = [
        json.loads((RESULTS / "smollm2-sft" / model / "summary.json").read_text()) for model in ("base", "sft")
    ]
    for length, n in ((2 * K, 20), (4 * K, 20), (8 * K, 10)):
        cells = [
            next(c for c in one["cells"] if (c["suite"], c["length"], c["depth"]) == ("niah", length, None))
            for one in summaries
        ]
        assert [cell["n"] for cell in cells] == [n, n]
        expected = [wilson(cell["value"] * n, n) for cell in cells]
        assert rows(text, f"needle at {length // K}K (n = {n})")[0][:2] == expected
    assert f"sign test over all lengths p = {stats.binomtest(6, 6).pvalue:.2f}" in text


def test_needles_on_a_cpu_follow_from_share_and_n() -> None:
    found = table(f"{EVALS}/niah-cpu.csv")
    assert [row["length"] for row in found] == ["1K", "2K", "4K", "8K"]
    for row in found:
        share, n = float(row["value"].rstrip("%")), int(row["n"])
        assert f"{row['value']} ({row['interval']})" == wilson(n * share / 100, n)
        right = sum(int(cell.split("/")[0]) for name, cell in row.items() if name.startswith("depth"))
        assert right == n * share / 100


def test_short_tasks_move_by_less_than_two_independent_samples_show() -> None:
    text = page("docs/results/smollm2-evals.md")
    table = stats.contingency.chi2_contingency([[172, 228], [152, 248]], correction=False)
    assert "HellaSwag: 43.0% (38–48) and 38.0% (33–43)" in text
    assert f"two independent samples of 400 would give p = {table.pvalue:.2f}" in text


def test_smallest_p_of_ruler_s_own_draws_is_what_the_distances_give() -> None:
    """Each task: the smallest p over the greatest distances of tokens, places and counts."""
    tasks = table("parity/ruler.csv")
    small = 0
    for row in tasks:
        sizes = (("tokens_d", 20), ("places_d", int(row["places_n"])), ("counts_d", 20))
        smallest = min(_p_of_distance(float(row[name]), size) for name, size in sizes)
        assert smallest == pytest.approx(float(row["smallest_p"]), abs=0.035), row["task"]
        small += smallest < 0.05
    assert small == 1
    assert "Of 117 tests one has p < 0.05 (0.03)" in page("docs/results/parity.md")


def test_the_parity_page_sums_its_tables() -> None:
    text = page("docs/results/parity.md")
    ruler, helmet, others = (table(f"parity/{name}.csv") for name in ("ruler", "helmet", "lveval-infbench"))
    for row in ruler:
        assert row["prompts"] == row["prompts_equal"] == row["read_from_files"]
        assert row["answers"] == row["scores_equal"]
    assert rows(text, "RULER")[0][1:] == [str(len(ruler)), _sum(ruler, "prompts"), "0", _sum(ruler, "answers"), "0"]
    names = ("prompts", "differing_prompts", "mutated_answers", "differing_scores")
    assert rows(text, "HELMET")[0][1:] == [str(len(helmet)), *(_sum(helmet, name) for name in names)]
    for row in others:
        assert rows(text, row["benchmark"])[0][1:] == [row["sets"], *(_sum([row], name) for name in names)]
    assert f"{_sum(helmet, 'cut')} of the prompts are truncated" in text


def _sum(found: Sequence[dict[str, str]], name: str) -> str:
    return f"{sum(int(row[name]) for row in found if row[name].isdigit()):,}"


def _p_of_distance(distance: float, n: int) -> float:
    apart = round(distance * n)
    return float(stats.ks_2samp(np.arange(n), np.arange(n) + apart - 0.5, method="exact").pvalue)
