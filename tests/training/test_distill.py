"""A stage with a attention_distillation: what it brings, what it leaves alone, and that kills change nothing."""

import json
import os
import signal
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from factory import CPU, build_model, build_stage, dying_at, in_child, save_folder, save_rows
from unspool.core.artifacts import read_manifest
from unspool.core.errors import ConfigError, UnspoolError
from unspool.data.packing.row import IGNORE
from unspool.data.packing.store import open_rows
from unspool.models.config import NewModel
from unspool.models.load import load_model
from unspool.models.loss import read_head, summed_loss
from unspool.models.rotary import apply_rope
from unspool.recipe.load import load_recipe
from unspool.recipe.run import open_run, stage_inputs
from unspool.training.checkpoint.resume import OPTIMIZER
from unspool.training.distill import distill as distill_module
from unspool.training.distill.distill import FILE, WEIGHTS, build_distillation, check_distillation
from unspool.training.optim.updater import build_updater
from unspool.training.schedule import StoppedError
from unspool.training.stage import StageInputs

from .stage_runs import SHORT, STAGE, assert_same_result, kill_after_step, run

TINY = str(files("unspool") / "assets" / "tiny-base")
DISTILLATION = {"datasets": "short", "before": 3, "after": 2, "batch_tokens": 32, "lr": 1e-2}
WITH = build_stage(
    **STAGE.model_dump(mode="json", exclude={"attention_distillation"}) | {"attention_distillation": DISTILLATION}
)
# Queries and keys are not trained, so no checkpoint holds them.
FROZEN = build_stage(**WITH.model_dump(mode="json") | {"lr_overrides": {"q_proj": 0, "k_proj": 0}})


def changed(stage, **changes):
    return build_stage(**stage.model_dump(mode="json") | {"attention_distillation": DISTILLATION | changes})


@pytest.fixture(scope="session")
def inputs(materials) -> StageInputs:
    return replace(materials, attention_distillation={"short": materials.datasets["short"]})


@pytest.fixture(scope="session")
def distilled(inputs, tmp_path_factory) -> dict[str, Path]:
    """The result of each stage when nothing disturbs it."""
    folder = tmp_path_factory.mktemp("distilled")
    for name, stage in (("trained", WITH), ("frozen", FROZEN)):
        run(inputs, folder / name / "one", stage)
    return {name: folder / name / "one" for name in ("trained", "frozen")}


def lines(out: Path) -> list[dict]:
    found = [json.loads(line) for line in (out / FILE).read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in found]


# What it brings


@torch.no_grad()
def loss_inside(model, rows) -> float:
    """Mean over the last rows, which the distillation below does not come to."""
    total = 0.0
    for index in range(40, 48):
        tokens = torch.from_numpy(rows[index].tokens.astype(np.int64))
        hidden = model.base_model(
            input_ids=tokens[None], position_ids=torch.arange(256)[None], doc_lens=(256,), use_cache=False
        ).last_hidden_state[0]
        labels = tokens.roll(-1)
        labels[-1] = IGNORE
        total += float(summed_loss(hidden, read_head(model), labels)[0])
    return total / (8 * 255)


def test_the_shipped_model_gets_back_most_of_what_new_positions_cost_it(text_rows, tmp_path, monkeypatch):
    rows = open_rows(text_rows)
    stage = build_stage(
        rope={"method": "abf", "base": 5e5},
        context_length=2048,
        batch_tokens=2048,
        tokens=2048,
        attention_distillation={"datasets": "short", "before": 16, "batch_tokens": 512, "lr": 4e-3},
    )
    model = load_model(TINY, device=CPU, dtype=torch.float32)
    untouched = loss_inside(model, rows)
    apply_rope(model, stage.rope, stage.context_length)
    disturbed = loss_inside(model, rows)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    distillation = build_distillation(
        stage,
        model,
        build_updater(stage, model),
        {"short": rows},
        tmp_path,
        seed=0,
        order="",
        load_teacher=lambda: load_model(TINY, device=CPU, dtype=torch.float32),
    )
    # The rows that the loss is measured on are kept out.
    monkeypatch.setattr(type(distillation.mix), "slot", lambda mix, index: [("short", index % 40)])

    distillation.before()

    found = [line["loss"] for line in lines(tmp_path)]
    assert len(found) == 16 and found[-1] < found[0] / 2
    assert disturbed - untouched > 0.2
    assert loss_inside(model, rows) - untouched < (disturbed - untouched) / 2
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, start[name])}
    assert moved == {name for name in start if "q_proj" in name or "k_proj" in name}


