"""Indirect needles: no shared words, answers against a solver that reads the prompt, length, depths, baselines."""

import re
from dataclasses import replace
from itertools import product

import pytest

from unspool.core.errors import ConfigError, DataError
from unspool.evals.backends.mock import Oracle
from unspool.evals.run import score as score_run
from unspool.evals.suite import Ask
from unspool.evals.suites import indirect_needle
from unspool.evals.suites.indirect_needle import FUNCTION_WORDS, HEAD, SUITE, IndirectNeedleEval, content_stems, score
from unspool.evals.suites.indirect_pairs import KINDS, Kind

from .suites import byte_tokenizer, num_tokens, oracle, prompts_digest
from .toy import cell_of


@pytest.fixture(scope="module")
def sources(tokenizer):
    return SUITE.load(tokenizer, {})


def solve(text: str) -> str:
    """Solve a prompt from its text alone: topic of the question, clue of the topic, name in the clue's sentence."""
    asked = re.search(r"\n\nQuestion: (.+?) Write only the name\.\nAnswer:$", text)
    assert asked is not None
    for kind in KINDS.values():
        for clue, topic in kind.pairs.items():
            if asked[1] not in [question.replace("{topic}", topic) for question in kind.questions]:
                continue
            forms = [
                re.escape(one).replace(r"\{name\}", "(NAME)").replace(r"\{clue\}", clue) for one in kind.statements
            ]
            found = re.findall("|".join(form.replace("NAME", "[A-Z][a-z]+") for form in forms), text)
            return max(found[0]) if len(found) == 1 else ""
    raise AssertionError(f"no kind has the question {asked[1]}")


