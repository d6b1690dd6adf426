"""A stage on one GPU: bf16 in the forward pass, everything that is kept in fp32."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from factory import build_model, build_stage, random_row, save_folder, save_rows
from unspool.training import loop as loop_module
from unspool.training import stage as stage_module
from unspool.training.checkpoint.resume import OPTIMIZER
from unspool.training.metrics.logger import METRICS
from unspool.training.stage import StageInputs, run_stage

# Six steps of two slots, three checkpoints.
STAGE = build_stage(mix={"long": 0.6, "short": 0.4}, checkpoint_every=2, rope={"method": "abf", "base": 5e5})


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> StageInputs:
    """Heads as wide as those of the smallest real models."""
    folder = tmp_path_factory.mktemp("wide")
    model = save_folder(folder / "model", build_model(hidden_size=128, initializer_range=0.1))
    rows = {
        "long": save_rows(folder / "long", [random_row((20, 12), seed, mask=0.3) for seed in range(7)]),
        "short": save_rows(folder / "short", [random_row((16,), seed) for seed in range(10, 15)]),
    }
    return StageInputs(model=str(model), datasets=rows)


def losses_of(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / METRICS).read_text().splitlines()]


@pytest.mark.gpu
@pytest.mark.parametrize("position", [{"method": "abf", "base": 5e5}, {"method": "harpe", "low": 1e4, "high": 5e5}])
def test_a_stage_on_cuda_follows_the_cpu_to_bfloat16(position, wide, tmp_path):
    stage = build_stage(mix=STAGE.mix, tokens=192, micro_batch_tokens=64, rope=position)
    for device in ("cpu", "cuda"):
        run_stage(stage, wide, tmp_path / device / "one", seed=0, device=torch.device(device))

    losses = [losses_of(tmp_path / device / "one") for device in ("cpu", "cuda")]
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    exported = load_file(tmp_path / "cuda" / "one" / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}
    moments = load_file(tmp_path / "cuda" / "one" / OPTIMIZER)
    assert {tensor.dtype for tensor in moments.values()} == {torch.float32}


@pytest.mark.gpu
def test_tables_are_fp32_in_training_on_cuda(wide, tmp_path, monkeypatch):
    tables = []
    true_build = stage_module._build

    def watched(*args, **kwargs):
        model, tokenizer = true_build(*args, **kwargs)
        model.base_model.rotary_emb.register_forward_hook(lambda module, inputs, out: tables.extend(out))
        return model, tokenizer

    monkeypatch.setattr(stage_module, "_build", watched)

    stage = build_stage(mix=STAGE.mix, tokens=64)
    run_stage(stage, wide, tmp_path / "one", seed=0, device=torch.device("cuda"))

    assert tables
    assert {table.dtype for table in tables} == {torch.float32}


@pytest.mark.gpu
def test_a_stage_on_cuda_resumes_from_its_checkpoint(wide, tmp_path, monkeypatch):
    device = torch.device("cuda")
    true_step = loop_module.start_step  # what a stage on one GPU calls
    calls = []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return true_step(*args, **kwargs)

    run_stage(STAGE, wide, tmp_path / "whole" / "one", seed=0, device=device)
    out = tmp_path / "killed" / "one"
    with monkeypatch.context() as patched:
        patched.setattr(loop_module, "start_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_stage(STAGE, wide, out, seed=0, device=device)

    run_stage(STAGE, wide, out, seed=0, device=device)

    # Sums on a GPU come in no fixed order, so not bit for bit.
    losses = [losses_of(folder) for folder in (out, tmp_path / "whole" / "one")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