def test_lines_tell_phase_step_loss_and_rate(distilled):
    found = lines(distilled["trained"])

    assert [(line["phase"], line["step"], line["tokens"]) for line in found] == [
        ("before", 1, 32),
        ("before", 2, 64),
        ("before", 3, 96),
        ("after", 1, 32),
        ("after", 2, 64),
    ]
    # Warm-up by quarters under a cosine; afterwards a quarter of the rate.
    cosines = [1.0, 0.75, 0.25, 1.0, 0.5]
    quarters = [0.25, 0.5, 0.75, 0.25, 0.5]
    rates = [1e-2, 1e-2, 1e-2, 2.5e-3, 2.5e-3]
    wanted = [rate * cosine * quarter for rate, cosine, quarter in zip(rates, cosines, quarters, strict=True)]
    assert [line["lr"] for line in found] == pytest.approx(wanted)
    assert all(line["loss"] > 0 for line in found)


def test_the_bar_says_how_far_it_is(inputs, tmp_path, capsys):
    run(inputs, tmp_path / "one", WITH)

    said = capsys.readouterr().err
    assert "stage one: distillation before training, 3 steps, 96 tokens\n" in said
    assert "stage one attention distillation: 3/3  attention KL 0." in said
    assert "stage one attention distillation: 2/2  attention KL 0." in said


def test_passes_of_fewer_tokens_change_nothing_but_rounding(inputs, distilled, tmp_path, monkeypatch):
    monkeypatch.setattr(distill_module, "TOKENS_AT_ONCE", 16)
    calls, true = [], distill_module.compare_layers
    monkeypatch.setattr(distill_module, "compare_layers", lambda *args: calls.append(1) or true(*args))

    run(inputs, tmp_path / "one", WITH)

    assert len(calls) == 10
    losses = [line["loss"] for line in lines(tmp_path / "one")]
    assert losses == pytest.approx([line["loss"] for line in lines(distilled["trained"])], rel=1e-4)


def test_the_teacher_is_what_the_stage_starts_from(inputs, distilled, tmp_path):
    """With the very positions of the stage before, there is nothing to fit, and nothing moves."""
    first = distilled["trained"]
    second = build_stage(**WITH.model_dump(mode="json") | {"name": "two", "lr_overrides": {"q_proj": 0, "k_proj": 0}})

    run(replace(inputs, model=str(first / "model"), moments=first / OPTIMIZER), tmp_path / "two", second)

    assert [line["loss"] for line in lines(tmp_path / "two")][:3] == [0, 0, 0]
    name = "model.layers.0.self_attn.q_proj.weight"
    start, found = (load_file(folder / "model" / "model.safetensors") for folder in (first, tmp_path / "two"))
    assert not torch.equal(found["lm_head.weight"], start["lm_head.weight"])
    # Norms were trained, so after training there is something to fit.
    assert lines(tmp_path / "two")[3]["loss"] > 0 and not torch.equal(found[name], start[name])


# What it leaves alone


def test_moments_handed_on_are_those_of_training_and_only_queries_and_keys_move_after_it(inputs, distilled, tmp_path):
    """On a CPU the file holds moments only, since the export is exact."""
    run(inputs, tmp_path / "one", changed(WITH, after=0))

    assert (tmp_path / "one" / OPTIMIZER).read_bytes() == (distilled["trained"] / OPTIMIZER).read_bytes()
    without, found = (
        load_file(folder / "model" / "model.safetensors") for folder in (tmp_path / "one", distilled["trained"])
    )
    moved = {name for name in found if not torch.equal(found[name], without[name])}
    assert moved == {name for name in found if "q_proj" in name or "k_proj" in name}


