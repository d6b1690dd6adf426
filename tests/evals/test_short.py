"""lm-eval is not needed to develop, so a stand-in with its names plays it here."""

import json
import re
import sys
import types
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from pydantic import ValidationError
from typer.testing import CliRunner

from unspool.cli.main import build_app
from unspool.core.errors import ConfigError
from unspool.evals import suites
from unspool.evals.backends.base import BackendOptions, RopeOverride
from unspool.evals.config import eval_adapter
from unspool.evals.eval_plan import EvalPlan
from unspool.evals.run import Scoring, score_model
from unspool.evals.suites import short_suite
from unspool.evals.suites.ruler import RulerEval
from unspool.evals.suites.short import cells, process_results, run_short, write_tasks
from unspool.evals.suites.short_suite import chosen_tasks
from unspool.reporting.gather_scores import gather_model
from unspool.rope.methods import ABF

from .test_backend import model_dir  # noqa: F401
from .test_probe import styled  # noqa: F401
from .toy import TOY


def on_cpu(model: object, **more) -> BackendOptions:
    return BackendOptions(model=str(model), device=torch.device("cpu"), dtype=torch.float32, **more)


RESULTS = {
    "results": {
        "hellaswag": {
            "alias": "hellaswag",
            "acc,none": 0.4,
            "acc_stderr,none": 0.01,
            "acc_norm,none": 0.5,
            "acc_norm_stderr,none": 0.02,
        },
        "gsm8k": {"exact_match,strict-match": 0.1, "exact_match_stderr,strict-match": "N/A"},
        "odd": {"alias": "odd"},
    },
    "n-samples": {"hellaswag": {"original": 10042, "effective": 100}},
}


class FakeTask:
    def __init__(self, name: str) -> None:
        kinds = {"gsm8k": "generate_until", "odd": "loglikelihood_rolling"}
        self.name, self.config, self.OUTPUT_TYPE = name, {}, kinds.get(name, "multiple_choice")

    def set_config(self, key: str, value: int) -> None:
        self.config[key] = value


@pytest.fixture
def lm_eval(monkeypatch) -> dict:
    seen: dict = {}

    class TaskManager:
        def __init__(self, include_path=None):
            seen["include"] = include_path

        def match_tasks(self, names):
            return [name for name in names if name in RESULTS["results"]]

        def load(self, names):
            return {"tasks": {name: FakeTask(name) for name in names}}

    def simple_evaluate(**options):
        seen.update(options)
        if seen.get("offline"):
            raise ConnectionError("no route\nto the Hub")
        return RESULTS

    class HFLM:
        def __init__(self, **options):
            seen["lm"] = options

    parts = {
        "lm_eval": {},
        "lm_eval.evaluator": {"simple_evaluate": simple_evaluate},
        "lm_eval.tasks": {"TaskManager": TaskManager},
        "lm_eval.models": {},
        "lm_eval.api": {},
        "lm_eval.api.model": {"TemplateLM": object},
        "lm_eval.models.huggingface": {"HFLM": HFLM},
    }
    for name, content in parts.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return seen


def test_cells_hold_the_number_that_papers_print():
    hellaswag, gsm8k, odd = cells(RESULTS)

    assert (hellaswag["metric"], hellaswag["value"], hellaswag["n"]) == ("acc_norm", 0.5, 100)
    assert hellaswag["low"] == pytest.approx(0.5 - 1.96 * 0.02)
    assert (gsm8k["metric"], gsm8k["value"], gsm8k["low"]) == ("exact_match", 0.1, None)
    assert odd["value"] is None and odd["n"] == 0


def test_tasks_run_with_our_model(lm_eval, model_dir):  # noqa: F811
    summary = run_short(on_cpu(model_dir), ["hellaswag", "gsm8k"], samples=100, include="mine")

    assert (lm_eval["include"], lm_eval["tasks"], lm_eval["limit"]) == ("mine", ["hellaswag", "gsm8k"], 100)
    assert lm_eval["confirm_run_unsafe_code"] is False
    assert lm_eval["lm"]["pretrained"].config._attn_implementation == "sdpa", "lm-eval pads, which ours refuses"
    assert summary["model"] == model_dir.name and summary["cells"] == cells(RESULTS)


def test_the_preset_utk_has_the_tasks_and_shots_of_table_3(caplog):
    printed = {"bbh_cot_fewshot": 3, "nq_open": 5, "triviaqa": 5, "humaneval": 0, "mbpp": 3, "gsm8k": 4}
    found = chosen_tasks([], "utk", sandboxed=True)
    assert {name: int(shots) for name, _, shots in (task.partition(":") for task in found)} == printed
    with pytest.raises(ConfigError, match="`preset` of short 'uk' is not known"):
        chosen_tasks([], "uk", sandboxed=True)


