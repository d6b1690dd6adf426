"""Seconds that are computed against those that were measured on one H200, and what must hold of them."""

from dataclasses import replace

import pytest
import torch

from factory import build_model, build_stage
from unspool.core.errors import ConfigError
from unspool.models.memory.policy import MemoryPolicy
from unspool.planning.calibration import (
    Calibration,
    few_layers,
    load_calibration,
    measure,
    measured_tokens,
    save_calibration,
)
from unspool.planning.cost import GPUS, REFERENCE, find_gpu, match_gpu
from unspool.planning.footprint import GIB, StepSetup
from unspool.planning.step_time import FP8, Documents, device_speed, documents, flops_per_token, step_seconds
from unspool.training.metrics.flops import count_flops
from unspool.training.optim.config import AdamWConfig
from unspool.training.parallel.config import Layout

from .test_footprint import LLAMA_8B, Shape
from .tracked import SMALL, shape_of

K = 1024
SMOLLM2 = Shape(
    num_layers=30, hidden=576, intermediate=1536, num_heads=9, num_kv_heads=3, head_dim=64, vocabulary=49152, tied=True
)
KEEP = MemoryPolicy(activation_checkpointing="keep-attention")
BF16 = {"optimizer": AdamWConfig(weights="bf16", states="8bit")}
H200 = device_speed(REFERENCE)


@pytest.mark.parametrize(
    ("shape", "held", "measured"),
    [
        # benchmarks/README.md: forward and backward of 8B, and whole steps of 135M.
        (
            LLAMA_8B,
            StepSetup(tokens=64 * K, policy=KEEP, **BF16),
            13.3,
        ),
        (LLAMA_8B, StepSetup(tokens=64 * K, policy=MemoryPolicy(activation_checkpointing="full"), **BF16), 15.4),
        (
            LLAMA_8B,
            StepSetup(tokens=64 * K, policy=KEEP, compiled=False, **BF16),
            14.2,
        ),
        (
            LLAMA_8B,
            StepSetup(tokens=128 * K, policy=KEEP, **BF16),
            41.6,
        ),
        (SMOLLM2, StepSetup(tokens=32 * K, micro_batches=4), 4 * 32 * K / 83_269),
    ],
)
def test_steps_take_what_was_measured(shape, held, measured):
    assert step_seconds(shape, held, documents([held.tokens]), H200).step == pytest.approx(measured, rel=0.05)


def test_attention_of_short_documents_takes_what_was_measured():
    """64 documents of 1K, 32/8 heads of 128: 6.36 ms of one layer, where one document of 64K takes 223."""
    held = StepSetup(tokens=64 * K)
    short, long = (step_seconds(LLAMA_8B, held, documents(lens), H200).attention for lens in ([K] * 64, [64 * K]))
    assert short / 32 == pytest.approx(6.36e-3, rel=0.05)
    assert long / 32 == pytest.approx(0.223, rel=0.05)


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_operations_are_those_that_mfu_counts(family):
    model = build_model(family)
    lens = [40, 9, 15]
    wanted = count_flops(model).step(lens) / sum(lens)
    assert flops_per_token(shape_of(model), documents(lens)) == pytest.approx(wanted)


def test_longer_contexts_cost_more_and_faster_devices_less():
    held = StepSetup(tokens=64 * K, policy=MemoryPolicy(activation_checkpointing="full"))
    by_length = [
        step_seconds(LLAMA_8B, held, Documents(tokens=1, squares=n).of(64 * K), H200).step for n in (K, 64 * K)
    ]
    assert by_length == sorted(by_length)
    times = {
        name: step_seconds(LLAMA_8B, held, documents([64 * K]), device_speed(gpu)).step for name, gpu in GPUS.items()
    }
    assert times["b200"] < times["h200"] <= times["h100"] < times["a100"] < times["4090"]


def test_slow_copies_are_waited_for():
    policy = MemoryPolicy(activation_checkpointing="full", offload=True)
    held = StepSetup(tokens=2 * K, policy=policy, **BF16)
    docs = documents([2 * K])
    assert step_seconds(LLAMA_8B, held, docs, H200).waiting == 0
    slow = device_speed(find_gpu("h100")).__class__(host=1e9)
    assert step_seconds(LLAMA_8B, held, docs, slow).waiting > 0