def test_queries_and_keys_that_are_not_trained_are_distilled_all_the_same(inputs, distilled):
    start = build_model().state_dict()
    found = load_file(distilled["frozen"] / "model" / "model.safetensors")

    assert not torch.equal(
        found["model.layers.0.self_attn.q_proj.weight"], start["model.layers.0.self_attn.q_proj.weight"]
    )


def test_it_works_on_weights_in_bf16_that_are_updated_in_the_backward_pass(inputs, tmp_path):
    optimizer = {"weights": "bf16", "states": "8bit", "step": "in-backward"}
    stage = build_stage(**WITH.model_dump(mode="json") | {"optimizer": optimizer, "micro_batch_tokens": 64})

    run(inputs, tmp_path / "one", stage)

    found = load_file(tmp_path / "one" / "model" / "model.safetensors")
    start = build_model().state_dict()
    name = "model.layers.0.self_attn.k_proj.weight"
    assert bool(found[name].isfinite().all()) and not torch.equal(found[name], start[name].bfloat16().float())
    assert [line["loss"] > 0 for line in lines(tmp_path / "one")] == [True] * 5


def test_after_without_before_needs_no_change_of_positions(inputs, tmp_path):
    stage = build_stage(mix={"short": 1.0}, attention_distillation={"datasets": "short", "after": 2, "lr": 1e-3})

    run(inputs, tmp_path / "one", stage)

    assert [line["phase"] for line in lines(tmp_path / "one")] == ["after", "after"]


# Killed


def kill_in_distillation(number: int):
    """Before the `number`-th step of both distillations together."""
    return lambda patch: patch(distill_module, "compare_layers", dying_at(distill_module.compare_layers, number))


KILLS = {
    "in the distillation before training": kill_in_distillation(2),
    "when it is done and not kept yet": lambda patch: patch(distill_module, "save_file", dying_at(lambda: None, 1)),
    "before the first step": kill_after_step(0),
    "after step 3": kill_after_step(3),
    "in the distillation after training": kill_in_distillation(5),
}


@pytest.mark.parametrize("which", ["trained", "frozen"])
@pytest.mark.parametrize("moment", KILLS)
def test_a_killed_stage_ends_with_the_same_bits(moment, which, inputs, distilled, tmp_path, monkeypatch):
    out = tmp_path / "one"
    stage = {"trained": WITH, "frozen": FROZEN}[which]
    with monkeypatch.context() as patched:
        KILLS[moment](patched.setattr)
        assert in_child(lambda: run(inputs, out, stage)) == -9
    assert not out.exists()

    run(inputs, out, stage)

    assert_same_result(out, distilled[which])
    assert lines(out) == lines(distilled[which])


def test_what_was_made_before_training_is_not_made_again(inputs, tmp_path, monkeypatch):
    out, calls = tmp_path / "one", []
    with monkeypatch.context() as patched:
        kill_after_step(3)(patched.setattr)
        in_child(lambda: run(inputs, out, WITH))
    true = distill_module.compare_layers
    monkeypatch.setattr(distill_module, "compare_layers", lambda *args: calls.append(1) or true(*args))

    run(inputs, out, WITH)

    assert len(calls) == 2


def test_asked_to_stop_it_says_that_it_begins_anew_and_ends_with_the_same_bits(
    inputs, distilled, tmp_path, monkeypatch, capsys
):
    true = distill_module.compare_layers
    with monkeypatch.context() as patched, pytest.raises(StoppedError) as stopped:
        patched.setattr(
            distill_module, "compare_layers", lambda *args: os.kill(os.getpid(), signal.SIGTERM) or true(*args)
        )
        run(inputs, tmp_path / "one", WITH)
    assert stopped.value.code == 143
    assert (
        "stage one: stopped by SIGTERM; rerunning the same command restarts this distillation\n"
        in capsys.readouterr().err
    )

    run(inputs, tmp_path / "one", WITH)

    assert_same_result(tmp_path / "one", distilled["trained"])
    assert lines(tmp_path / "one") == lines(distilled["trained"])


def test_kept_weights_that_are_damaged_are_made_again(inputs, distilled, tmp_path, monkeypatch):
    out = tmp_path / "one"
    with monkeypatch.context() as patched:
        kill_after_step(3)(patched.setattr)
        in_child(lambda: run(inputs, out, FROZEN))
    path = tmp_path / "one.work" / WEIGHTS
    path.write_bytes(path.read_bytes()[:100])

    run(inputs, out, FROZEN)

    assert_same_result(out, distilled["frozen"])


