"""What a stage starts from: earlier moments, tokens that its rows bring, random weights."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from factory import (
    CPU,
    build_stage,
    in_child,
    random_row,
    save_rows,
)
from unspool.core.errors import ConfigError
from unspool.data.strategies.utk.special_tokens import KNOTS, knot_ids
from unspool.models.config import NewModel
from unspool.models.export import save_model
from unspool.models.load import load_model
from unspool.models.tokenizer import load_tokenizer
from unspool.rope.methods import ABF
from unspool.training.checkpoint.resume import OPTIMIZER
from unspool.training.parallel.apply import needs_full_weights
from unspool.training.stage import StageInputs

from .stage_runs import STAGE, assert_same_result, kill_after_step, metrics, run


def test_moments_of_an_earlier_stage_are_carried_on_and_only_if_given(materials, never_killed, tmp_path):
    start = str(never_killed / "model")
    cold = StageInputs(model=start, datasets=materials.datasets)
    warm = StageInputs(model=start, datasets=materials.datasets, moments=never_killed / OPTIMIZER)

    run(cold, tmp_path / "cold" / "one")
    run(warm, tmp_path / "warm" / "one")

    name = "model.norm.weight/step"
    assert float(load_file(tmp_path / "cold" / "one" / OPTIMIZER)[name]) == 6
    assert float(load_file(tmp_path / "warm" / "one" / OPTIMIZER)[name]) == 12
    # A stage that goes on from another draws the same rows in another order, so not even its first step is the same.
    losses = [metrics(tmp_path / kind / "one")[0]["loss"] for kind in ("cold", "warm")]
    assert losses[0] != losses[1]


def test_a_stage_may_start_from_zero_moments_and_still_draw_new_rows(materials, never_killed, tmp_path):
    inputs = StageInputs(
        model=str(never_killed / "model"), datasets=materials.datasets, moments=never_killed / OPTIMIZER
    )

    run(inputs, tmp_path / "keep" / "one")
    run(inputs, tmp_path / "reset" / "one", STAGE.model_copy(update={"optimizer_state": "reset"}))

    assert float(load_file(tmp_path / "reset" / "one" / OPTIMIZER)["model.norm.weight/step"]) == 6
    first = [metrics(tmp_path / kind / "one")[0]["loss"] for kind in ("keep", "reset")]
    assert first[0] == first[1], "the same rows and weights"
    losses = [metrics(tmp_path / kind / "one")[1]["loss"] for kind in ("keep", "reset")]
    assert losses[0] != losses[1], "the first update differs"


def test_carried_moments_survive_a_kill(materials, never_killed, tmp_path, monkeypatch):
    inputs = StageInputs(
        model=str(never_killed / "model"), datasets=materials.datasets, moments=never_killed / OPTIMIZER
    )
    run(inputs, tmp_path / "whole" / "one")
    out = tmp_path / "killed" / "one"
    for number in (1, 3):
        with monkeypatch.context() as patched:
            kill_after_step(number)(patched.setattr)
            assert in_child(lambda: run(inputs, out)) == -9

    run(inputs, out)

    assert_same_result(out, tmp_path / "whole" / "one")


def test_tangled_rows_bring_their_tokens_which_start_at_the_mean(materials, tmp_path):
    known = 281
    rows = [random_row((32,), seed, attention="full") for seed in range(3)]
    for row in rows:
        row.tokens[:9] = np.arange(known, known + 9)
    tangled = save_rows(tmp_path / "tangled", rows, added_tokens=dict(zip(KNOTS, range(known, known + 9), strict=True)))
    inputs = StageInputs(model=materials.model, datasets={"long": tangled})
    # So small a rate that what comes out is what went in.
    stage = build_stage(tokens=64, lr=1e-12, weight_decay=0)

    run(inputs, tmp_path / "one", stage)

    folder = tmp_path / "one" / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_tokens_to_ids(list(KNOTS)) == list(range(known, known + 9))
    before, after = (AutoModelForCausalLM.from_pretrained(place) for place in (materials.model, folder))
    for layer in ("get_input_embeddings", "get_output_embeddings"):
        old, new = (getattr(model, layer)().weight.detach() for model in (before, after))
        torch.testing.assert_close(new[:known], old[:known])
        torch.testing.assert_close(new[known : known + 9], old[:known].mean(dim=0).expand(9, -1))


def reserve_tokens(folder: Path, out: Path, count: int = 19) -> str:
    """A model whose tokenizer keeps some of its last tokens in reserve."""
    shutil.copytree(folder, out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [f"<|reserved_special_token_{number}|>" for number in range(count)]}
    )
    tokenizer.save_pretrained(out)
    return str(out)


def tangled_rows(folder: Path, knots: dict[str, int]) -> Path:
    rows = [random_row((32,), seed, attention="full") for seed in range(3)]
    for row in rows:
        row.tokens[: len(knots)] = list(knots.values())
    return save_rows(folder, rows, added_tokens=knots)


def test_tokens_in_reserve_become_knots_that_later_stages_find_and_leave_as_they_are(materials, tmp_path):
    model = reserve_tokens(Path(materials.model), tmp_path / "model")
    known = 281
    knots = knot_ids(AutoTokenizer.from_pretrained(model))
    assert list(knots.values()) == [*range(known + 18, known + 9, -1)]
    rows = {"long": tangled_rows(tmp_path / "tangled", knots)}
    still = build_stage(tokens=64, lr=1e-12, weight_decay=0)

    run(StageInputs(model=model, datasets=rows), tmp_path / "one", still)
    before, after = (AutoModelForCausalLM.from_pretrained(place) for place in (model, tmp_path / "one" / "model"))
    old, new = (each.get_input_embeddings().weight.detach() for each in (before, after))
    assert old.shape == new.shape, "nothing is resized"
    torch.testing.assert_close(new[[*knots.values()]], old[:known].mean(dim=0).expand(9, -1))
    torch.testing.assert_close(new[: known + 10], old[: known + 10])

    # Trained for a while, and then in a second stage that changes nothing.
    run(
        StageInputs(model=str(tmp_path / "one" / "model"), datasets=rows),
        tmp_path / "two",
        build_stage(tokens=192, lr=1e-2),
    )
    run(StageInputs(model=str(tmp_path / "two" / "model"), datasets=rows), tmp_path / "three", still)
    two, three = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name / "model").get_input_embeddings().weight.detach()
        for name in ("two", "three")
    )
    assert not torch.allclose(two[[*knots.values()]], new[[*knots.values()]], atol=1e-4)
    torch.testing.assert_close(three, two)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "three" / "model")
    assert tokenizer.convert_tokens_to_ids(list(knots)) == list(knots.values())


def test_rows_that_were_tangled_for_another_tokenizer_are_refused(materials, tmp_path):
    model = reserve_tokens(Path(materials.model), tmp_path / "model")
    knots = knot_ids(AutoTokenizer.from_pretrained(materials.model))
    rows = {"plain": materials.datasets["long"], "knotty": tangled_rows(tmp_path / "tangled", knots)}

    with pytest.raises(ConfigError, match=r"dataset knotty: <\|knot:D\|> is token 281 there, but token 299 of"):
        run(StageInputs(model=model, datasets=rows), tmp_path / "one", build_stage(mix={"knotty": 1.0}))


def test_a_model_of_random_weights_is_trained_and_depends_on_the_seed(materials, tmp_path):
    new = NewModel.model_validate({"size": "4M", "tokenizer": materials.model, "context_length": 32})
    inputs = StageInputs(model=new, datasets=materials.datasets)
    stage = build_stage(mix=STAGE.mix, tokens=64)
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        run(inputs, tmp_path / name, stage, seed)

    first, again, other = (
        (tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("first", "again", "other")
    )
    assert first == again
    assert first != other


def test_recompute_changes_memory_not_results(materials, never_killed, tmp_path):
    run(materials, tmp_path / "one", STAGE.model_copy(update={"activation_checkpointing": "full"}))

    found, wanted = (load_file(out / "model" / "model.safetensors") for out in (tmp_path / "one", never_killed))
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, msg=name)


def test_a_gain_of_attention_scores_is_applied_once_though_the_stage_was_killed(materials, tmp_path, monkeypatch):
    stage = STAGE.model_copy(update={"rope": ABF(base=5e5, attention_scale=1.5)})
    by_hand = load_model(str(materials.model), device=CPU, dtype=torch.float32)
    with torch.no_grad():
        for layer in by_hand.model.layers:
            layer.self_attn.q_proj.weight *= 1.5
    save_model(by_hand, load_tokenizer(str(materials.model)), tmp_path / "scaled", dtype=torch.float32)
    run(replace(materials, model=str(tmp_path / "scaled")), tmp_path / "hand" / "one")
    run(materials, tmp_path / "whole" / "one", stage)

    with monkeypatch.context() as patched:
        kill_after_step(3)(patched.setattr)
        assert in_child(lambda: run(materials, tmp_path / "killed" / "one", stage)) == -9
    run(materials, tmp_path / "killed" / "one", stage)

    assert_same_result(tmp_path / "killed" / "one", tmp_path / "whole" / "one")
    losses = [[line["loss"] for line in metrics(tmp_path / kind / "one")] for kind in ("hand", "whole")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_gain_is_folded_into_whole_weights_before_they_are_sharded():
    scaled = {"method": "abf", "base": 5e5, "attention_scale": 1.5}
    needs = [needs_full_weights(build_stage(rope=rope), {}) for rope in ({"method": "abf", "base": 5e5}, scaled)]
    assert needs == [False, True]
