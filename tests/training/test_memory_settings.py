"""Memory settings of a stage: what a recipe may say, and that a stage's result does not depend on them."""

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from factory import CPU, build_stage, random_row, save_folder, save_rows
from unspool.core.artifacts import read_manifest
from unspool.models.memory.policy import MemoryPolicy
from unspool.training.stage import StageInputs, run_stage

SETTINGS = {
    "activation_checkpointing": "keep-attention",
    "layers_per_checkpoint": 2,
    "offload": True,
    "mlp_tiles": "10",
    "attention_heads_at_once": 1,
}


@pytest.fixture(scope="module")
def materials(tmp_path_factory) -> StageInputs:
    folder = tmp_path_factory.mktemp("materials")
    rows = save_rows(folder / "rows", [random_row((20, 12), seed) for seed in range(6)])
    return StageInputs(model=str(save_folder(folder / "model")), datasets={"long": rows})


@pytest.fixture(scope="module")
def plain(materials, tmp_path_factory):
    out = tmp_path_factory.mktemp("plain") / "one"
    run_stage(build_stage(), materials, out, seed=0, device=CPU)
    return out


def weights(out):
    return load_file(out / "model" / "model.safetensors")


def test_what_a_recipe_says_reaches_the_model():
    assert build_stage().memory == MemoryPolicy()
    assert build_stage(**SETTINGS).memory == MemoryPolicy(
        activation_checkpointing="keep-attention",
        layers_per_checkpoint=2,
        offload=True,
        mlp_tiles=10,
        attention_heads_at_once=1,
    )


def test_a_stage_with_all_settings_ends_with_the_same_weights(materials, plain, tmp_path):
    run_stage(build_stage(**SETTINGS), materials, tmp_path / "one", seed=0, device=CPU)

    found, wanted = weights(tmp_path / "one"), weights(plain)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def test_a_finished_stage_is_not_trained_again_for_other_memory_settings(materials, plain, capsys):
    before = read_manifest(plain)

    run_stage(build_stage(**SETTINGS), materials, plain, seed=0, device=CPU)
    assert "up to date" in capsys.readouterr().err
    assert read_manifest(plain) == before


def test_a_stage_finished_before_there_were_other_memory_settings_is_still_up_to_date(plain):
    stage = read_manifest(plain)["settings"]["stage"]

    assert stage["activation_checkpointing"] == "none"
    assert not {"layers_per_checkpoint", "offload", "mlp_tiles", "attention_heads_at_once"} & stage.keys()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"offload": True},
            "offload needs checkpoints.*set activation_checkpointing to full or keep-attention",
        ),
        (
            {"layers_per_checkpoint": 4},
            "layers_per_checkpoint=4.*set activation_checkpointing to full or keep-attention",
        ),
        ({"activation_checkpointing": "some"}, "'none', 'keep-attention' or 'full'"),
        ({"attention_heads_at_once": 0}, "greater than or equal to 1"),
        ({"mlp_tiles": 0}, "a size must be between 1"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_to_do(settings, sentence):
    with pytest.raises(ValidationError, match=sentence):
        build_stage(**settings)
