"""`unspool.audit` on correct setups and on planted mistakes, in the code paths of real trainers."""

import json
import time
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from unspool.cli.main import build_app
from unspool.core.errors import ConfigError
from unspool.verification.audits.promises import PROMISES
from unspool.verification.audits.run import AuditResult, audit

from .audit_faults import FAULTS
from .audit_setups import EOS, RIGHT, packed, plain_step, right_accelerate_loop, small_model, tensors

# The others take as long each, and run with `-m slow`.
FAST = (
    "right_sliding_windows",
    "right_left_padding_with_our_attention",
    "right_trl_packing",
    "right_lightning",
    "packing_with_context_parallelism",
    "mask_dropped_with_left_padding",
    "mean_of_means_in_lightning",
    "mask_of_ones_beside_positions",
    "labels_shifted_by_the_collator",
    "mean_of_means_in_trainer",
    "last_micro_batch_dropped",
)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    """Trainers make their output folder at once."""
    monkeypatch.chdir(tmp_path)


def run(setup: Any) -> AuditResult:
    found = audit(**setup) if isinstance(setup, dict) else audit(setup)
    print(found)
    return found


def mostly_slow(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", mostly_slow(RIGHT))
def test_no_false_alarm_on_a_correct_set_up(name):
    started = time.perf_counter()
    found = run(RIGHT[name]())

    assert found.broken == ()
    assert sum(each.status == "kept" for each in found.verdicts) >= 7
    assert {each.promise for each in found.verdicts} == {*PROMISES}
    assert time.perf_counter() - started < 60


@pytest.mark.parametrize("name", mostly_slow(FAULTS))
def test_a_planted_mistake_is_found_and_named(name):
    fault = FAULTS[name]
    found = run(fault.build())

    assert set(found.broken) == {fault.promise, *fault.also}
    assert fault.evidence in found[fault.promise].evidence


def test_weights_gradients_and_mode_are_as_before():
    """Although the step updates them."""
    setup = right_accelerate_loop()
    model = setup["model"]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    audit(**setup)

    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.training


def test_what_cannot_be_probed_is_refused():
    model, data = small_model(), [tensors(item) for item in packed()]
    for setup, message in (
        ({"model": model}, "step_fn"),
        ({"model": torch.nn.Linear(2, 2), "data": data, "step_fn": plain_step}, "not a causal language model"),
        ({"model": model, "data": [], "step_fn": plain_step}, "no batch"),
        ({"model": model, "data": [{"text": "a"}], "step_fn": plain_step}, "input_ids"),
        ({"model": model, "data": data, "step_fn": lambda model, batches: None}, "no forward pass"),
        ({"model": model, "data": data, "step_fn": plain_step, "attention": "none"}, "not known"),
        ({"model": model, "data": data, "step_fn": lambda *all_: (plain_step(*all_), {})}, "returned a tuple; return"),
    ):
        with pytest.raises(ConfigError, match=message):
            audit(**setup)


SETUP = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}

def leaking():
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=2, attn_implementation="eager"))
    ids = torch.arange(40).view(4, 1, 10)
    batches = [{"input_ids": row, "labels": row, "seq_lengths": torch.tensor([6, 4])} for row in ids]
    def step(model, batches):
        for batch in batches:
            model(input_ids=batch["input_ids"], labels=batch["labels"], num_items_in_batch=36).loss.backward()
    return {"model": model, "data": batches, "step_fn": step}

def failing():
    raise KeyError("no such dataset")

def one_batch():
    def step(model, batch):
        return model(**batch).loss
    return leaking() | {"step_fn": step}
