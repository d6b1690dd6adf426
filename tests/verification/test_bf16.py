"""The checks as a GPU runs them, with bf16 weights, here on a CPU with the smallest models."""

import copy
from dataclasses import replace

import pytest
import torch

from unspool.verification import case as case_module
from unspool.verification import run as run_module
from unspool.verification.case import build_case
from unspool.verification.fixtures import build_small_models
from unspool.verification.run import build_checks

from .mistakes import average_micro_batches, cross_documents, leak_attention

CHECKS = [name for name, check in build_checks(None).items() if check.promise in (1, 2, 4, 5) and not check.once]


@pytest.fixture(scope="module")
def bf16_built(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for module in (case_module, run_module):
            patch.setattr(module, "training_dtype", lambda device: "bf16")
        (subject,) = build_small_models(tmp_path_factory.mktemp("models"), seed=0, wide=False, names=["llama"])
        yield build_case(subject, device=torch.device("cpu"), seed=0)


@pytest.fixture
def bf16_case(bf16_built):
    return replace(bf16_built, model=copy.deepcopy(bf16_built.model))


def failed(found) -> bool:
    assert all(result.status != "skipped" and result.dtype == "bf16" for result in found), found
    return any(result.status == "failed" for result in found)


@pytest.mark.parametrize("check", CHECKS)
def test_promises_are_kept(check, bf16_case, results):
    assert {weight.dtype for weight in bf16_case.model.parameters()} == {torch.bfloat16}
    assert not failed(results(check, bf16_case))


def test_tables_stay_fp32_in_a_model_of_bf16(bf16_case):
    rotary = bf16_case.model.base_model.rotary_emb
    cos, _ = rotary(torch.zeros(1, 4, 8, dtype=torch.bfloat16), torch.arange(4)[None])
    assert cos.dtype == torch.float32


@pytest.mark.parametrize(
    ("mistake", "check"),
    [(cross_documents, "packing"), (leak_attention, "packing"), (average_micro_batches, "micro-batches")],
)
def test_a_mistake_is_caught(mistake, check, monkeypatch, bf16_case, results):
    mistake(monkeypatch)
    assert failed(results(check, bf16_case))