def test_heads_that_are_exchanged_take_time_and_ranks_share_the_rest():
    layout = Layout(replicate=1, shard=1, ring=1, ulysses=8)
    policy = MemoryPolicy(activation_checkpointing="full")
    one = step_seconds(LLAMA_8B, StepSetup(tokens=512 * K, policy=policy), documents([512 * K]), H200)
    eight = step_seconds(LLAMA_8B, StepSetup(tokens=64 * K, layout=layout, policy=policy), documents([512 * K]), H200)
    assert eight.attention == pytest.approx(one.attention / 8)
    assert eight.waiting > 0
    assert one.step / 8 < eight.step < one.step / 7


def test_devices_are_found_by_their_drivers_names():
    assert match_gpu("NVIDIA H200", 139.8 * GIB) is REFERENCE
    assert match_gpu("NVIDIA A100-SXM4-40GB", 39.4 * GIB) is GPUS["a100-40"]
    assert match_gpu("NVIDIA H100 80GB HBM3", 79.1 * GIB).tflops == 989
    assert match_gpu("NVIDIA GeForce RTX 4090", 23.5 * GIB) is GPUS["4090"]
    assert match_gpu("Some other device", 1.0) is None
    with pytest.raises(ConfigError, match="Did you mean 'h100'"):
        find_gpu("h10")


def test_a_few_layers_are_measured_with_the_stages_own_settings(tmp_path):
    """On a CPU, which has no rates: the path and the file, not the numbers."""
    shape = shape_of(build_model(**SMALL | {"num_hidden_layers": 8}))
    stage = build_stage(
        context_length=64, batch_tokens=128, tokens=128, activation_checkpointing="keep-attention", keep_products=4
    )
    found = measure(shape, stage, Documents(tokens=1, squares=32.0), REFERENCE, torch.device("cpu"))
    assert (found.tokens, found.document_len, found.num_layers) == (64, 32, (2, 4))
    assert min(found.seconds) > 0
    assert found.activations == 1.0

    path = save_calibration(found, tmp_path / "run")
    assert load_calibration(path.parent) == found
    assert found.matches("h200", shape)
    assert not found.matches("h100", shape)
    path.write_text("{}")
    assert load_calibration(path.parent) is None


def test_a_calibration_changes_layers_and_the_rest_apart():
    held, docs = StepSetup(tokens=8 * K), documents([8 * K])
    measured = Calibration(
        device="x", gpu="h200", versions="", shape=LLAMA_8B, tokens=1, document_len=1, layers=2.0, rest=1.5,
        activations=1.0, seconds=(1.0, 2.0), num_layers=(2, 4),
    )  # fmt: skip
    before, after = (step_seconds(LLAMA_8B, held, docs, pace) for pace in (H200, measured.correct(H200)))
    assert after.matmul == 2 * before.matmul
    assert after.attention == 2 * before.attention
    assert after.loss == 1.5 * before.loss


def test_measuring_a_long_context_stays_short():
    stage = build_stage(context_length=512 * K, batch_tokens=512 * K, tokens=512 * K, activation_checkpointing="full")
    assert measured_tokens(LLAMA_8B, stage, documents([512 * K]), REFERENCE) < 512 * K
    policy = MemoryPolicy(activation_checkpointing="keep-attention", keep_products=20, keep_on_host=9)
    assert (few_layers(policy, 32, 4).keep_products, few_layers(policy, 32, 4).keep_on_host) == (2, 1)


def test_fp8_shortens_the_products_of_layers_and_nothing_else():
    held = StepSetup(tokens=64 * K, policy=KEEP, **BF16)
    rows = documents([64 * K])

    def seconds(layers):
        return step_seconds(LLAMA_8B, replace(held, fp8_layers=layers), rows, H200)

    none, half, whole = seconds(0), seconds(16), seconds(32)
    assert none.matmul / whole.matmul == pytest.approx(FP8)
    assert half.matmul == pytest.approx((none.matmul + whole.matmul) / 2)
    assert whole.recomputed < none.recomputed
    same = ("attention", "between", "loss", "update", "waiting", "weighing")
    assert [getattr(none, name) for name in same] == [getattr(whole, name) for name in same]
    on_cpu = step_seconds(LLAMA_8B, replace(held, fp8_layers=32, on_cpu=True), rows, H200)
    assert on_cpu.matmul == step_seconds(LLAMA_8B, replace(held, on_cpu=True), rows, H200).matmul