"""
ONE_BATCH = "probe: unchanged micro-batches); step_fn(model, micro_batches) gets a list of micro-batches (dicts) and "


@pytest.mark.parametrize(
    ("function", "code", "wanted"),
    [
        ("leaking", 1, "isolation"),
        ("failing", 2, "KeyError 'no such dataset'"),
        ("missing", 2, "no function 'missing'"),
        (
            "one_batch",
            2,
            "error: audit: the training step raised TypeError: LlamaForCausalLM( … ) argument after ** must",
        ),
        ("one_batch", 2, ONE_BATCH),
    ],
)
def test_the_command_probes_the_setup_that_a_function_returns(function, code, wanted, tmp_path):
    (tmp_path / "my_training.py").write_text(SETUP)
    found = CliRunner().invoke(build_app(), ["audit", f"{tmp_path}/my_training.py:{function}"])

    assert found.exit_code == code, found.output
    assert wanted in found.output
    assert "Traceback" not in found.output


def test_a_traceback_of_the_step_needs_verbose(tmp_path):
    (tmp_path / "my_training.py").write_text(SETUP)
    found = CliRunner().invoke(build_app(), ["-v", "audit", "my_training.py:one_batch"])

    assert found.exit_code == 2
    assert "Traceback" in found.output
    assert "return model(**batch).loss" in found.output


def test_only_a_step_after_the_first_fails_and_is_named():
    runs = []

    def step(model: Any, batches: list[Any]) -> float:
        runs.append(batches)
        if len(runs) == 2:
            raise KeyError("labels")
        return plain_step(model, batches)

    with pytest.raises(ConfigError, match=r"raised KeyError 'labels' \(probe: first documents replaced\)"):
        audit(small_model(), [tensors(item) for item in packed()], step)


def equal_rows(stray: int | None = None) -> list[dict[str, torch.Tensor]]:
    """Four batches of one 16-token row each; with `stray`, an end-of-text token inside that row."""
    rows = torch.arange(3, 67).view(4, 1, 16).unbind()
    if stray is not None:
        rows[stray][0, 7] = EOS
    return [{"input_ids": row, "labels": row} for row in rows]


def mean_of_means(model: Any, batches: list[Any]) -> None:
    for batch in batches:
        (model(**batch, use_cache=False).loss / len(batches)).backward()


def test_a_mean_of_means_says_whether_the_audit_made_the_counts_unequal():
    """`loss / len(micro_batches)` is right for the rows of this user, who could not explain the verdict."""
    equal = audit(small_model(), equal_rows(), mean_of_means)["token_mean"]
    unequal = audit(small_model(), [tensors(item) for item in packed()], mean_of_means)["token_mean"]

    assert equal.status == unequal.status == "broken"
    assert "removed every other label of micro-batch 1, because all micro-batches had equally many" in equal.evidence
    assert "removed" not in unequal.evidence


def test_end_of_text_tokens_that_split_rows_are_named():
    """Only the last micro-batch has one."""
    found = audit(small_model(), equal_rows(stray=3), plain_step)

    assert found.broken == ("isolation", "first_token", "positions")
    for promise in found.broken:
        wanted = "boundaries from rows and end-of-text tokens inside rows, which split rows of 1 of 4 micro-batches"
        assert found[promise].evidence.endswith(wanted)
    whole = audit(small_model(), equal_rows(), plain_step)["isolation"]
    assert whole.evidence == "no micro-batch has two documents (document boundaries from rows)"


def test_the_command_prints_verdicts_as_json(tmp_path):
    (tmp_path / "my_training.py").write_text(SETUP)
    found = CliRunner().invoke(build_app(), ["audit", "--json", "--attention", "full", "my_training.py:leaking"])

    verdicts = json.loads(found.output)["verdicts"]
    assert {each["promise"] for each in verdicts} == {*PROMISES}
    assert found.exit_code == (1 if any(each["status"] == "broken" for each in verdicts) else 0)


@pytest.mark.parametrize("target", ["train.py", "nowhere.py:build", "no_such_module:build"])
def test_the_command_names_wrong_targets(target):
    found = CliRunner().invoke(build_app(), ["audit", target])

    assert found.exit_code == 2
    assert found.output.startswith("error: audit")
    assert "Traceback" not in found.output


@pytest.mark.slow
def test_the_command_without_a_target_probes_the_bundled_model():
    found = CliRunner().invoke(build_app(), ["audit"])

    assert found.exit_code == 0
    assert "no promise broken" in found.output
