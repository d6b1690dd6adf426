"""∞Bench's key tasks and claims in pairs: length, oracle, scores, pairs, files."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from tests.evals.suites import byte_tokenizer, english_tokenizer, num_tokens, oracle, prompts_digest
from transformers import PreTrainedTokenizerFast

from unspool.core.errors import ConfigError, DataError
from unspool.evals.scoring.ranking import pair_accuracy
from unspool.evals.suite import Ask, Question
from unspool.evals.suites import infbench, nocha
from unspool.evals.suites.infbench import score_kv, score_number
from unspool.evals.task_suite import TaskSuite

SUITES = {"infbench": infbench.SUITE, "nocha": nocha.SUITE}


@pytest.fixture(scope="module")
def english() -> PreTrainedTokenizerFast:
    return english_tokenizer()


@pytest.mark.parametrize("length", [1024, 8192, 65536])
@pytest.mark.parametrize("suite", SUITES.values(), ids=list(SUITES))
def test_prompts_fill_the_length_and_an_oracle_gets_all_of_it(
    suite: TaskSuite, length: int, english: PreTrainedTokenizerFast
):
    sources = suite.load(english, {})
    for task in suite.tasks.values():
        for index in range(3):
            asked = task.build(sources, Ask(length=length, seed=3, index=index))
            assert 0.99 * length <= num_tokens(english, task, asked) <= length
            assert (task.score(oracle(asked), asked), task.score("", asked)) == (1, 0)


def test_depths_are_spread(english: PreTrainedTokenizerFast):
    sources = infbench.SUITE.load(english, {})
    task = infbench.SUITE.tasks["passkey"]
    found = [task.build(sources, Ask(length=2048, seed=0, index=index)) for index in range(8)]
    depths = sorted(asked.depth or 0 for asked in found)
    assert all(after - before == pytest.approx(1 / 8) for before, after in pairwise(depths))
    for asked in found:
        place = asked.context.index("The pass key is") / len(asked.context)
        assert place == pytest.approx(asked.depth, abs=0.08)


def test_numbers_and_values_count_whole():
    def asked(reference: str, mode: str = "fixed") -> Question:
        return Question(context="", question="", references=(reference,), meta={"mode": mode})

    assert score_number(" 12345.", asked(" 12345")) == 1
    assert score_number(" 123456", asked(" 12345")) == score_number("no", asked(" 12345")) == 0
    assert score_kv("it is ab-12!", asked(" ab-12")) == 1
    assert score_kv("ab-123", asked(" ab-12")) == 0
    assert score_kv("(ab-12)", asked(" ab-12")) == 1
    assert score_kv("(ab-12)", asked(" ab-12", "reference")) == 0
    assert score_kv("{ab-12}", asked(" ab-12", "reference")) == 1


def test_each_pair_is_asked_in_both_forms(english: PreTrainedTokenizerFast):
    task, sources = nocha.SUITE.tasks["claims"], nocha.SUITE.load(english, {})
    found = [task.build(sources, Ask(length=1024, seed=0, index=index)) for index in range(12)]
    for one, other in zip(found[::2], found[1::2], strict=True):
        assert one.meta["pair"] == other.meta["pair"]
        assert {one.references, other.references} == {(" true",), (" false",)}
        assert one.context == other.context  # read once
    assert len({asked.references for asked in found[::2]}) == 2, "the true claim always came first"
    always = pair_accuracy((asked.meta["pair"], task.score(" true", asked)) for asked in found)
    assert (always.value, always.n) == (0, 6)


def test_the_users_own_pairs_are_read(tmp_path: Path, english: PreTrainedTokenizerFast):
    (tmp_path / "book.txt").write_text("word " * 3000)
    rows = [{"true": "yes", "false": "no", "text_path": "book.txt"}, {"true": "a", "false": "b", "text": "short"}]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task, sources = nocha.SUITE.tasks["claims"], nocha.SUITE.load(english, {"pairs": str(path)})
    long, short = (task.build(sources, Ask(length=1024, seed=0, index=index)) for index in (0, 2))
    assert (long.meta["cut"], short.meta["cut"]) == (True, False)
    assert task.size is not None
    assert task.size(sources) == 4
    path.write_text(json.dumps({"true": "a", "false": "b", "text_path": "none.txt"}))
    with pytest.raises(DataError, match="record 1: text_path cannot be read"):
        nocha.SUITE.load(english, {"pairs": str(path)})


def test_what_cannot_work_is_refused(english: PreTrainedTokenizerFast):
    for suite in SUITES.values():
        with pytest.raises(ConfigError):
            suite.load(english, {"nonsense": "x"})
        sources = suite.load(english, {})
        for task in suite.tasks.values():
            with pytest.raises(ConfigError, match="length 20 is too short"):
                task.build(sources, Ask(length=20, seed=0, index=0))


def test_prompts_are_frozen():
    found = {name: prompts_digest(suite, byte_tokenizer(), [4096])[:16] for name, suite in SUITES.items()}
    assert found == {"infbench": "b47014080c29f409", "nocha": "2fc2ce22ff2cb72b"}
