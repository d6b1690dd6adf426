"""LV-Eval's suite on its generated stand-in and on files in its released shape."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.evals.suites import byte_tokenizer, num_tokens, oracle, prompts_digest
from transformers import PreTrainedTokenizerFast

from unspool.core.errors import ConfigError, DataError
from unspool.evals import fill
from unspool.evals.config import eval_adapter
from unspool.evals.suite import Ask
from unspool.evals.suites import lveval
from unspool.evals.suites.lveval import PROMPTS, SUITE, Sources


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
    found = {
        length: sources.questions("hotpotwikiqa_mixup", length)[0].text for length in (1000, 16_384, 16_385, 999_999)
    }
    # 16K tokens are fewer than 16k words.
    assert found == {length: f"Who, at {'16k' if length <= 16_384 else '64k'}?" for length in found}
    with pytest.raises(ConfigError, match=r"has no cmrc_mixup_<level>\.jsonl"):
        sources.questions("cmrc_mixup", 1000)


def test_the_middle_is_cut_and_the_instruction_is_on_both_sides(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
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
    assert (SUITE.version, prompts_digest(SUITE, byte_tokenizer(), [4096])[:16]) == (2, "f671b57845f73f88")


def test_cutting_the_end_instead_of_the_middle_would_show(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
):
    released(tmp_path, "loogle_SD_mixup", "16k")
    monkeypatch.setattr(fill, "_take_chars", lambda *_: 0)
    sources = loaded(tokenizer, data=str(tmp_path), segmenter="characters")
    asked = SUITE.tasks["loogle_SD_mixup"].build(sources, Ask(length=2048, seed=0, index=0))
    assert not asked.context.endswith("word2999")


def test_the_preset_utk_is_the_protocol_of_untie_the_knots():
    config = eval_adapter().validate_python({"suite": "lveval", "preset": "utk"})

    assert config.tasks == [name for name in PROMPTS if "factrecall" not in name] and len(config.tasks) == 9
    assert (config.lengths, config.shots) == ([32 << 10, 128 << 10], 3)
    assert (config.target_length, config.reference_length) == (128 << 10, 32 << 10)
    other = eval_adapter().validate_python({"suite": "lveval", "preset": "utk", "lengths": ["32K", "64K", "128K"]})
    assert len(other.lengths) == 3 and other.shots == 3, "keys beside the preset override it"
    with pytest.raises(ValueError, match="preset 'utkk' is not known; known: utk"):
        eval_adapter().validate_python({"suite": "lveval", "preset": "utkk"})
    with pytest.raises(ValueError, match="the suite has none"):
        eval_adapter().validate_python({"suite": "nocha", "preset": "utk", "lengths": ["32K"]})


def test_the_presets_means_are_those_of_tables_2_and_8():
    """Qwen2-base (7B) at 128K: average, single-hop and multi-hop from the nine scores of Table 8."""
    table_8 = {"cmrc": 48.88, "dureader": 15.76, "hotpotwikiqa": 22.67, "lic": 15.36, "loogle_CR": 11.34}
    table_8 |= {"loogle_MIR": 8.68, "loogle_SD": 40.93, "multifieldqa_en": 26.22, "multifieldqa_zh": 25.60}
    config = eval_adapter().validate_python(
        {"suite": "lveval", "preset": "utk", "lengths": ["128K"], "reference_length": None}
    )
    samples = [
        {"suite": "lveval", "task": f"{name}_mixup", "length": 128 << 10, "depth": None, "score": score / 100}
        for name, score in table_8.items()
    ]
    cells = SUITE.cells(config, samples)
    means = {mean["name"]: mean for mean in SUITE.summary(config, cells, samples)["means"]}

    assert {name: round(100 * mean["value"], 2) for name, mean in means.items()} == {
        "mean": 23.94,
        "single_hop": 35.41,
        "multi_hop": 14.76,
    }
    assert (means["mean"]["tasks"], means["mean"]["of_tasks"]) == (9, 9)


@pytest.mark.parametrize("task", ["hotpotwikiqa_mixup", "cmrc_mixup"])
def test_three_solved_questions_come_first_without_their_articles(
    sources: Sources, tokenizer: PreTrainedTokenizerFast, task: str
):
    asks = [Ask(length=4096, seed=0, index=index, shots=3) for index in range(4)]
    made = [SUITE.tasks[task].build(sources, ask) for ask in asks]
    texts = {one.text: one.answers[0] for one in sources.questions(task, 4096)}
    seen = set()
    for ask, question in zip(asks, made, strict=True):
        plain = SUITE.tasks[task].build(sources, Ask(length=4096, seed=0, index=ask.index))
        shots = [text for text in texts if text in question.context]
        assert len(shots) == 3 and question.question == plain.question and question.references == plain.references
        assert all(f"{question.prefix} {texts[text]}\n\n" in question.context for text in shots)
        assert not any(text in question.question for text in shots), "the question itself is never among them"
        assert 0.98 * 4096 <= num_tokens(tokenizer, SUITE.tasks[task], question) <= 4096
        seen.add(tuple(shots))
    assert len(seen) > 1, "other solved questions for other questions"