# Redone or not


def test_another_distillation_makes_the_stage_anew_and_none_leaves_its_identity_as_it_was(
    inputs, distilled, never_killed, capsys
):
    run(inputs, distilled["trained"], WITH)
    assert capsys.readouterr().err == "stage one: up to date\n"
    assert read_manifest(distilled["trained"])["settings"]["stage"]["attention_distillation"]["before"] == 3
    assert "attention_distillation" not in read_manifest(never_killed)["settings"]["stage"]


def test_other_rows_of_the_distillation_make_the_stage_anew(inputs, tmp_path, capsys):
    own = build_stage(mix={"long": 1.0}, rope={"method": "abf", "base": 5e5}, attention_distillation=DISTILLATION)
    one = replace(inputs, datasets={"long": inputs.datasets["long"]})
    run(one, tmp_path / "one", own)

    run(replace(one, attention_distillation={"short": save_rows(tmp_path / "rows", SHORT[:4])}), tmp_path / "one", own)

    assert "(changed inputs: rows short)" in capsys.readouterr().err


# Refusals


def test_rows_beyond_the_old_context_are_refused_with_both_lengths(inputs, tmp_path):
    model = save_folder(tmp_path / "model", build_model(max_position_embeddings=8))

    with pytest.raises(
        ConfigError, match=r"datasets short has rows of 16, .* context length 8 .*; use rows of at most 8"
    ):
        run(replace(inputs, model=str(model)), tmp_path / "one", WITH)

    assert list(tmp_path.iterdir()) == [model], "work had begun"


def test_a_run_refuses_rows_beyond_the_old_context_before_any_work(tmp_path):
    recipe = tmp_path / "mini.yaml"
    recipe.write_text(
        f"name: mini\nmodel: {TINY}\nout: {tmp_path / 'out'}\n"
        "sources: {books: {kind: jsonl, path: asset:demo/train.jsonl.zst}}\n"
        "datasets: {long: {from: books, seq_len: 2K}, short: {from: books, seq_len: 256}}\n"
        "stages:\n  - {name: one, context_length: 2K, rope: {method: abf, base: 5e5}, mix: {long: 1}, tokens: 2K, "
        "batch_tokens: 2K, lr: 1e-3, attention_distillation: {datasets: short, before: 8, lr: 1e-3}}\n"
    )

    assert stage_inputs(open_run(load_recipe(recipe)), load_recipe(recipe).recipe.stages[0]).attention_distillation == {
        "short": tmp_path / "out" / "datasets" / "short"
    }
    with pytest.raises(ConfigError, match=r"datasets long has rows of 2K, .* context length 256"):
        open_run(load_recipe(recipe, ["stages.one.attention_distillation.datasets=long"]))


def test_several_ranks_and_new_models_are_refused():
    new = NewModel(size="4M", tokenizer=TINY, context_length=64)

    with pytest.raises(
        ConfigError, match=r"stage one: attention_distillation is not supported on several ranks \(here 2\)"
    ):
        check_distillation(WITH, TINY, {}, world_size=2)
    with pytest.raises(
        ConfigError, match="stage one: attention_distillation needs a trained model, but this model is new"
    ):
        check_distillation(WITH, new, {}, world_size=1)
    check_distillation(STAGE, new, {}, world_size=2)


def test_a_batch_that_does_not_fit_its_rows_is_refused(inputs, tmp_path):
    with pytest.raises(
        ConfigError, match=r"attention_distillation\.batch_tokens 40 is not a multiple of the row length 16"
    ):
        run(inputs, tmp_path / "one", changed(WITH, batch_tokens=40))


def test_a_loss_that_is_not_a_number_stops_with_the_way_out(inputs, tmp_path):
    with pytest.raises(
        UnspoolError, match=r"stage one: distillation step 2: .* lower stages\.one\.attention_distillation\.lr"
    ):
        run(inputs, tmp_path / "one", changed(WITH, lr=1e30))
