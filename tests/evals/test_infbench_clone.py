"""∞Bench from a clone of its repository; the clone here has its layout and none of its words."""

import json
from pathlib import Path

import pytest
from tests.evals.suites import byte_tokenizer

from unspool.core.errors import ConfigError
from unspool.evals.heldout import PlanInputs
from unspool.evals.suites.infbench import SUITE, InfbenchEval
from unspool.evals.task_suite import PlannedTasks


def plan(clone: Path, task: str = "passkey") -> PlannedTasks:
    config = InfbenchEval(suite="infbench", tasks=[task], lengths=[1024], reference=str(clone), mode="reference")
    return PlannedTasks(SUITE, config, PlanInputs(tokenizer=byte_tokenizer(), seed=0, root=Path()))


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    words = {"passkey": "Find it.\n{context}\n{input}\nThe key is", "kv_retrieval": "{context}{input}"}
    (tmp_path / "src/prompt.py").write_text(f"yarn_mistral_templates = {words!r}\n")
    (tmp_path / "data").mkdir()
    rows = [{"context": "x" * size, "input": f"{size}?", "answer": "71432"} for size in (9, 2000)]
    (tmp_path / "data/passkey.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_prompts_are_the_clones_and_lose_their_middle(clone: Path):
    planned = plan(clone)
    short, long = (planned._encode(question)[0] for question in planned.question_ids)
    assert (short.context, short.question, short.prefix) == ("Find it.\n" + "x" * 9, "\n9?\n", "The key is")
    text = long.context + long.question + long.prefix
    assert len(text) == 1024 - 6
    assert text == f"Find it.\n{'x' * (1018 - 26)}\n2000?\nThe key is"
    assert SUITE.tasks["passkey"].score(" 71432.", short) == 1


def test_missing_files_are_named(clone: Path):
    with pytest.raises(
        ConfigError, match=r"data/kv_retrieval\.jsonl is missing; run the clone's scripts/download_dataset"
    ):
        plan(clone, "kv_retrieval")
    with pytest.raises(ConfigError, match="has no prompt for number_string"):
        plan(clone, "number_string")
