"""The checks as a GPU runs them, with bf16 weights, here on a CPU with the smallest models."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

import unspool.training.batch
import unspool.training.step
from unspool.data.packing.store import IGNORE
from unspool.training.batch import Batch
from unspool.verification import case as case_module
from unspool.verification import run as run_module
from unspool.verification.case import build_case
from unspool.verification.families import small_subjects
from unspool.verification.run import build_checks

CHECKS = [name for name, check in build_checks(None).items() if check.promise in (1, 2, 4, 5) and not check.once]


@pytest.fixture(scope="module")
def bf16_built(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for module in (case_module, run_module):
            patch.setattr(module, "training_dtype", lambda device: "bf16")
        (subject,) = small_subjects(tmp_path_factory.mktemp("models"), seed=0, wide=False, names=["llama"])
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


def test_labels_that_cross_documents(monkeypatch, bf16_case, results):
    def crossing(tokens, doc_lens, loss_mask):
        return np.append(tokens[1:].astype(np.int64), IGNORE)

    monkeypatch.setattr(unspool.training.batch, "labels", crossing)
    assert failed(results("packed", bf16_case))


def test_attention_that_ignores_where_documents_end(monkeypatch, bf16_case, results):
    def leaking(batch: Batch):
        inputs = {"input_ids": batch.tokens[None], "position_ids": batch.position_ids[None]}
        return inputs | {"doc_lens": (len(batch.tokens),)}

    monkeypatch.setattr(Batch, "model_inputs", property(leaking))
    assert failed(results("packed", bf16_case))


def test_a_loss_that_is_averaged_in_every_micro_batch(monkeypatch, bf16_case, results):
    summed = unspool.training.step.summed_loss

    def averaged(hidden, head, labels, **options):
        total, losses = summed(hidden, head, labels, **options)
        share = 10 / max(1, int((labels != IGNORE).sum()))
        return total * share, losses * share

    monkeypatch.setattr(unspool.training.step, "summed_loss", averaged)
    assert failed(results("split", bf16_case))
