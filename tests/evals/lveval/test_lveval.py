"""LV-Eval's suite on its generated stand-in and on files in its released shape."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.evals.suites import byte_tokenizer, num_tokens, oracle, prompts_digest
from transformers import PreTrainedTokenizerFast

from unspool.core.errors import ConfigError, DataError
from unspool.evals.suite import Ask
from unspool.evals.suites import lveval
from unspool.evals.suites.lveval import SUITE, Sources


def loaded(tokenizer: PreTrainedTokenizerFast, **paths: str) -> Sources:
    sources: Sources = SUITE.load(tokenizer, paths)
    return sources


@pytest.fixture(scope="module")
def sources(tokenizer: PreTrainedTokenizerFast) -> Sources:
    return loaded(tokenizer)


@pytest.mark.parametrize("length", [1024, 8192])
@pytest.mark.parametrize("name", list(SUITE.tasks))
def test_prompts_fill_the_length_and_an_oracle_gets_all_of_it(
    name: str, length: int, sources: Sources, tokenizer: PreTrainedTokenizerFast
):
    task = SUITE.tasks[name]
    asked = task.build(sources, Ask(length=length, seed=3, index=1))
    assert 0.99 * length <= num_tokens(tokenizer, task, asked) <= length
    assert (task.score(oracle(asked), asked), task.score("", asked)) == (1, 0)
    assert asked.meta["generated"]


def released(folder: Path, name: str, level: str, **changes: Any) -> None:
    article = " ".join(f"word{at}" for at in range(3000))
    row = {"input": "Who?", "context": article, "answers": ["Ada King", "nobody"], "answer_keywords": "Ada", **changes}
    (folder / f"{name}_{level}.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")


def test_the_level_that_fills_the_length_is_read(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    for level in ("16k", "64k"):
        released(tmp_path, "hotpotwikiqa_mixup", level, input=f"Who, at {level}?")
    sources = loaded(tokenizer, data=str(tmp_path), segmenter="characters")
    found = {length: sources.questions("hotpotwikiqa_mixup", length)[0].text for length in (1000, 16001, 999_999)}
    assert found == {1000: "Who, at 16k?", 16001: "Who, at 64k?", 999_999: "Who, at 64k?"}
    with pytest.raises(ConfigError, match=r"has no cmrc_mixup_<level>\.jsonl"):
        sources.questions("cmrc_mixup", 1000)


def test_the_middle_is_cut_and_the_instruction_stands_on_both_sides(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    released(tmp_path, "loogle_SD_mixup", "16k")
    task = SUITE.tasks["loogle_SD_mixup"]
    sources = loaded(tokenizer, data=str(tmp_path), segmenter="characters")
    asked = task.build(sources, Ask(length=2048, seed=0, index=0))
    assert "word0 word1 word2" in asked.context
    assert asked.context.endswith("word2999")
    assert "word1500 " not in asked.context
    assert 0.99 * 2048 <= num_tokens(tokenizer, task, asked) <= 2048
    assert "Only one of the passages matters for it." in asked.context
    assert "Only one of the passages matters for it." in asked.question
    cut = task.build(sources, Ask(length=2048, seed=0, index=0, mode="reference"))
    assert num_tokens(tokenizer, task, cut) - task.answer_tokens <= 2048 - 500


def test_only_the_first_reference_counts(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    released(tmp_path, "loogle_CR_mixup", "16k", answer_keywords=None)
    sources = loaded(tokenizer, data=str(tmp_path), segmenter="characters")
    asked = SUITE.tasks["loogle_CR_mixup"].build(sources, Ask(length=2048, seed=0, index=0))
    assert lveval.score("loogle_CR_mixup", "nobody", asked) == 0
    assert lveval.score("loogle_CR_mixup", "Ada King", asked) == 1


def test_blacklists_are_ours_or_read_from_lv_evals_file_without_running_it(tmp_path: Path):
    (tmp_path / "metrics.py").write_text(
        "raise SystemExit\nABANDON_WORDS_EN = ['and', 'to']\nABANDON_WORDS_ZH = ['的']\n"
    )
    (tmp_path / "zh.txt").write_text("甲\n乙\n", encoding="utf-8")
    (tmp_path / "other.py").write_text("x = 1\n")
    assert lveval.read_blacklists({})["en"] == (lveval.OWN_BLACKLISTS["en"], False)
    given = lveval.read_blacklists(
        {"blacklist": str(tmp_path / "metrics.py"), "blacklist_zh": str(tmp_path / "zh.txt")}
    )
    assert given == {"en": (frozenset({"and", "to"}), True), "zh": (frozenset("甲乙"), True)}
    for file, error in (("other.py", DataError), ("zh.txt", DataError), ("none.py", ConfigError)):
        with pytest.raises(error, match=r"LV-Eval's metrics\.py|cannot be read"):
            lveval.read_blacklists({"blacklist": str(tmp_path / file)})


def test_released_chinese_answers_want_jieba(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
):
    released(tmp_path, "cmrc_mixup", "16k")
    monkeypatch.setitem(sys.modules, "jieba", None)
    lveval.build_segmenter.cache_clear()
    with pytest.raises(ConfigError, match="pip install jieba"):
        loaded(tokenizer, data=str(tmp_path))
    assert loaded(tokenizer, data=str(tmp_path), segmenter="characters").segmenter == "characters"
    with pytest.raises(ConfigError, match="segmenter"):
        loaded(tokenizer, segmenter="letters")


def test_a_length_that_cannot_work_is_refused(sources: Sources):
    with pytest.raises(ConfigError, match="lveval cmrc_mixup: length 60 is too short"):
        SUITE.tasks["cmrc_mixup"].build(sources, Ask(length=60, seed=0, index=0))


def test_prompts_are_frozen():
    assert (SUITE.version, prompts_digest(SUITE, byte_tokenizer(), [4096])[:16]) == (1, "f671b57845f73f88")


def test_cutting_the_end_instead_of_the_middle_would_show(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
):
    released(tmp_path, "loogle_SD_mixup", "16k")
    monkeypatch.setattr(lveval, "_take_chars", lambda *_: 0)
    sources = loaded(tokenizer, data=str(tmp_path), segmenter="characters")
    asked = SUITE.tasks["loogle_SD_mixup"].build(sources, Ask(length=2048, seed=0, index=0))
    assert not asked.context.endswith("word2999")
