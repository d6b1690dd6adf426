"""LV-Eval from a clone of its repository; the clone here has its layout and none of its words."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.evals.suites import byte_tokenizer

from unspool.core.errors import ConfigError
from unspool.evals.heldout import PlanInputs
from unspool.evals.suites.lveval import SUITE, LvEval
from unspool.evals.task_suite import PlannedTasks

LENGTH, TASK = 16_384, "loogle_SD_mixup"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    prompts = {name: f"{name}: read {{context}} and {{input}}\nThen:" for name in SUITE.tasks}
    (tmp_path / "config.py").write_text(f"from metrics import no\nDATASET_PROMPT = {prompts!r}\n")
    (tmp_path / "metrics.py").write_text("ABANDON_WORDS_EN = ['of']\nABANDON_WORDS_ZH = ['的']\n")
    rows = [
        {"input": f"who {at}?", "context": "ab " * size, "answers": ["Ada of X"], "answer_keywords": "of"}
        for at, size in enumerate((10, 6000, 20))
    ]
    (tmp_path / f"{TASK}_16k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def plan(clone: Path, length: int = LENGTH, **settings: Any) -> PlannedTasks:
    paths = {"data": str(clone), "segmenter": "characters"}
    entry = {"suite": "lveval", "tasks": [TASK], "lengths": [length], "reference": str(clone), "paths": paths}
    config = LvEval.model_validate(entry | settings)
    return PlannedTasks(SUITE, config, PlanInputs(tokenizer=byte_tokenizer(), seed=0, root=Path()))


def test_prompts_are_the_clones_in_the_order_of_the_file_and_lose_their_middle(clone: Path):
    planned = plan(clone)
    asked = [planned._encode(question)[0] for question in planned.question_ids]
    texts = [one.context + one.question + one.prefix for one in asked]
    whole = [f"{TASK}: read {'ab ' * size} and who {at}?\nThen:" for at, size in enumerate((10, 6000, 20))]
    half = (LENGTH - 500) // 2
    assert texts == [whole[0], whole[1][:half] + whole[1][-half:], whole[2]]
    assert [one.prefix for one in asked] == ["Then:"] * 3
    assert asked[0].meta["blacklist"] == ["of"]
    # The only keyword is blacklisted, so LV-Eval's gate stays shut.
    assert SUITE.tasks[TASK].score("Ada of X", asked[0]) == 0


def test_the_result_says_what_is_not_lv_evals(clone: Path):
    def differs(**settings: Any) -> tuple[str, ...]:
        reference = plan(clone, **settings).reference
        assert reference is not None
        return reference.differs

    assert differs() == ("config.py", "metrics.py", "segmenter: characters")
    assert differs(shots=2)[2:] == ("shots: 2",)


def test_a_length_without_a_level_and_a_missing_file_are_refused(clone: Path):
    with pytest.raises(ConfigError, match="LV-Eval has no level of 8K; use 16K, 32K, 64K, 128K, 256K"):
        plan(clone, length=8192)
    with pytest.raises(ConfigError, match=r"loogle_SD_mixup_32k\.jsonl is missing"):
        plan(clone, length=32_768)
    with pytest.raises(ConfigError, match="set the folder as data under `paths`"):
        plan(clone, paths={"segmenter": "characters"})
