"""The road from a model folder to scores, with a small random model."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from unspool.core.artifacts import read_manifest
from unspool.core.errors import DataError
from unspool.evals import heldout, suites
from unspool.evals.backends import transformers
from unspool.evals.backends.base import ROW_TOKENS
from unspool.evals.backends.transformers import ModelBackend
from unspool.evals.eval_plan import EvalPlan
from unspool.evals.run import Scoring, score_model
from unspool.evals.suites import niah
from unspool.evals.suites.key_value import KeyValueEval
from unspool.evals.suites.niah import NiahEval
from unspool.evals.suites.perplexity import PerplexityEval
from unspool.evals.suites.ruler import RulerEval
from unspool.models.generation import greedy
from unspool.models.tokenizer import load_tokenizer

from .toy import TOY

CPU = {"device": torch.device("cpu"), "dtype": torch.float32}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory, tokenizer) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=[tokenizer.eos_token_id, 7],
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def scoring(tmp_path: Path, documents: list[str]) -> Scoring:
    (tmp_path / "held.txt").write_text(documents[0])
    evals = [
        NiahEval.model_validate({"suite": "niah", "lengths": [256], "samples": 4, "needles": 2, "text": "held.txt"}),
        KeyValueEval.model_validate({"suite": "key_value", "lengths": [256], "samples": 4, "value": "words"}),
        PerplexityEval.model_validate({"suite": "perplexity", "length": 256, "samples": 2, "text": "held.txt"}),
    ]
    return Scoring(model="base", model_hash="m", evals=evals, seed=0, out_dir=tmp_path / "scores", root=tmp_path)


def test_a_random_model_recalls_nothing_and_loses_about_the_logarithm_of_its_vocabulary(scoring, model_dir, tokenizer):
    cells = score_model(str(model_dir), scoring, **CPU)["cells"]

    assert {cell["value"] for cell in cells if cell["metric"] == "accuracy"} == {0.0, None}
    losses = [cell["value"] for cell in cells if cell["metric"] == "loss"]
    np.testing.assert_allclose(losses, np.log(len(tokenizer)), atol=0.2)


def test_two_runs_give_the_same_bytes(scoring, model_dir):
    again = replace(scoring, out_dir=scoring.root / "again")
    score_model(str(model_dir), scoring, **CPU)
    score_model(str(model_dir), again, **CPU)

    assert (scoring.out_dir / "samples.jsonl").read_bytes() == (again.out_dir / "samples.jsonl").read_bytes()
    outputs = [json.loads(line).get("output") for line in (again.out_dir / "samples.jsonl").read_text().splitlines()]
    assert len({output for output in outputs if output}) > 1, "empty answers would hide a difference"


def test_weights_are_not_loaded_for_scores_that_are_up_to_date(scoring, model_dir, monkeypatch):
    summary = score_model(str(model_dir), scoring, **CPU)
    monkeypatch.setattr(transformers, "load_model", None)
    monkeypatch.setattr(transformers, "load_tokenizer", None)

    assert score_model(str(model_dir), scoring, **CPU) == summary


def test_every_end_token_of_model_and_tokenizer_stops_an_answer(model_dir, tokenizer):
    assert ModelBackend(str(model_dir), **CPU).stop_ids == {tokenizer.eos_token_id, 7}


def test_questions_that_share_a_context_or_a_row_get_the_answers_they_get_alone(tmp_path, model_dir, monkeypatch):
    monkeypatch.setitem(suites.SUITES, "ruler", TOY)
    config = RulerEval.model_validate({"suite": "ruler", "lengths": [256], "samples": 8, "tasks": ["lone", "shared"]})
    made = ModelBackend(str(model_dir), **CPU)
    torch.manual_seed(0)
    for weight in made.model.parameters():
        # Large, so that answers depend on more than the last token.
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.4)
    together = EvalPlan([config], made.tokenizer, seed=0, root=tmp_path)
    together.group_questions(list(together.prompt_lines()), row_tokens=ROW_TOKENS)
    alone = EvalPlan([config], made.tokenizer, seed=0, root=tmp_path)

    def outputs(plan: EvalPlan) -> dict[str, str]:
        return {sample["hash"]: sample["output"] for unit in plan.units for sample in unit.score(made)}

    assert (len(together.units), len(alone.units)) == (3, 16)
    [row] = [unit for unit in together.units if unit.questions[0].task == "lone"]
    prompt = row.planned.prepare(row)
    with monkeypatch.context() as small:
        # Memory that takes three of these prompts at a time.
        small.setattr(greedy, "CPU_BATCH_TOKENS", 3 * (len(prompt.questions[0].ids) + 16))
        assert made.answers(prompt) == [made.answers(unit.planned.prepare(unit))[0] for unit in alone.units[:8]]
    assert outputs(together) == outputs(alone)
    assert len(set(outputs(alone).values())) > 4, "equal answers would hide a mix-up"


@pytest.mark.parametrize("needles", [1, 2])
def test_needles_in_rows_give_the_samples_they_give_alone(needles, scoring, model_dir, monkeypatch):
    """Those of a haystack with several needles stay with it."""
    config = NiahEval.model_validate(
        {"suite": "niah", "lengths": [256, 512], "samples": 10, "needles": needles, "text": "held.txt"}
    )
    made = ModelBackend(str(model_dir), **CPU)
    torch.manual_seed(0)
    for weight in made.model.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.4)
    # Numbers of one to four tokens: a row has to leave each of them the room it has alone.
    monkeypatch.setattr(niah, "answer_room", lambda tokenizer, references: 5 + int(references[0]) % 4)
    alone = EvalPlan([config], made.tokenizer, seed=0, root=scoring.root)
    wanted = [plain for unit in alone.units for plain in unit.score(made)]
    together = EvalPlan([config], made.tokenizer, seed=0, root=scoring.root)
    together.pack_contexts(8192)

    assert [sample for unit in together.units for sample in unit.score(made)] == wanted
    assert len({sample["output"] for sample in wanted}) > 4, "equal answers would hide a mix-up"
    assert together.num_contexts == alone.num_contexts == len(alone.units) == 20 // needles
    assert together.prompt_tokens == alone.prompt_tokens
    assert len(together.units) == (2 if needles == 1 else 10)


def test_prompts_of_a_row_are_built_in_threads_as_one_after_the_other(scoring, model_dir, monkeypatch):
    config = NiahEval.model_validate({"suite": "niah", "lengths": [512], "samples": 24, "text": "held.txt"})
    tokenizer = load_tokenizer(str(model_dir))
    plan = EvalPlan([config], tokenizer, seed=0, root=scoring.root)
    wanted = [unit.planned.prepare(unit) for unit in plan.units]
    used = set()

    def noted(config, materials, **given):
        used.add(id(materials.tokenizer))
        return niah.prompt(config, materials, **given)

    monkeypatch.setattr(heldout, "THREADS", 3)
    monkeypatch.setattr(heldout.os, "cpu_count", lambda: 8)
    plan.evals[0].suite = replace(plan.evals[0].suite, build=noted)
    plan.pack_contexts(1 << 20)
    (row,) = plan.units
    found = row.planned.prepare(row)
    assert len(found.questions) == 24
    for question, one in zip(found.questions, wanted, strict=True):
        assert np.array_equal(question.ids, np.concatenate([one.context_ids, one.questions[0].ids]))
        assert (question.reference, question.depth) == (one.questions[0].reference, one.questions[0].depth)
    assert len(used) > 1 and id(tokenizer) not in used, "threads must not share the tokenizer"


def test_an_error_in_a_thread_ends_the_row(scoring, model_dir, monkeypatch):
    config = NiahEval.model_validate({"suite": "niah", "lengths": [512], "samples": 24, "text": "held.txt"})
    plan = EvalPlan([config], load_tokenizer(str(model_dir)), seed=0, root=scoring.root)
    plan.pack_contexts(1 << 20)
    monkeypatch.setattr(niah, "_prose", lambda *_: (_ for _ in ()).throw(DataError("no text")))
    with pytest.raises(DataError, match="no text"):
        plan.units[0].planned.prepare(plan.units[0])


def test_a_run_asks_for_needles_in_rows_of_its_device(scoring, model_dir, monkeypatch):
    needles = {"suite": "niah", "lengths": [256], "samples": 6, "text": "held.txt"}
    scoring = replace(scoring, evals=[NiahEval.model_validate(needles), *scoring.evals[1:]])
    asked = []
    answers = ModelBackend.answers
    monkeypatch.setattr(ModelBackend, "answers", lambda self, prompt: (asked.append(prompt), answers(self, prompt))[1])
    score_model(str(model_dir), scoring, **CPU)

    niah_rows = [len(prompt.questions) for prompt in asked if prompt.suite == "niah"]
    assert sum(niah_rows) > len(niah_rows)
    monkeypatch.setattr(transformers, "ROW_TOKENS", 600)
    asked.clear()
    again = replace(scoring, out_dir=scoring.root / "again")
    score_model(str(model_dir), again, **CPU)

    assert len([prompt for prompt in asked if prompt.suite == "niah"]) == sum(niah_rows)
    assert (scoring.out_dir / "samples.jsonl").read_bytes() == (again.out_dir / "samples.jsonl").read_bytes()
    counts = [read_manifest(one.out_dir)["counts"] for one in (scoring, again)]
    assert counts[0] == counts[1]


def test_parts_are_fused_where_a_run_is_long_enough_on_a_gpu(model_dir, monkeypatch):
    fused = []
    monkeypatch.setattr(transformers, "fuse_for_reading", fused.append)
    made = ModelBackend(str(model_dir), **CPU)
    made.planned_tokens = 1 << 60
    assert made.model is not None and not fused, "a CPU compiles nothing"

    class Large:
        device = torch.device("cuda")

        def num_parameters(self):
            return 8 * 10**9

    monkeypatch.setattr(transformers, "load_model", lambda *args, **options: Large())
    for tokens, wanted in ((0, 0), (128 << 10, 0), (32 * 128 << 10, 1)):
        made = ModelBackend(str(model_dir), device=torch.device("cuda"), dtype=torch.bfloat16)
        made.planned_tokens = tokens
        assert made.model is not None and len(fused) == wanted
