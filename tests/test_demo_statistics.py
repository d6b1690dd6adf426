"""What the pages say of the demo, computed again from its committed answers."""

import re

import numpy as np

from test_doc_statistics import RESULTS, K, half_width, losses, needles, page, paired, percent, rows, samples

DEMO = {arm: f"demo/run/{arm}.jsonl.gz" for arm in ("base", "abf", "utk", "utk-harpe")}
DEMO_SPANS = {"inside 256": (0, 256), "at 256–512": (256, 512), "at 512–1K": (512, K), "at 1K–2K": (K, 2 * K)}


def test_the_demo_finds_needles_in_one_wording_only():
    text = (RESULTS / "demo.md").read_text()
    assert "in the five others every model finds 0 of 100 at every length" in text
    lines = text.splitlines()
    table = {cells[0]: cells[1:] for cells in ([c.strip() for c in line.split("|")[1:-1]] for line in lines) if cells}
    for arm in ("base", "abf", "utk", "utk-harpe"):
        found = samples(f"demo/{arm}.jsonl.gz")
        drilled, others = ([one for one in found if (one["needle_wording"] == "magic") is own] for own in (True, False))
        for group, n in ((drilled, 20), (others, 100)):
            scores = [[one["score"] for one in group if one["length"] == length] for length in (256, K, 2 * K)]
            assert [len(found) for found in scores] == [n] * 3
            wanted = table[arm] if group is drilled else ["0"] * 3
            assert [f"{sum(found):.0f}" for found in scores] == wanted


def _with_half(path: str, span: tuple[int, int]) -> str:
    """As the report has it: the intervals of the positions in the span, averaged, so never too narrow."""
    buckets = next(one for one in samples(path) if one["suite"] == "perplexity")["losses"]
    parts = [(one["n"], (one["from"], one["to"])) for one in buckets if span[0] <= one["from"] and one["to"] <= span[1]]
    half = np.average(
        [half_width(list(losses(path, part).values())) for _, part in parts], weights=[n for n, _ in parts]
    )
    return f"{np.mean(list(losses(path, span).values())):.2f} ±{half:.2f}"


def test_the_demo_in_readme_first_run_and_on_its_page() -> None:
    text = page("docs/results/demo.md")
    for name, length in {"256": 256, "1K": K, "2K": 2 * K}.items():
        (cells,) = rows(text, f"needles at {name}, n = 40")
        assert cells == [percent(list(needles(path, length).values())) for path in DEMO.values()]
    for name, span in DEMO_SPANS.items():
        (cells,) = rows(text, f"loss {name}")
        assert cells == [_with_half(path, span) for path in DEMO.values()]

    recall = [percent(list(needles(path, 2 * K).values())) for path in DEMO.values()]
    beyond, inside = (
        [_with_half(path, DEMO_SPANS[name]) for path in DEMO.values()] for name in ("at 1K–2K", "inside 256")
    )
    for file in ("README.md", "docs/tutorials/first-run.md"):
        first, second = (
            line for line in page(file).splitlines() if line.startswith(("tiny: 256 → 2K", "Loss at 1K–2K"))
        )
        assert re.findall(r"\d+% \(\d+–\d+\)", first) == recall
        assert re.findall(r"\d\.\d\d ±\d\.\d\d", second) == [*beyond, *inside]


def test_what_the_demos_page_says_of_depths_and_pairs() -> None:
    text = page("docs/results/demo.md")
    found = [one for arm in DEMO for one in samples(DEMO[arm]) if (one["suite"], one["length"]) == ("niah", 2 * K)]
    right = [one["depth"] for one in found if one["score"] == 1]
    assert f"{right.count(0)} of the {len(right)} found are at the very start" in text
    assert sum(one["depth"] == 0 for one in found) - 8 == 24  # without the base model

    def differences(first: str, second: str, span: tuple[int, int]) -> np.ndarray:
        return paired(losses(DEMO[first], span), losses(DEMO[second], span))

    changes = [differences("base", arm, (0, 256)).mean() for arm in ("abf", "utk", "utk-harpe")]
    assert f"higher by {min(changes):.3f} to {max(changes):.3f} (paired)" in text
    fewer = -paired(needles(DEMO["abf"], 2 * K), needles(DEMO["utk"], 2 * K)).mean()
    assert f"{100 * fewer:.0f} points fewer needles at 2K" in text
    for sign, first, second, words in (
        (1, "abf", "utk", "higher by {}"),
        (-1, "utk", "utk-harpe", "{} lower than UtK"),
    ):
        values = sign * differences(first, second, (K, 2 * K))
        mean, half = values.mean(), half_width(values)
        assert words.format(f"{mean:.3f}") in text
        assert f"{mean - half:.3f} to {mean + half:.3f}" in text


def test_the_demos_page_gives_the_questions_that_did_not_choose_the_recipe() -> None:
    new = {arm: dict.fromkeys((K, 2 * K), 0.0) for arm in ("abf", "utk", "utk-harpe")}
    for arm, found in new.items():
        fresh = [one for one in samples(DEMO[arm]) if one["suite"] == "niah" and one["index"] >= 20]
        for length in found:
            scores = [one["score"] for one in fresh if one["length"] == length]
            assert len(scores) == 20
            found[length] = sum(scores)
    said = "; ".join(f"`{arm}` {found[K]:.0f} at 1K and {found[2 * K]:.0f} at 2K" for arm, found in new.items())
    assert said in page("docs/results/demo.md")
