"""`precision: fp8` of a stage: what a recipe may say, and that whole stages train, resume and export with it."""

from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import unspool.training.stage as stage_module
from factory import build_model, build_stage, in_child, random_tokens, save_folder
from unspool.core.artifacts import read_manifest
from unspool.core.errors import ConfigError
from unspool.recipe.check_stages import EXPERIMENTAL, check_stages
from unspool.training.parallel.apply import check_fit

from .stage_runs import STAGE, assert_same_result, kill_after_step, metrics, run

FP8 = STAGE.model_copy(update={"precision": "fp8"})


def weights(out):
    return load_file(out / "model" / "model.safetensors")


def same_weights(one, other):
    return all(torch.equal(tensor, weights(other)[name]) for name, tensor in weights(one).items())


@pytest.fixture(scope="module")
def trained(materials, tmp_path_factory):
    """The same stage in bf16 (fp32 on a CPU) and in FP8."""
    out = tmp_path_factory.mktemp("trained")
    run(materials, out / "bf16" / "one")
    run(materials, out / "fp8" / "one", FP8)
    return out / "bf16" / "one", out / "fp8" / "one"


# What a recipe may say


def test_precision_is_bf16_unless_said_otherwise():
    assert (build_stage().precision, build_stage().bf16_layers) == ("bf16", 0)
    assert build_stage(precision="fp8", bf16_layers=1).bf16_layers == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precision": "fp16"}, "Input should be 'bf16' or 'fp8'"),
        ({"bf16_layers": 1}, "it needs precision fp8; set it, or remove bf16_layers"),
        ({"precision": "fp8", "mlp_tiles": 40}, "needs a mlp_tiles that is a multiple of 16 tokens; set it to 32, or"),
        ({"precision": "fp8", "mlp_tiles": 4}, "multiple of 16 tokens; set it to 16, or"),
        (
            {"precision": "fp8", "context_length": 40, "batch_tokens": 40, "tokens": 40},
            "needs a context_length that is a multiple of 16 tokens; set it to 32, or precision to bf16",
        ),
        (
            {"precision": "fp8", "attention_distillation": {"datasets": "long", "after": 1, "after_lr": 1e-3}},
            "precision fp8 cannot be combined with attention_distillation; remove one of them",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ValidationError) as refused:
        build_stage(**settings)
    assert message in str(refused.value)


@pytest.fixture(autouse=True)
def experiment(monkeypatch):
    monkeypatch.setenv(EXPERIMENTAL, "fp8")


def context_of(folder, stage, device="cpu"):
    ranks = SimpleNamespace(device=torch.device(device))
    return SimpleNamespace(model=str(folder), recipe=SimpleNamespace(stages=[stage]), ranks=ranks)


def refusal(folder, stage, device="cpu"):
    with pytest.raises(ConfigError) as refused:
        check_stages(context_of(folder, stage, device))
    return str(refused.value)


def test_fp8_must_be_asked_for_as_an_experiment(tmp_path, monkeypatch):
    folder = save_folder(tmp_path / "model", build_model())
    for others in (None, "", "fp16,fp4"):
        monkeypatch.delenv(EXPERIMENTAL) if others is None else monkeypatch.setenv(EXPERIMENTAL, others)
        assert refusal(folder, FP8) == (
            "stage one: precision fp8 is an experiment: its speed and quality are not measured yet. Set the "
            "environment variable UNSPOOL_EXPERIMENTAL=fp8 to try it, or precision to bf16."
        )
    monkeypatch.setenv(EXPERIMENTAL, "fp4,fp8")
    check_stages(context_of(folder, FP8))
    monkeypatch.delenv(EXPERIMENTAL)
    check_stages(context_of(folder, STAGE))


def test_a_model_that_does_not_fit_is_refused_before_any_work(tmp_path):
    folder = save_folder(tmp_path / "model", build_model(intermediate_size=40))
    wanted = (
        "stage one: precision fp8: layer 0 of LlamaForCausalLM has mlp.gate_proj of 32 × 40, and FP8 products need "
        "multiples of 16; set precision to bf16."
    )
    assert refusal(folder, FP8) == wanted
    assert refusal(folder, FP8.model_copy(update={"bf16_layers": 1})).startswith("stage one: bf16_layers=1 at either")