def test_tasks_that_run_code_of_the_model_are_refused_without_a_sandbox(caplog):
    with caplog.at_level("WARNING", logger="unspool"):
        assert chosen_tasks([], "utk", sandboxed=False) == ["nq_open:5", "triviaqa:5", "bbh_cot_fewshot:3", "gsm8k:4"]
    assert "skipping humaneval:0 and mbpp:3: humaneval:0 and mbpp:3 would run code that the model writes" in caplog.text
    done = CliRunner().invoke(build_app(), ["eval", "asset:tiny-base", "--suite", "short", "--tasks", "humaneval"])
    assert done.exit_code == 2 and "pass --sandboxed" in " ".join(done.output.split())


def test_shots_are_set_for_each_task(lm_eval, model_dir, monkeypatch):  # noqa: F811
    monkeypatch.setenv("HF_ALLOW_CODE_EVAL", "0")
    run_short(on_cpu(model_dir), ["hellaswag:10", "gsm8k:4", "odd"], samples=1, include=None, sandboxed=True)

    hellaswag, gsm8k, odd = lm_eval["tasks"]
    assert (hellaswag.config, gsm8k.config, odd) == ({"num_fewshot": 10}, {"num_fewshot": 4}, "odd")
    assert lm_eval["confirm_run_unsafe_code"] is True
    with pytest.raises(ConfigError, match="`tasks='gsm8k:x'`: write NAME or NAME:SHOTS"):
        run_short(on_cpu(model_dir), ["gsm8k:x"], samples=1, include=None)


def test_tasks_run_with_positions_that_are_tried_without_training(lm_eval, model_dir):  # noqa: F811
    rope = RopeOverride(rope=ABF(method="abf", base=5e5), context_length=2048)
    summary = run_short(on_cpu(model_dir, rope=rope), ["hellaswag"], samples=1, include=None)

    assert lm_eval["lm"]["pretrained"].config.rope_parameters["rope_theta"] == 5e5
    assert summary["model"] == f"{model_dir.name}+abf"


def test_unknown_tasks_and_missing_data_are_explained(lm_eval, model_dir):  # noqa: F811
    with pytest.raises(ConfigError, match="`tasks='helaswag'`: lm-eval has no such task"):
        run_short(on_cpu(model_dir), ["helaswag"], samples=None, include=None)
    lm_eval["offline"] = True
    with pytest.raises(ConfigError, match=r"could not be read \(no route\)\. Without network"):
        run_short(on_cpu(model_dir), ["hellaswag"], samples=None, include=None)


def test_without_lm_eval_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ConfigError, match=r"pip install 'unspool\[eval\]'"):
        run_short(on_cpu("m"), ["hellaswag"], samples=None, include=None)
    assert short_suite.TASKS[0] == "hellaswag"


def command(url: str, *more: str) -> list[str]:
    return ["eval", "asset:tiny-base", "--backend", "openai", "--url", url, "--model-name", "served", *more]


def test_a_dead_server_is_not_replaced_by_the_local_model(lm_eval):
    done = CliRunner().invoke(build_app(), command("http://127.0.0.1:9/v1", "--suite", "short", "--tasks", "gsm8k"))

    assert done.exit_code == 2 and "http://127.0.0.1:9/v1/completions gave no usable answer" in " ".join(
        done.output.split()
    )
    assert "lm" not in lm_eval and "model" not in lm_eval, "the local model was scored"


@pytest.mark.parametrize("options", [["--backend", "oracle"], ["--url", "http://127.0.0.1:9/v1"]])
def test_short_tasks_are_refused_where_they_would_ask_another_model(lm_eval, options):
    done = CliRunner().invoke(
        build_app(), ["eval", "asset:tiny-base", "--suite", "short", "--tasks", "gsm8k", *options]
    )

    assert done.exit_code == 2 and re.search("only (with )?--backend .*, not ", " ".join(done.output.split()))
    assert "lm" not in lm_eval


@pytest.mark.parametrize("styled", ["tgi"], indirect=True)
@pytest.mark.parametrize(
    ("task", "told"),
    [("hellaswag", "the task hellaswag needs log-probabilities of token ids"), ("odd", "the task odd needs log-")],
)
def test_tasks_that_the_server_cannot_score_are_refused_before_the_first_question(lm_eval, styled, task, told):  # noqa: F811
    done = CliRunner().invoke(build_app(), command(styled.url, "--suite", "short", "--tasks", f"gsm8k,{task}"))

    assert done.exit_code == 2 and told in " ".join(done.output.split())
    assert "model" not in lm_eval and not styled.questions


