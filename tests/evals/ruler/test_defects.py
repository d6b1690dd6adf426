"""RULER's known defects: `reference` mode has them, so that published numbers can be met; `fixed` mode has not."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from unspool.core.errors import ConfigError
from unspool.evals.suite import Ask, Question
from unspool.evals.suites.ruler import SUITE, fitting
from unspool.evals.suites.ruler.haystacks import NOISE, Sources

from .conftest import Build


def many(build: Build, task: str, mode: str, count: int, length: int = 4096) -> list[Question]:
    return [build(task, index=index, mode=mode, length=length) for index in range(count)]


@pytest.fixture(scope="module")
def squad(shipped_tokenizer: Any, squad_file: Path) -> Sources:
    loaded: Sources = SUITE.load(shipped_tokenizer, {"squad": str(squad_file)})
    return loaded


def qa(squad: Sources, mode: Any, count: int, length: int = 4096) -> list[Question]:
    asks = [Ask(length=length, seed=42, index=index, mode=mode) for index in range(count)]
    return [SUITE.tasks["qa_1"].build(squad, ask) for ask in asks]


def test_the_gold_paragraph_of_squad_has_one_depth_per_number_of_documents(squad: Sources) -> None:
    reference, fixed = qa(squad, "reference", 40), qa(squad, "fixed", 40)

    by_count: dict[int, set[float | None]] = {}
    for asked in reference:
        by_count.setdefault(asked.meta["documents"], set()).add(asked.depth)
    assert all(len(found) == 1 for found in by_count.values()), by_count
    assert len({asked.depth for asked in fixed}) >= 15
    halves = Counter(asked.depth is not None and asked.depth < 0.5 for asked in fixed)
    assert abs(halves[True] - halves[False]) <= 6


def test_gold_at_one_depth_would_be_noticed_in_fixed_mode_too(squad: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "grid_depth", lambda index: 0.7)

    assert len({asked.depth for asked in qa(squad, "fixed", 40)}) < 15


def test_reference_asks_in_file_order_fixed_from_the_whole_file(squad: Sources) -> None:
    def articles(mode: str) -> set[str]:
        return {asked.references[0].split("x")[0] for asked in qa(squad, mode, 16)}

    assert articles("reference") == {"valueP0", "valueP1"}
    assert len(articles("fixed")) > 8


def test_reference_asks_no_question_twice(squad: Sources) -> None:
    with pytest.raises(ConfigError, match="file's 240 questions"):
        SUITE.tasks["qa_1"].build(squad, Ask(length=4096, seed=42, index=240, mode="reference"))
    assert SUITE.tasks["qa_1"].build(squad, Ask(length=4096, seed=42, index=240)).references


def test_when_documents_run_out_reference_repeats_the_gold_one(squad: Sources) -> None:
    def golds(asked: Question) -> int:
        return asked.context.count(f"it is {asked.references[0]}.")

    assert max(map(golds, qa(squad, "reference", 3, 65536))) > 1
    assert [golds(asked) for asked in qa(squad, "fixed", 3, 65536)] == [1, 1, 1]


def test_distractors_come_from_the_same_article_first(squad: Sources) -> None:
    for mode in ("fixed", "reference"):
        for asked in qa(squad, mode, 4):
            article = asked.references[0].removeprefix("value").split("x")[0]
            assert asked.context.count(f"About {article}x") == 8


def test_common_words_have_the_same_positions_in_every_sample(build: Build) -> None:
    def places(asked: Question) -> tuple[int, ...]:
        listed = asked.context.rsplit("often.\n", 1)[1].split()[1::2]
        return tuple(at for at, word in enumerate(listed) if word in asked.references)

    reference = [(asked.meta["size"], places(asked)) for asked in many(build, "cwe", "reference", 6)]
    fixed = [places(asked) for asked in many(build, "cwe", "fixed", 6)]
    assert len(set(reference)) == len({size for size, _ in reference}) < 6
    assert len(set(fixed)) == 6


def test_coded_words_of_a_rank_have_the_same_positions_in_every_sample(build: Build) -> None:
    def places(asked: Question) -> tuple[int, ...]:
        words = asked.context.split("most often. ")[1].split()
        return tuple(at for at, word in enumerate(words) if word == asked.references[0])

    reference = [(asked.meta["size"], places(asked)) for asked in many(build, "fwe", "reference", 6)]
    assert len(set(reference)) == len({size for size, _ in reference}) < 6
    assert len({places(asked) for asked in many(build, "fwe", "fixed", 6)}) == 6


def test_reference_lengths_fall_short_by_whole_steps(build: Build, sources: Sources) -> None:
    def least(task: str, mode: str) -> int:
        return min(sources.count(asked.context) for asked in many(build, task, mode, 8))

    for task in ("fwe",):
        assert least(task, "fixed") > 1.01 * least(task, "reference")


def test_four_needles_have_one_order_in_every_sample(build: Build) -> None:
    def order(asked: Question) -> tuple[str, ...]:
        return tuple(sorted(asked.references, key=asked.context.index))

    def orders(mode: str) -> int:
        samples = many(build, "niah_multivalue", mode, 8)
        return len({tuple(asked.references.index(value) for value in order(asked)) for asked in samples})

    assert orders("reference") == 1
    assert orders("fixed") > 3


def test_essays_always_begin_at_the_beginning(build: Build) -> None:
    def openings(mode: str) -> int:
        return len({asked.context.split("\n", 1)[1][-40:] for asked in many(build, "niah_single_2", mode, 6)})

    assert openings("reference") < openings("fixed") == 6


def test_depth_is_left_to_chance_in_reference_and_spread_in_fixed(build: Build) -> None:
    def deciles(mode: str) -> set[int]:
        samples = many(build, "niah_single_1", mode, fitting.GRID, length=1024)
        return {min(9, int(10 * (asked.depth or 0))) for asked in samples}

    counts = Counter(fitting.grid_depth(index) for index in range(7, 7 + fitting.GRID))
    assert set(counts.values()) == {1}
    assert len(counts) == fitting.GRID
    assert deciles("fixed") == set(range(10))


def test_the_worked_example_of_tracing_has_one_layout(build: Build) -> None:
    def layouts(mode: str) -> int:
        samples = many(build, "vt", mode, 6)
        return len({tuple(line == NOISE for line in asked.meta["example"].split("\n")) for asked in samples})

    assert layouts("reference") == 1
    assert layouts("fixed") > 3


def test_a_prompt_of_tracing_ends_in_a_space_in_reference_only(build: Build) -> None:
    assert build("vt", mode="reference").prefix.endswith("namely: ")
    assert build("vt").prefix.endswith("namely:")


def test_rulers_index_is_a_place_in_the_text_and_not_unique(build: Build) -> None:
    """RULER resumes by the answer's character, which it writes as `index`. Ours are told apart by their number."""
    found = [asked.meta["answer_char"] for asked in many(build, "niah_single_1", "reference", 60, length=1024)]

    assert len(set(found)) < len(found)
    asked = build("niah_single_1", mode="reference")
    assert asked.context[asked.meta["answer_char"] :].startswith(asked.references[0])


def test_the_list_of_common_words_may_repeat_the_example_in_reference_only(build: Build) -> None:
    def shared(asked: Question) -> set[str]:
        example, listed = asked.context.split("often.\n")[1:]
        return set(example.split("\n")[0].split()[1::2]) & set(listed.split()[1::2])

    assert not any(shared(asked) for asked in many(build, "cwe", "fixed", 10, length=16384))
    assert any(shared(asked) for asked in many(build, "cwe", "reference", 10, length=16384))