def disagreements(sources, count: int, length: int) -> int:
    found = 0
    for index in range(count):
        task = list(SUITE.tasks.values())[index % len(SUITE.tasks)]
        asked = task.build(sources, Ask(length=length, seed=5, index=index // len(SUITE.tasks)))
        found += (solve(asked.context + asked.question + asked.prefix),) != asked.references
    return found


def shared_stems(kind: Kind) -> set[str]:
    """Stems that any statement shares with any question, over all clues and topics of the kind."""
    needles = [content_stems(one.format(name="", clue=clue)) for one, clue in product(kind.statements, kind.pairs)]
    questions = [content_stems(one.format(topic=topic)) for one, topic in product(kind.questions, kind.pairs.values())]
    return set().union(*needles) & set().union(*questions)


def test_no_needle_shares_a_content_word_with_a_question():
    assert {name: shared_stems(kind) for name, kind in KINDS.items()} == {name: set() for name in KINDS}


def test_a_shared_word_is_noticed_also_in_another_form():
    kind = KINDS["places"]

    assert shared_stems(replace(kind, questions=("Who jogged in {topic}?",))) == {"jog"}
    assert shared_stems(replace(kind, pairs={"the Tower of London": "London"})) == {"london"}
    assert not FUNCTION_WORDS & {"live", "home", "work", "city"}


def test_no_content_word_of_the_question_occurs_anywhere_in_the_context(sources):
    for index, task in enumerate(SUITE.tasks.values()):
        for at in range(6):
            asked = task.build(sources, Ask(length=8192, seed=index, index=at))
            context = content_stems(asked.context.removeprefix(HEAD))
            assert content_stems(asked.meta["question"]) & context == set(), asked.meta["question"]


def test_there_are_many_pairs_and_wordings_and_a_topic_is_unique_in_its_kind():
    assert sum(len(kind.pairs) for kind in KINDS.values()) >= 60
    for kind in KINDS.values():
        assert len(kind.statements) >= 3 and len(kind.questions) >= 3 and len(kind.pairs) > indirect_needle.OTHERS
        assert len(set(kind.pairs.values())) == len(kind.pairs)


def test_a_solver_that_reads_the_prompt_finds_the_same_answers(sources):
    assert disagreements(sources, 60, 1024) == 0


@pytest.mark.slow
def test_a_solver_that_reads_the_prompt_finds_the_same_1000_answers(sources):
    assert disagreements(sources, 1000, 2048) == 0


def test_a_needle_of_the_wrong_person_is_noticed(sources, monkeypatch):
    original = indirect_needle.Design.of

    def wrong(kind, *rest):
        design = original(kind, *rest)
        return replace(design, clue=next(clue for clue in kind.pairs if clue != design.clue))

    monkeypatch.setattr(indirect_needle.Design, "of", wrong)
    assert disagreements(sources, 15, 1024) > 0


@pytest.mark.parametrize("length", [1024, 8192, 65536])
def test_prompts_fill_the_length_and_an_oracle_gets_all_of_it(sources, tokenizer, length):
    for task in SUITE.tasks.values():
        for index in range(2):
            asked = task.build(sources, Ask(length=length, seed=1, index=index))
            assert 0.98 * length <= num_tokens(tokenizer, task, asked) <= length
            assert (task.score(oracle(asked), asked), task.score("", asked)) == (1, 0)


def test_depths_are_spread_and_recorded_where_the_needle_stands(sources):
    found = [SUITE.tasks["work"].build(sources, Ask(length=4096, seed=2, index=index)) for index in range(8)]

    assert sorted(int(8 * asked.depth) for asked in found) == list(range(8))
    for asked in found:
        place = asked.context.index(asked.references[0]) / len(asked.context)
        assert place == pytest.approx(asked.depth, abs=0.05)


def test_all_pairs_and_wordings_come_up(sources):
    kind = KINDS["sports"]
    designs = [indirect_needle.Design.of(kind, 0, "sports", index) for index in range(9 * len(kind.pairs))]

    assert {one.clue for one in designs[: len(kind.pairs)]} == set(kind.pairs)
    combinations = {(one.clue, one.statement, one.question) for one in designs}
    assert len(combinations) == 9 * len(kind.pairs), "every pair in every wording"


def test_names_are_invented_and_only_the_first_name_of_an_answer_counts(sources):
    asked = SUITE.tasks["music"].build(sources, Ask(length=2048, seed=0, index=0))
    right, wrong = asked.references[0], next(one for one in asked.meta["people"] if one != asked.references[0])

    assert asked.context.count(right) == 1
    assert score(f" It is {right}, not {wrong}.", asked) == 1
    assert score(f" {wrong} or {right}", asked) == score(f" {right}x", asked) == score("", asked) == 0


def test_trivial_baselines_stand_beside_the_scores(scoring, tokenizer):
    config = IndirectNeedleEval.model_validate({"suite": "indirect_needle", "lengths": [1024], "samples": 30})
    summary = score_run(replace(scoring, evals=[config]), Oracle(tokenizer))
    mean = cell_of(summary, None, 1024)

    assert mean["value"] == 1 and mean["n"] == 150
    for value in mean["baselines"].values():
        assert 0.05 < value < 0.3, "one of six people, so about 17%"


def test_prose_of_the_user_is_used_and_what_cannot_work_is_refused(tokenizer, tmp_path):
    file = tmp_path / "prose.txt"
    file.write_text("The gray heron waited. Nobody lives here. A cold wind rose. " * 20)
    sources = SUITE.load(tokenizer, {"haystack": str(file)})
    asked = [SUITE.tasks["places"].build(sources, Ask(length=512, seed=0, index=at)) for at in range(9)]
    assert all("heron" in one.context for one in asked)
    assert {"Who lives" in one.question for one in asked if "Nobody lives" not in one.context} >= {True}

    file.write_text("They live in the home of a resident. " * 9)
    with pytest.raises(DataError, match="every sentence of the haystack has a word of a question"):
        sources = SUITE.load(tokenizer, {"haystack": str(file)})
        SUITE.tasks["places"].build(sources, Ask(length=512, seed=0, index=0))
    with pytest.raises(ConfigError, match="path of indirect_needle"):
        SUITE.load(tokenizer, {"nonsense": "x"})
    with pytest.raises(ConfigError, match="length 64 is too short"):
        SUITE.tasks["work"].build(SUITE.load(tokenizer, {}), Ask(length=64, seed=0, index=0))


def test_prompts_are_frozen():
    assert prompts_digest(SUITE, byte_tokenizer(), [4096])[:16] == "aaca3d0aae332ba3"
