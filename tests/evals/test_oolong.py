"""OOLONG from files of the published formats: choice by length, scores of both kinds, errors."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import unspool
from unspool.core.errors import ConfigError, DataError
from unspool.evals.backends.mock import Oracle
from unspool.evals.run import score as score_run
from unspool.evals.suite import Ask, Question
from unspool.evals.suites.oolong import SUITE, OolongEval, score

from .suites import oracle
from .toy import cell_of

ANSWERS = {
    "NUMERIC": "[7]",
    "LABEL": "['spam']",
    "COMPARISON": "['more common than']",
    "USER": "['44106']",
    "DATE": "[datetime.date(2023, 8, 21)]",
    "MONTH_YEAR": "['June 2024']",
}


def synth(number: int, kind: str = "NUMERIC", *, lines: int = 10, **changes) -> dict:
    return {
        "id": number,
        "context_len": 1024,
        "dataset": "spam",
        "context_window_text": "Each line is a message.\n" + f"Date: Jun 01 || User: {number} || mita bela\n" * lines,
        "question": "How many messages are spam? Give your final answer in the form 'Answer: number'.",
        "task_group": ("counting", "user", "timeline")[number % 3],
        "task": "TASK_TYPE.NUMERIC_ONE_CLASS",
        "answer": ANSWERS[kind],
        "answer_type": f"ANSWER_TYPE.{kind}",
        "context_window_id": number,
        **changes,
    }


def real(answer: str, **changes) -> dict:
    return {
        "id": "r1",
        "context_window_id": "w1",
        "context_window_text": "[START OF EPISODE]\n" + "mita bela dora " * 40,
        "question": "How many rolls? Return the answer in \\boxed{}.",
        "question_type": "singledoc_rolls",
        "answer": answer,
        **changes,
    }


def write(path: Path, records: list[dict]) -> str:
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return str(path)


def asked(tmp_path, tokenizer, record: dict, mode: str = "fixed") -> Question:
    sources = SUITE.load(tokenizer, {"data": write(tmp_path / "data.jsonl", [record])})
    return SUITE.tasks["questions"].build(sources, Ask(length=8192, seed=0, index=0, mode=mode))


@pytest.mark.parametrize("mode", ["fixed", "reference"])
def test_synthetic_answers_are_scored_as_published(tmp_path, tokenizer, mode):
    def of(kind: str, output: str) -> float:
        return score(output, asked(tmp_path, tokenizer, synth(0, kind), mode))

    assert of("NUMERIC", "Answer: 7") == of("NUMERIC", "Answer: **[7]**") == of("NUMERIC", "7") == 1
    assert of("NUMERIC", "Answer: 9") == pytest.approx(0.75**2)
    assert of("NUMERIC", "Answer: many") == of("NUMERIC", "") == 0 if mode == "fixed" else True
    assert of("LABEL", "Label: spam") == 1 and of("LABEL", "Label: ham") == 0
    assert of("COMPARISON", "Answer: ham is more common than spam") == 1
    assert of("COMPARISON", "Answer: ham is less common than spam") == 0
    assert of("USER", "User: 44106") == 1 and of("USER", "User: 4410") == 0
    assert of("DATE", "Date: 2023-08-21") == of("DATE", "Date: August 21, 2023") == 1
    assert of("DATE", "Date: 2023-08-22") == of("DATE", "Date: soon") == 0
    assert of("MONTH_YEAR", "Answer: June 2024") == 1


def test_fixed_finds_an_answer_before_further_text_and_reference_does_not(tmp_path, tokenizer):
    output = "Label: Spam.\n\nNote: there were 9 of them"

    assert score(output, asked(tmp_path, tokenizer, synth(0, "LABEL"), "fixed")) == 1
    assert score(output, asked(tmp_path, tokenizer, synth(0, "LABEL"), "reference")) == 0


@pytest.mark.parametrize("mode", ["fixed", "reference"])
def test_real_answers_are_scored_as_published(tmp_path, tokenizer, mode):
    def of(answer: str, output: str) -> float:
        return score(output, asked(tmp_path, tokenizer, real(answer), mode))

    assert of("84", "so \\boxed{84}") == of("84", "\\boxed{\\text{84}}") == 1
    assert of("84", "\\boxed{86}") == pytest.approx(0.75**2)
    assert of("Vex", "\\boxed{vex}") == 1 and of("Vex", "\\boxed{Vax}") == 0
    assert of("Vex, Vax, Grog", "\\boxed{Vax, Grog, Keyleth}") == pytest.approx(2 / 3)
    assert of("84", "84") == (mode == "fixed"), "reference wants the box"


def test_questions_are_asked_at_the_length_that_they_fill(tmp_path, scoring, tokenizer):
    rows = [synth(number, list(ANSWERS)[number % 6], lines=(10, 30, 400)[number % 3]) for number in range(18)]
    path = write(tmp_path / "data.jsonl", rows)
    entry = {"suite": "oolong", "samples": 4, "paths": {"data": path}}
    config = OolongEval.model_validate({**entry, "lengths": [512, 1024]})
    summary = score_run(replace(scoring, evals=[config]), Oracle(tokenizer))
    samples = [json.loads(line) for line in (scoring.out_dir / "samples.jsonl").read_text().splitlines()]

    assert [cell_of(summary, "questions", length)["n"] for length in (512, 1024)] == [4, 4]
    assert cell_of(summary, None, 512)["value"] == cell_of(summary, None, 1024)["value"] == 1
    for sample in samples:
        assert sample["length"] // 2 - 64 - 8 < sample["prompt_tokens"] <= sample["length"] - 64
        assert sample["index"] % 3 == [512, 1024].index(sample["length"])
    assert cell_of(summary, "questions, user", 1024)["n"] == 4

    short = OolongEval.model_validate({**entry, "lengths": ["64K"]})
    with pytest.raises(
        ConfigError,
        match=r"oolong: none of the 18 questions needs 32769 to 65536 tokens, answer "
        r"included; the shortest needs \d+\. Remove length 64K",
    ):
        score_run(replace(scoring, evals=[short], out_dir=tmp_path / "none"), Oracle(tokenizer))


def test_an_oracle_is_right_in_both_kinds(tmp_path, tokenizer):
    for record in [*(synth(0, kind) for kind in ANSWERS), *map(real, ("84", "Vex", "Vex, Vax"))]:
        question = asked(tmp_path, tokenizer, record)
        assert score(oracle(question), question) == 1, record["answer"]
        stored = replace(question, meta=json.loads(json.dumps(question.meta)))
        assert score(oracle(question), stored) == 1, "lm-eval tasks keep it as JSON"


def test_answers_may_be_lists_and_a_null_type_is_oolong_real(tmp_path, tokenizer):
    assert score("Answer: 7", asked(tmp_path, tokenizer, synth(0, answer=[7]))) == 1
    assert score("Label: spam", asked(tmp_path, tokenizer, synth(0, "LABEL", answer=["spam"]))) == 1
    assert score("\\boxed{Vex, Vax}", asked(tmp_path, tokenizer, real(["Vex", "Vax"], answer_type=None))) == 1


def test_a_missing_file_says_where_it_comes_from_and_what_it_has():
    with pytest.raises(
        ConfigError,
        match=r"paths needs one entry, data: .+ fields context_window_text, question, "
        r"answer; use a file of oolongbench/oolong-synth",
    ):
        unspool.evaluate("asset:tiny-base", "oolong", [1024])


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"question": ""}, "no question"),
        ({"answer": "[7"}, r"answer '\[7' cannot be read"),
        ({"answer": "[]"}, "cannot be read"),
        ({"answer": "[datetime.date(2023, 13, 1)]"}, "cannot be read"),
    ],
)
def test_a_wrong_record_is_named(tmp_path, tokenizer, changes, problem):
    path = write(tmp_path / "data.jsonl", [synth(0), synth(1, **changes)])
    with pytest.raises(DataError, match=rf"data\.jsonl, record 2: .*{problem}.+Expected fields: context_window_text"):
        SUITE.load(tokenizer, {"data": path})
