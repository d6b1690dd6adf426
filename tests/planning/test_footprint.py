"""Predicted memory against measured memory: bytes alive in the trainer's own code, and a GPU's measurements."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from factory import build_stage
from unspool.models.fp8 import operands
from unspool.models.memory import checkpointing, offload
from unspool.models.memory.policy import MemoryPolicy
from unspool.planning import footprint as cost_memory
from unspool.planning.calibration import _trial
from unspool.planning.cost import REFERENCE, Shape
from unspool.planning.footprint import GIB, PARTS, StepSetup, footprint, moments, reserve
from unspool.training.optim.config import AdamWConfig
from unspool.training.parallel.config import Layout

from .tables import tables
from .tracked import TOKENS_AT_ONCE, tracked_peak

K = 1024
LLAMA_8B = Shape(
    num_layers=32, hidden=4096, intermediate=14336, num_heads=32, num_kv_heads=8, head_dim=128, vocabulary=128256
)
BF16 = {"optimizer": {"weights": "bf16", "states": "8bit"}}
KEEP = {"activation_checkpointing": "keep-attention"}


def held_of(changes: dict[str, Any], tokens: int, rows: int = 1) -> StepSetup:
    names = vars(MemoryPolicy())
    policy = MemoryPolicy(**{name: value for name, value in changes.items() if name in names})
    return StepSetup(
        tokens=tokens,
        micro_batches=rows,
        policy=policy,
        optimizer=AdamWConfig(weights="bf16", states="8bit", step=changes.get("optimizer", {}).get("step", "after")),
        compiled=changes.get("compile", False),
    )


@pytest.mark.parametrize(
    ("changes", "tokens", "rows", "shape"),
    [
        ({}, 512, 1, {}),
        ({"activation_checkpointing": "full"}, 512, 1, {}),
        (KEEP | {"keep_products": 2}, 512, 1, {}),
        ({"activation_checkpointing": "full", "layers_per_checkpoint": 2}, 512, 1, {}),
        ({"activation_checkpointing": "full", "mlp_tiles": 64}, 512, 1, {}),
        ({"activation_checkpointing": "full", "attention_heads_at_once": 2}, 512, 1, {}),
        ({"activation_checkpointing": "full"}, 512, 2, {}),
        ({"activation_checkpointing": "full"}, 128, 3, {"hidden_size": 128, "intermediate_size": 448}),
        ({"compile": True}, 512, 1, {}),
        pytest.param({"compile": True, "activation_checkpointing": "full"}, 512, 1, {}, marks=pytest.mark.slow),
        ({"compile": True} | KEEP | {"keep_products": 2}, 512, 1, {}),
        (
            {
                "optimizer": {"weights": "bf16", "states": "8bit", "step": "in-backward"},
                "activation_checkpointing": "full",
            },
            128,
            1,
            {"hidden_size": 128, "intermediate_size": 448},
        ),
    ],
    ids=str,
)
def test_the_fullest_moment_of_a_step_is_what_is_alive_then(changes, tokens, rows, shape, monkeypatch):
    # The workspace of a CPU's kernel is its own business.
    monkeypatch.setattr(cost_memory, "WORKSPACE", 0)
    found, small = tracked_peak(BF16 | changes, tokens=tokens, rows=rows, **shape)
    wanted = footprint(small, held_of(changes, tokens, rows))
    assert wanted.device == pytest.approx(found, rel=0.03), wanted


def cast_a_few_rows_at_once(matrix, amax, rows, columns):
    """A kernel needs no room for anything between."""
    for start in range(0, len(matrix), TOKENS_AT_ONCE):
        part = slice(start, start + TOKENS_AT_ONCE)
        value = operands.reference_cast(matrix[part], amax)
        if rows is not None:
            rows[part].copy_(value)
        if columns is not None:
            columns[:, part].copy_(value.t())


def largest_of_a_few_rows_at_once(matrices):
    parts = [part for matrix in matrices for part in torch.split(matrix, TOKENS_AT_ONCE)]
    return torch.stack([part.abs().max().float() for part in parts]).max()[None]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"compile": True},
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "full", "mlp_tiles": 64},
        {"compile": True} | KEEP | {"keep_products": 2},
    ],
    ids=str,
)
def test_fp8_holds_what_is_alive(changes, monkeypatch):
    monkeypatch.setattr(cost_memory, "WORKSPACE", 0)
    monkeypatch.setattr(operands, "_cast", cast_a_few_rows_at_once)
    monkeypatch.setattr(operands, "largest_value", largest_of_a_few_rows_at_once)
    found, small = tracked_peak(BF16 | changes | {"precision": "fp8"}, tokens=512)
    held = replace(held_of(changes, 512), fp8_layers=small.num_layers)
    assert footprint(small, held).device == pytest.approx(found, rel=0.04), footprint(small, held)
    assert footprint(small, replace(held, fp8_layers=0)).device != footprint(small, held).device


@pytest.mark.parametrize(
    ("changes", "rows"), [({}, 1), ({"activation_checkpointing": "full"}, 2), (KEEP | {"keep_products": 2}, 1)], ids=str
)
def test_a_cpu_holds_what_is_alive_in_fp32(changes, rows, monkeypatch):
    monkeypatch.setattr(cost_memory, "CPU_CHUNK", TOKENS_AT_ONCE)
    found, small = tracked_peak(changes, tokens=512, rows=rows)
    wanted = footprint(small, replace(held_of(changes, 512, rows), optimizer=AdamWConfig(), on_cpu=True))
    assert wanted.device == pytest.approx(found, rel=0.03), wanted


def test_a_forgotten_part_would_be_detected(monkeypatch):
    monkeypatch.setattr(cost_memory, "WORKSPACE", 0)
    found, small = tracked_peak(BF16 | KEEP, tokens=512)
    wanted = footprint(small, held_of(KEEP, 512))
    for part in ("weights", "optimizer", "checkpoints", "kept", "layer"):
        without = replace(wanted, **{part: 0.0}).device
        assert without != pytest.approx(found, rel=0.03), part


POLICIES = [
    MemoryPolicy(),
    MemoryPolicy(activation_checkpointing="full"),
    MemoryPolicy(activation_checkpointing="keep-attention", keep_products=20, keep_on_host=9, offload=True),
    MemoryPolicy(activation_checkpointing="full", offload=True, mlp_tiles=16 * K, attention_heads_at_once=2),
    MemoryPolicy(activation_checkpointing="full", layers_per_checkpoint=2, offload=True),
]


@pytest.mark.parametrize("policy", POLICIES)
def test_parts_sum_to_the_peak_and_more_tokens_never_take_less(policy):
    peaks = []
    for tokens in (1 * K, 8 * K, 16 * K, 17 * K, 64 * K, 256 * K):
        found = footprint(LLAMA_8B, StepSetup(tokens=tokens, policy=policy))
        assert sum(getattr(found, part) for part in PARTS) == found.device
        assert found.device == max(one.device for one in moments(LLAMA_8B, StepSetup(tokens=tokens, policy=policy)))
        assert min(getattr(found, part) for part in PARTS) >= 0
        peaks.append(found.device)
    assert peaks == sorted(peaks)


def test_each_setting_takes_less_than_the_one_before():
    found = [
        footprint(LLAMA_8B, StepSetup(tokens=64 * K, policy=policy)).device
        for policy in (
            MemoryPolicy(),
            MemoryPolicy(activation_checkpointing="keep-attention", keep_products=16),
            MemoryPolicy(activation_checkpointing="keep-attention", keep_products=16, keep_on_host=8),
            MemoryPolicy(activation_checkpointing="keep-attention"),
            MemoryPolicy(activation_checkpointing="full"),
            MemoryPolicy(activation_checkpointing="full", offload=True),
            MemoryPolicy(activation_checkpointing="full", offload=True, mlp_tiles=16 * K),
        )
    ]
    assert found == sorted(found, reverse=True)


def test_numbers_that_other_files_set_are_theirs():
    assert cost_memory.MAX_IN_FLIGHT == offload.MAX_PENDING
    count = cost_memory._MemoryCounter(
        LLAMA_8B,
        StepSetup(
            tokens=1, policy=MemoryPolicy(activation_checkpointing="keep-attention", keep_products=20, keep_on_host=9)
        ),
    )
    assert count.hosts == checkpointing.host_layers(32, keep=20, on_host=9)


def test_a_sequence_of_256k_took_what_is_computed():
    """Measured on one H200, 8B shape, forward and backward without an optimizer: 53 GiB there, 67 on the host."""
    policy = MemoryPolicy(activation_checkpointing="full", offload=True, mlp_tiles=16 * K, attention_heads_at_once=2)
    held = StepSetup(
        tokens=256 * K, policy=policy, optimizer=AdamWConfig(weights="bf16", states="8bit"), compiled=False
    )
    found = footprint(LLAMA_8B, held)
    assert (found.device - found.optimizer) / GIB == pytest.approx(53, rel=0.05)
    assert found.host / GIB == pytest.approx(67, rel=0.1)


def test_several_ranks_hold_about_what_the_tables_of_scaling_say():
    layout = Layout(replicate=1, shard=1, ring=1, ulysses=8)
    policy = MemoryPolicy(activation_checkpointing="full", offload=True, mlp_tiles=16 * K)
    found = footprint(LLAMA_8B, StepSetup(tokens=64 * K, layout=layout, policy=policy))
    table = tables.memory(LLAMA_8B, layout, 512 * K)
    assert found.device == pytest.approx(table.device, rel=0.15)
    assert found.host == pytest.approx(table.host, rel=0.05)


def test_a_rank_loads_the_full_model_only_if_it_is_alone_or_keeps_weights_in_host_memory():
    policy = MemoryPolicy(activation_checkpointing="full", offload=True, mlp_tiles=1024)
    options = {"tokens": 8 * K, "policy": policy, "compiled": True}
    ranks = StepSetup(layout=Layout(replicate=1, shard=8, ring=1, ulysses=1), **options)

    loading = [
        footprint(LLAMA_8B, setup).on_host.loading
        for setup in (StepSetup(**options), ranks, replace(ranks, on_host=True))
    ]
    assert loading == [4 * LLAMA_8B.params, 0, 4 * LLAMA_8B.params]


def test_weights_in_host_memory_are_not_on_the_device():
    layout = Layout(replicate=1, shard=8, ring=1, ulysses=1)
    here, there = (footprint(LLAMA_8B, StepSetup(tokens=8 * K, layout=layout, on_host=flag)) for flag in (False, True))
    moved = 16 * LLAMA_8B.params / 8
    assert there.host - here.host == moved
    assert here.device - there.device <= moved
    assert there.optimizer == there.gradients == 0


def test_some_room_is_left_on_every_device():
    assert reserve(24 * GIB) > GIB
    assert reserve(140 * GIB) < 10 * GIB


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("policy", [{}, {"activation_checkpointing": "full"}, KEEP | {"keep_products": 2}])
def test_a_gpu_holds_what_is_computed(policy):
    shape = Shape(
        num_layers=4, hidden=1024, intermediate=3584, num_heads=16, num_kv_heads=4, head_dim=64, vocabulary=32000
    )
    tokens = 16 * K
    stage = build_stage(
        context_length=tokens, batch_tokens=tokens, tokens=tokens, mix={"rows": 1.0}, compile=True, **BF16 | policy
    )
    trial = _trial(shape, stage, [tokens], REFERENCE, torch.device("cuda"))
    assert trial.held.device == pytest.approx(trial.peak, rel=0.1), trial.held
