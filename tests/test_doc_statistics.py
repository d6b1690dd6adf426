"""Every interval and test that README and the results pages quote, computed again with `scipy.stats`.

From the answers and losses committed beside a page; where none are (runs on a CPU, the demo), intervals of right and
wrong answers follow from the share and n.
"""

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
STUDY, BUNDLED, EVALS = "smollm2-32k/study", "smollm2-32k", "smollm2-evals"
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


def bundled(arm: str) -> str:
    return f"{BUNDLED}/{arm}/samples.jsonl"


def needles(path: str, *lengths: int) -> ByPrompt:
    chosen = [one for one in samples(path) if one["suite"] == "niah" and one["length"] in lengths]
    return {one["hash"]: one["score"] for one in chosen}


def losses(path: str, *spans: tuple[int, int]) -> ByPrompt:
    """Mean over spans of the loss in each, by window."""
    return {
        one["hash"]: float(np.mean([_loss(one["losses"], *span) for span in spans]))
        for one in samples(path)
        if one["suite"] == "loss"
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
def test_needles_and_losses_of_the_study(label: str) -> None:
    found = rows(PAGE, label)
    path = study(ARMS[label])
    assert found[0] == [percent(list(needles(path, length).values())) for length in LENGTHS]
    by_position = next(cells for cells in found if len(cells) == len(SPANS))
    assert by_position == [f"{np.mean(list(losses(path, span).values())):.3f}" for span in SPANS.values()]


@pytest.mark.parametrize("label", SEED_1)
def test_needles_of_the_study_with_the_other_seed(label: str) -> None:
    path = study(SEED_1[label])
    assert rows(PAGE, label)[1] == [percent(list(needles(path, length).values())) for length in LENGTHS]


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


def test_what_the_study_says_of_two_seeds_and_of_single_lengths() -> None:
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
    assert f"Over two seeds as the units that is p = {floored:.2f}" in PAGE
    assert f"({plain:.2f} without it" in PAGE
    at_8k = [paired(needles(study(f"abf-s{seed}"), 8 * K), needles(study(f"utk-s{seed}"), 8 * K)) for seed in (0, 1)]
    both = np.concatenate(at_8k)
    assert ((both > 0).sum(), (both < 0).sum()) == (15, 1)
    p = sign_test(both)
    assert f"15 needles gained, 1 lost, p = {p:.4f} uncorrected, {7 * p:.3f} by Holm's method" in PAGE
    cip2 = paired(needles(study("utk-s0"), 16 * K, 32 * K), needles(study("cip2-s0"), 16 * K, 32 * K))
    assert ((cip2 > 0).sum(), (cip2 < 0).sum()) == (13, 8)
    assert f"sign test p = {sign_test(cip2):.2f}" in PAGE


def test_readmes_measured_result_is_that_of_both_seeds() -> None:
    readme = page("README.md")
    runs = [("base", "base-s1"), ("abf-s0", "abf-s1"), ("utk-s0", "utk-s1")]
    for length in (16 * K, 32 * K):
        both = [[*needles(study(a), length).values(), *needles(study(b), length).values()] for a, b in runs]
        assert rows(readme, f"needle found at {length // K}K (n = 80)") == [[percent(scores) for scores in both]]
    for span in ("16K–32K", "4K–8K"):
        both = [[*losses(study(a), SPANS[span]).values(), *losses(study(b), SPANS[span]).values()] for a, b in runs]
        assert rows(readme, f"loss at {span}") == [[f"{np.mean(one):.2f} ±{half_width(one):.2f}" for one in both]]


def test_the_bundled_recipes_needles_and_losses() -> None:
    for length in LENGTHS:
        cells = [percent(list(needles(bundled(arm), length).values())) for arm in ("base", "abf", "utk")]
        assert rows(PAGE, f"needle at {length // K}K") == [cells]
    for name, span in list(SPANS.items())[1:]:
        windows = [list(losses(bundled(arm), span).values()) for arm in ("base", "abf", "utk")]
        assert rows(PAGE, f"loss {name}") == [[f"{np.mean(one):.2f} ±{half_width(one):.2f}" for one in windows]]
    at_32k = paired(needles(bundled("abf"), 32 * K), needles(bundled("utk"), 32 * K))
    assert f"an exact sign test on 4 to 0 gives p = {sign_test(at_32k):.3f}" in PAGE
    for name, text in (("16K–32K", "lower by {} at 16K–32K"), ("1K–2K", "by {} at 1K–2K")):
        difference = paired(losses(bundled("utk"), SPANS[name]), losses(bundled("abf"), SPANS[name]))
        assert text.format(f"{difference.mean():.3f} ±{half_width(difference):.3f}") in PAGE


def test_the_bundled_recipe_with_more_tokens() -> None:
    path = bundled("abf-15m")
    windows = [list(losses(path, span).values()) for span in list(SPANS.values())[1:]]
    assert rows(PAGE, "loss after") == [[f"{np.mean(one):.2f} ±{half_width(one):.2f}" for one in windows]]
    found = [list(needles(path, length).values()) for length in LENGTHS]
    assert [cell.split(",")[0] for cell in rows(PAGE, "needles after")[0]] == [percent(scores) for scores in found]


def test_needles_and_ruler_on_one_gpu() -> None:
    text = page("docs/results/smollm2-evals.md")
    for length in LENGTHS:
        cells = rows(text, f"{length // K}K |")[0]
        for at, model in ((0, "base"), (6, "utk")):
            path = f"{EVALS}/niah-h200-{model}.jsonl.gz"
            assert cells[at] == percent(list(needles(path, length).values()))
    answers = samples(f"{EVALS}/ruler-h200-samples.jsonl.gz")
    halves: dict[int, list[float]] = {length: [] for length in LENGTHS}
    for task in dict.fromkeys(one["task"] for one in answers):
        for cell, length in zip(rows(text, f"`{task}`")[0], LENGTHS, strict=True):
            scores = [one["score"] for one in answers if one["task"] == task and one["length"] == length]
            low, high = _graded(scores)
            share, *bounds = [float(number) for number in re.findall(r"\d+", cell)]
            assert share == pytest.approx(100 * np.mean(scores), abs=0.51)
            # A bootstrap has its own chance of about a point.
            assert bounds == pytest.approx([100 * low, 100 * high], abs=0.51 if set(scores) <= {0, 1} else 1.5), cell
            halves[length].append((high - low) / 2)
    for cell, length in zip(rows(text, "mean of 13 tasks")[0], LENGTHS, strict=True):
        mean = 100 * np.mean([one["score"] for one in answers if one["length"] == length])
        half = 100 * math.sqrt(sum(one**2 for one in halves[length])) / len(halves[length])
        share, low, high = (float(number) for number in re.findall(r"\d+", cell)[:3])
        assert share == pytest.approx(mean, abs=0.51)
        assert (high - low) / 2 == pytest.approx(half, abs=1.1)


def _graded(scores: Sequence[float]) -> tuple[float, float]:
    if set(scores) <= {0, 1}:
        found = stats.binomtest(int(sum(scores)), len(scores)).proportion_ci(0.95, "wilson")
        return found.low, found.high
    found = stats.bootstrap((scores,), np.mean, method="percentile", rng=0).confidence_interval
    return float(found.low), float(found.high)


def test_positions_without_training() -> None:
    text = page("docs/results/training-free.md")
    numbers = json.loads((RESULTS / "training-free" / "numbers.json").read_text())
    for one in numbers["results"]:
        expected = [f"{b['value']:.2f} ±{b['half']:.2f} ({math.exp(b['value']):.0f})" for b in one["buckets"]]
        assert rows(text, f"`{one['position']['method']}`") == [expected]


def test_instruction_tuning() -> None:
    text = page("docs/results/smollm2-sft.md")
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


@pytest.mark.parametrize(
    ("document", "label", "n"),
    [
        ("README.md", "needle at", 20),
        ("README.md", "value of a key at", 20),
    ],
)
def test_intervals_without_committed_answers_follow_from_share_and_n(document: str, label: str, n: int) -> None:
    cells = [cell for row in rows(page(document), label) for cell in row]
    assert cells
    for cell in cells:
        assert cell == wilson(n * float(cell.split("%")[0]) / 100, n)


def test_needles_on_a_cpu_follow_from_share_and_n() -> None:
    for length in ("1K", "2K", "4K", "8K"):
        cells = next(row for row in rows(page("docs/results/smollm2-evals.md"), f"{length} |") if len(row) == 8)
        share, n = float(cells[0].rstrip("%")), int(cells[2])
        assert f"{cells[0]} ({cells[1]})" == wilson(n * share / 100, n)


def test_short_tasks_move_by_less_than_two_independent_samples_show() -> None:
    text = page("docs/results/smollm2-evals.md")
    table = stats.contingency.chi2_contingency([[172, 228], [152, 248]], correction=False)
    assert rows(text, "HellaSwag")[0][1:3] == ["43.0% (38–48)", "38.0% (33–43)"]
    assert f"two independent samples of 400 would give p = {table.pvalue:.2f}" in text


def test_smallest_p_of_ruler_s_own_draws_is_what_the_distances_give() -> None:
    """Each row of the parity page: the smallest p over the greatest distances of tokens, places and counts."""
    tasks = [line.split("|")[1:-1] for line in page("docs/results/parity.md").splitlines() if "1,500 of 1,500" in line]
    assert len(tasks) == 13
    small = 0
    for cells in tasks:
        tokens, places, counts, smallest = (cell.strip() for cell in cells[-4:])
        at, n = float(places.split()[0]), int(places.split()[1].strip("()"))
        found = [_p_of_distance(apart, size) for apart, size in ((float(tokens), 20), (at, n), (float(counts), 20))]
        assert min(found) == pytest.approx(float(smallest), abs=0.035), cells[0]
        small += min(found) < 0.05
    assert small == 1
    assert "Of 117 tests one has p < 0.05 (0.03), where six are expected" in page("docs/results/parity.md")


def _p_of_distance(distance: float, n: int) -> float:
    apart = round(distance * n)
    return float(stats.ks_2samp(np.arange(n), np.arange(n) + apart - 0.5, method="exact").pvalue)
