"""Questions longer than the model's context: announced, marked, and asked, skipped or cut as the user says."""

import json
import logging
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from unspool.cli.main import build_app
from unspool.core.errors import ConfigError
from unspool.evals.backends import mock
from unspool.evals.backends.base import ContextLimit
from unspool.evals.backends.mock import Oracle
from unspool.evals.config import eval_adapter
from unspool.evals.run import score

from .toy import entry, lines

LIMIT = ContextLimit(300, "max_position_embeddings of its config")
NIAH = {"suite": "niah", "lengths": [256, 512], "samples": 5, "value": "words"}


class Counting(Oracle):
    """An oracle that remembers the tokens of its prompts, answers included."""

    def __init__(self, tokenizer, limit=LIMIT, kind="oracle"):
        super().__init__(tokenizer, limit)
        self.kind, self.tokens = kind, []

    def answer(self, prompt, question):
        self.tokens.append(len(prompt.context_ids) + len(question.ids) + prompt.answer_tokens)
        return super().answer(prompt, question)


def niah(**options):
    return eval_adapter().validate_python({**NIAH, **options})


@pytest.mark.usefixtures("toy_suite")
def test_they_are_announced_before_the_first_prompt_and_marked(scoring, tokenizer, caplog):
    backend = Counting(tokenizer)
    said_before = []
    first = backend.answer
    backend.answer = lambda *asked: said_before.append("300 tokens" in caplog.text) or first(*asked)

    with caplog.at_level(logging.WARNING):
        summary = score(replace(scoring, evals=[entry(tasks=["lone"]), niah()]), backend)

    assert said_before and all(said_before)
    assert (
        "17 of 34 questions are longer than the model's context of 300 tokens (max_position_embeddings of its config), "
        "at lengths 512. They are run anyway"
    ) in caplog.text
    marked = {(cell["suite"], cell["length"], cell.get("beyond_context")) for cell in summary["cells"]}
    assert marked == {("ruler", 256, None), ("ruler", 512, "ask"), ("niah", 256, None), ("niah", 512, "ask")}
    assert summary["beyond_context"]["context"] == 300
    assert max(backend.tokens) > 300


@pytest.mark.usefixtures("toy_suite")
def test_skipped_questions_have_no_score(scoring, tokenizer, caplog):
    backend = Counting(tokenizer)
    evals = [entry(tasks=["lone"], beyond_context="skip"), niah(beyond_context="skip")]

    with caplog.at_level(logging.WARNING):
        summary = score(replace(scoring, evals=evals), backend)

    assert "17 of 34 questions" in caplog.text and "They are skipped" in caplog.text
    assert max(backend.tokens) <= 300
    beyond = [cell for cell in summary["cells"] if cell["length"] == 512]
    assert beyond and all(cell["value"] is None and cell["n"] == 0 for cell in beyond)
    assert {cell["beyond_context"] for cell in beyond} == {"skip"}
    assert {sample["length"] for sample in lines(scoring.out_dir / "samples.jsonl")} == {256}


@pytest.mark.usefixtures("toy_suite")
def test_truncated_prompts_lose_the_middle_of_their_text_and_say_so(scoring, tokenizer):
    backend = Counting(tokenizer)
    evals = [entry(tasks=["lone"], beyond_context="truncate"), niah(beyond_context="truncate")]

    summary = score(replace(scoring, evals=evals), backend)

    assert max(backend.tokens) <= 300
    samples = lines(scoring.out_dir / "samples.jsonl")
    assert {sample["length"]: "cut_tokens" in sample for sample in samples} == {256: False, 512: True}
    [ruler] = [
        sample for sample in samples if (sample["suite"], sample["length"], sample["index"]) == ("ruler", 512, 0)
    ]
    assert "The number of 0 is 1000" in ruler["prompt"]["start"]
    assert ruler["prompt"]["end"].endswith("What is the number of 0? It is")
    [suite] = summary["suites"]
    assert suite["effective_length"] == 256  # the prompts at 512 had no 512 tokens


def test_a_server_gets_no_prompt_that_it_would_refuse(scoring, tokenizer):
    backend = Counting(tokenizer, ContextLimit(300, "as the server lists it"), kind="openai")

    score(replace(scoring, evals=[niah()]), backend)

    assert max(backend.tokens) <= 300


def test_a_window_of_text_is_marked_by_position_and_cut_at_its_end(scoring, tokenizer, tmp_path, documents):
    (tmp_path / "held.txt").write_text(documents[0])
    config = {"suite": "perplexity", "length": 512, "samples": 2, "text": "held.txt"}
    asked = score(replace(scoring, evals=[eval_adapter().validate_python(config)]), Counting(tokenizer))
    config["beyond_context"] = "truncate"
    cut = score(replace(scoring, evals=[eval_adapter().validate_python(config)]), Counting(tokenizer))

    assert [(cell["to"], cell.get("beyond_context")) for cell in asked["cells"]] == [
        (64, None),
        (128, None),
        (256, None),
        (512, "ask"),
    ]
    assert sum(cell["n"] for cell in cut["cells"]) == 2 * 299


def test_skipping_every_question_is_refused(scoring, tokenizer):
    evals = [niah(lengths=[512], beyond_context="skip")]
    with pytest.raises(ConfigError, match=r"every question is longer than .* context of 300 tokens .* skipped"):
        score(replace(scoring, evals=evals), Counting(tokenizer))


def test_a_model_within_its_context_has_the_results_it_had(scoring, tokenizer, caplog):
    with caplog.at_level(logging.WARNING):
        known = score(replace(scoring, evals=[niah(lengths=[256], beyond_context="skip")]), Counting(tokenizer))
    manifest = json.loads((scoring.out_dir / "manifest.json").read_text())

    assert not caplog.text and "beyond_context" not in known
    assert "beyond_context" not in manifest["settings"]["evals"][0] and "context" not in manifest["settings"]


def test_the_command_prints_a_mark_and_its_meaning(tokenizer, monkeypatch):
    monkeypatch.setattr(mock, "build", lambda options: Counting(tokenizer))
    asked = ["eval", "M", "--suite", "niah", "--lengths", "256,512", "--value", "words", "--backend", "oracle"]

    shown = CliRunner().invoke(build_app(), asked, env={"COLUMNS": "120"})
    wrong = CliRunner().invoke(build_app(), [*asked, "--beyond-context", "trunc"])

    assert shown.exit_code == 0, shown.output
    assert " 512 † " in shown.stdout and " 256 † " not in shown.stdout
    assert "† longer than the model's context of 300 tokens" in shown.stdout
    assert wrong.exit_code == 2 and "Did you mean 'truncate'" in wrong.stderr