def test_a_device_that_does_not_fit_is_refused_before_any_work(tmp_path):
    assert refusal(tmp_path, FP8, "mps") == (
        "stage one: precision fp8 needs an NVIDIA GPU or a CPU, not mps; set precision to bf16."
    )


def test_several_ranks_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="precision fp8 is not supported on several devices yet; set it to bf16"):
        check_fit(FP8, str(tmp_path), {}, world_size=2)


# Whole stages


def test_a_stage_in_fp8_learns_as_one_in_bf16_and_not_the_same(trained):
    plain, fp8 = ([line["loss"] for line in metrics(out) if "loss" in line] for out in trained)
    assert len(fp8) == 6 and plain != fp8
    assert all(abs(one - other) < 0.1 for one, other in zip(plain, fp8, strict=True)), (plain, fp8)


def test_finished_stages_in_bf16_stay_finished_and_fp8_restarts_them(trained, materials, capsys):
    plain, fp8 = (read_manifest(out)["settings"]["stage"] for out in trained)
    assert not {"precision", "bf16_layers"} & plain.keys()
    assert fp8 == plain | {"precision": "fp8"}
    before = [(out / "model" / "model.safetensors").stat().st_mtime_ns for out in trained]
    run(materials, trained[0])
    run(materials, trained[1], FP8)
    assert before == [(out / "model" / "model.safetensors").stat().st_mtime_ns for out in trained]


def test_a_killed_stage_resumes_with_the_same_bits(materials, trained, tmp_path, monkeypatch):
    out = tmp_path / "one"
    with monkeypatch.context() as patched:
        kill_after_step(3)(patched.setattr)
        assert in_child(lambda: run(materials, out, FP8)) == -9
    run(materials, out, FP8)
    assert_same_result(out, trained[1])


@pytest.mark.parametrize(
    "settings",
    [
        {"activation_checkpointing": "full", "layers_per_checkpoint": 2, "offload": True},
        {"activation_checkpointing": "keep-attention", "layers_per_checkpoint": 2},
        {"activation_checkpointing": "keep-attention", "keep_products": 2, "keep_on_host": 1},
    ],
    ids=str,
)
def test_memory_settings_do_not_change_the_result(settings, materials, trained, tmp_path):
    run(materials, tmp_path / "one", FP8.model_copy(update=settings))
    assert same_weights(tmp_path / "one", trained[1])


def test_micro_batches_only_change_the_scales(materials, trained, tmp_path):
    run(materials, tmp_path / "one", FP8.model_copy(update={"micro_batch_tokens": 64}))
    together, apart = ([line["loss"] for line in metrics(out)] for out in (tmp_path / "one", trained[1]))
    assert max(abs(one - other) for one, other in zip(together, apart, strict=True)) < 0.05


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": {"states": "8bit"}},
        {"optimizer": {"weights": "bf16", "states": "8bit", "step": "in-backward"}, "batch_tokens": 32},
    ],
    ids=str,
)
def test_other_optimizers_train_in_fp8(settings, materials, tmp_path):
    stage = build_stage(precision="fp8", activation_checkpointing="full", **settings)
    run(materials, tmp_path / "one", stage)
    losses = [line["loss"] for line in metrics(tmp_path / "one")]
    assert losses[-1] < losses[0]


def test_bf16_layers_reach_the_model(materials, tmp_path, monkeypatch):
    seen = []
    right = stage_module.use_fp8
    monkeypatch.setattr(stage_module, "use_fp8", lambda model, **given: (seen.append(given), right(model))[1])
    run(materials, tmp_path / "one", FP8.model_copy(update={"bf16_layers": 1}))
    assert seen == [{"bf16_layers": 1}]


def test_the_export_holds_the_master_weights(trained):
    """Loaded without Unspool, the model computes in the precision of its reader."""
    out = trained[1]
    model = AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32)
    assert {tensor.dtype for tensor in weights(out).values()} == {torch.float32}
    rounded = [float(tensor.to(torch.float8_e4m3fn).float().sub(tensor).norm()) for tensor in weights(out).values()]
    assert all(rounded), "the weights are those of a cast"
    assert model(input_ids=random_tokens(40)).logits.isfinite().all()