@pytest.mark.parametrize("styled", ["vllm"], indirect=True)
def test_short_tasks_are_scored_through_the_server(lm_eval, styled):  # noqa: F811
    done = CliRunner().invoke(build_app(), command(styled.url, "--suite", "short", "--tasks", "hellaswag,gsm8k"))

    assert done.exit_code == 0, done.output
    assert "lm" not in lm_eval
    asked = SimpleNamespace(args=("Q: 1+1?\nA:", {"until": ["gh", "\n"], "max_gen_toks": 7}))
    assert lm_eval["model"].generate_until([asked]) == ["ri"], "cut at the first stop"
    assert (styled.bodies[-1]["max_tokens"], styled.bodies[-1]["stop"]) == (7, ["gh", "\n"])
    assert lm_eval["model"]._loglikelihood_tokens([("", [1, 2, 3], [4, 5])]) == [(-7.0, False)]
    assert styled.bodies[-1]["prompt"] == [1, 2, 3, 4, 5]
    assert lm_eval["model"].prefix_token_id >= 0


def test_a_recipe_scores_short_tasks_with_its_other_suites(lm_eval, model_dir, tmp_path, caplog):  # noqa: F811
    entries: list = [
        {"suite": "short", "tasks": ["hellaswag:10", "gsm8k"], "samples": 7, "after": ["sft"]},
        {"suite": "niah", "lengths": [256], "samples": 1, "value": "words"},
    ]
    evals = [eval_adapter().validate_python(entry) for entry in entries]
    scoring = Scoring(model="sft", model_hash="m", evals=evals, seed=0, out_dir=tmp_path / "sft", root=Path())
    score = partial(score_model, str(model_dir), scoring, device=torch.device("cpu"), dtype=torch.float32)

    cells = score()["cells"]

    found = {cell["task"]: (cell["value"], cell["length"]) for cell in cells if cell["suite"] == "short"}
    assert found == {"hellaswag": (0.5, 0), "gsm8k": (0.1, 0)}, "of each unit its own task, without others"
    assert {cell["suite"] for cell in cells} == {"short", "niah"} and lm_eval["limit"] == 7
    scores = gather_model(tmp_path / "sft")
    assert [cell.suite for cell in scores.short] == ["short: hellaswag", "short: gsm8k"]
    lm_eval.clear()
    caplog.set_level("INFO")
    score()
    assert "limit" not in lm_eval and "up to date" in caplog.text


@pytest.mark.parametrize(
    ("entry", "wanted"),
    [
        ({"preset": "prolonk"}, "`preset` of short 'prolonk'"),
        ({"tasks": ["humaneval"]}, "pass `sandboxed`"),
        ({"paths": {"data": "x"}}, "tasks"),
    ],
)
def test_a_wrong_entry_of_a_recipe_is_refused_before_anything_runs(entry, wanted):
    with pytest.raises(ValidationError, match=wanted):
        eval_adapter().validate_python({"suite": "short", **entry})


def test_a_recipe_whose_short_tasks_cannot_run_is_refused_before_training(lm_eval, tokenizer):
    config = eval_adapter().validate_python({"suite": "short", "tasks": ["helaswag"]})
    with pytest.raises(ConfigError, match="lm-eval has no such task"):
        EvalPlan([config], tokenizer, seed=0, root=Path()).check()
    twice = eval_adapter().validate_python({"suite": "short", "tasks": ["gsm8k:4"]})
    with pytest.raises(ConfigError, match=r"suite short \(gsm8k\).* appears twice"):
        EvalPlan([twice, twice], tokenizer, seed=0, root=Path())


@pytest.fixture
def written(tmp_path: Path, tokenizer, monkeypatch) -> tuple[Path, list[str]]:
    monkeypatch.setitem(suites.SUITES, "ruler", TOY)
    config = RulerEval.model_validate(
        {"suite": "ruler", "lengths": [256, 1024], "samples": 3, "tasks": ["lone", "judged"]}
    )
    return tmp_path, write_tasks(EvalPlan([config], tokenizer, seed=0, root=Path()), tmp_path)


class Loader(yaml.SafeLoader):
    pass


Loader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))


def test_our_tasks_are_files_that_lm_eval_reads(written):
    folder, names = written

    assert names == [
        "unspool_ruler_lone_256",
        "unspool_ruler_judged_256",
        "unspool_ruler_lone_1k",
        "unspool_ruler_judged_1k",
    ]
    task = yaml.load((folder / "unspool_ruler_lone_1k.yaml").read_text(), Loader)
    assert task["generation_kwargs"]["max_gen_toks"] == 8
    assert task["process_results"] == "scorer.process_results" and (folder / "scorer.py").is_file()
    docs = Path(task["dataset_kwargs"]["data_files"]["test"]).read_text().splitlines()
    assert len(docs) == 3 and json.loads(docs[1])["references"] == ["1001"]


def test_answers_get_the_scores_of_the_suite(written):
    folder, _ = written
    doc = json.loads((folder / "unspool_ruler_lone_256.jsonl").read_text().splitlines()[0])
    judged = json.loads((folder / "unspool_ruler_judged_256.jsonl").read_text().splitlines()[0])

    assert process_results(doc, [" 1000."]) == {"score": 1.0}
    assert process_results(doc, ["?"]) == {"score": 0.0}
    assert process_results(judged, ["?"]) == {}
