"""A stage ends with the same weights however often it is killed, and is redone only for a reason, which it says."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from factory import (
    CPU,
    build_model,
    build_stage,
    count_file_events,
    dying_at,
    dying_if,
    in_child,
    in_child_dying_at_file_event,
    random_row,
    save_folder,
    save_rows,
)
from unspool.base.artefact import read_manifest
from unspool.base.errors import ConfigError, UnspoolError
from unspool.data.knots import KNOTS, knot_ids
from unspool.data.labels import labels
from unspool.data.mix import Mix
from unspool.model.scratch import NewModel
from unspool.train import checkpoint
from unspool.train import stage as stage_module
from unspool.train.checkpoint import OPTIMIZER
from unspool.train.schedule import learning_rate
from unspool.train.stage import METRICS, StageInputs, run_stage
from unspool.train.step import build_optimizer

LONG = [random_row((20, 12), seed, mask=0.3) for seed in range(7)]
SHORT = [random_row((16,), seed) for seed in range(10, 15)]
# Six steps of two slots, three checkpoints.
STAGE = build_stage(mix={"long": 0.6, "short": 0.4}, checkpoint_every=2, position={"method": "abf", "base": 5e5})


@pytest.fixture(scope="module")
def materials(tmp_path_factory) -> StageInputs:
    folder = tmp_path_factory.mktemp("materials")
    rows = {"long": save_rows(folder / "rows" / "long", LONG), "short": save_rows(folder / "rows" / "short", SHORT)}
    return StageInputs(model=str(save_folder(folder / "model")), rows=rows)


@pytest.fixture(scope="module")
def never_killed(materials, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "one"
    run(materials, out)
    return out


def run(materials: StageInputs, out: Path, stage=STAGE, seed: int = 0) -> None:
    run_stage(stage, materials, out, seed=seed, device=CPU)


def metrics(out: Path) -> list[dict]:
    """Without what the clock says."""
    lines = [json.loads(line) for line in (out / METRICS).read_text().splitlines()]
    return [{key: value for key, value in line.items() if "second" not in key} for line in lines]


def assert_same_result(out: Path, wanted: Path) -> None:
    for name in ("model/model.safetensors", "model/config.json", "model/tokenizer.json", OPTIMIZER):
        assert (out / name).read_bytes() == (wanted / name).read_bytes(), name
    assert metrics(out) == metrics(wanted)
    assert sorted(path.name for path in out.parent.iterdir()) == [out.name], "something was left behind"


# The result


def test_a_stage_trains_as_a_plain_loop_over_stock_transformers_does(materials, never_killed):
    """Every document alone, full logits, one mean per step, clipped, AdamW."""
    rows = {"long": LONG, "short": SHORT}
    mix = Mix(STAGE.mix, {"long": 7, "short": 5}, {"long": 32, "short": 16}, 32, 0)
    model = build_model(attention="eager", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    optimizer = build_optimizer(STAGE, model)
    losses = []
    for step in range(1, 7):
        total, count = torch.zeros(()), 0
        for name, index in [pick for slot in (2 * step - 2, 2 * step - 1) for pick in mix.slot(slot)]:
            row = rows[name][index]
            wanted = torch.from_numpy(labels(row.tokens, row.doc_lens, row.loss_mask))
            ids = torch.from_numpy(row.tokens.astype(np.int64))
            lens = row.doc_lens.tolist()
            for part, target in zip(torch.split(ids, lens), torch.split(wanted, lens), strict=True):
                total = total + functional.cross_entropy(model(part[None]).logits[0], target, reduction="sum")
                count += int((target != -100).sum())
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), STAGE.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(STAGE, step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item() / count)

    trained = AutoModelForCausalLM.from_pretrained(never_killed / "model")
    assert [line["loss"] for line in metrics(never_killed)] == pytest.approx(losses, rel=1e-5)
    start = build_model().state_dict()
    for name, tensor in trained.state_dict().items():
        # AdamW turns a rounding of an almost empty gradient into a whole step, so not every single weight can agree.
        moved = (tensor - start[name]).norm()
        assert (tensor - model.state_dict()[name]).norm() < 1e-2 * moved, name


def test_the_folder_holds_model_moments_metrics_and_manifest(never_killed):
    lines = [json.loads(line) for line in (never_killed / METRICS).read_text().splitlines()]

    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["tokens"] for line in lines] == [64 * step for step in range(1, 7)]
    assert [line["lr"] for line in lines] == [learning_rate(STAGE, step) for step in range(1, 7)]
    assert all(set(line["losses"]) <= {"long", "short"} for line in lines)
    assert all(line["seconds"] > 0 and line["grad_norm"] > 0 for line in lines)
    assert read_manifest(never_killed)["counts"] == {"steps": 6, "tokens": 384}
    config = json.loads((never_killed / "model" / "config.json").read_text())
    assert config["rope_parameters"]["rope_theta"] == 5e5


# Kills


def kill_after_step(number):
    return lambda patch: patch(stage_module, "train_step", dying_at(stage_module.train_step, number + 1))


KILLS = {
    "before any step": kill_after_step(0),
    "after step 1, before any checkpoint": kill_after_step(1),
    "after step 3": kill_after_step(3),
    "after step 5": kill_after_step(5),
    "while the first checkpoint is written": lambda patch: patch(
        checkpoint, "save_moments", dying_at(checkpoint.save_moments, 1)
    ),
    "while the last checkpoint is written": lambda patch: patch(
        checkpoint, "save_moments", dying_at(checkpoint.save_moments, 3)
    ),
    "while the model is exported": lambda patch: patch(stage_module, "save_moments", dying_at(lambda: None, 1)),
    "just before the folder appears": lambda patch: patch(
        Path, "rename", dying_if(Path.rename, lambda path, target: target.name == "one")
    ),
    "just after the folder appeared": lambda patch: patch(
        shutil, "rmtree", dying_if(shutil.rmtree, lambda path, **options: path.name == "one.work")
    ),
}


@pytest.mark.parametrize("moment", KILLS)
def test_a_killed_stage_resumes_and_ends_with_the_same_bits(moment, materials, never_killed, tmp_path, monkeypatch):
    out = tmp_path / "one"
    with monkeypatch.context() as patched:
        KILLS[moment](patched.setattr)
        assert in_child(lambda: run(materials, out)) == -9
    published = out.exists()

    run(materials, out)

    assert published == (moment == "just after the folder appeared")
    assert_same_result(out, never_killed)


def test_kills_at_random_moments_of_the_whole_stage_end_with_the_same_bits(materials, never_killed, tmp_path):
    events = count_file_events(lambda: run(materials, tmp_path / "counted" / "one"), tmp_path / "events")
    rng = np.random.default_rng(0)
    for part in range(3):
        out = tmp_path / f"part-{part}" / "one"
        # One kill somewhere in each third, and a second one soon after going on.
        first = int((part + rng.random()) * events / 3) + 1
        assert in_child_dying_at_file_event(lambda out=out: run(materials, out), first) == -9
        in_child_dying_at_file_event(lambda out=out: run(materials, out), int(rng.integers(1, events // 2)))

        run(materials, out)

        assert_same_result(out, never_killed)


def test_a_resumed_stage_says_where_it_goes_on_and_does_not_repeat_what_is_kept(
    materials, never_killed, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "one"
    with monkeypatch.context() as patched:
        kill_after_step(5)(patched.setattr)
        in_child(lambda: run(materials, out))
    steps = []
    true_step = stage_module.train_step
    monkeypatch.setattr(stage_module, "train_step", lambda *args: steps.append(1) or true_step(*args))

    run(materials, out)

    assert (
        "stage one: 6 steps, 384 tokens at 32 on cpu (not built yet, resuming after step 4)" in capsys.readouterr().err
    )
    assert len(steps) == 2


def test_work_of_another_configuration_is_thrown_away(materials, never_killed, tmp_path, monkeypatch, capsys):
    out = tmp_path / "one"
    other = STAGE.model_copy(update={"lr": 5e-3})
    with monkeypatch.context() as patched:
        kill_after_step(3)(patched.setattr)
        in_child(lambda: run(materials, out, other))
    assert (tmp_path / "one.work" / "checkpoints").is_dir()

    run(materials, out)

    assert "resuming" not in capsys.readouterr().err
    assert_same_result(out, never_killed)


def test_how_often_checkpoints_are_written_changes_no_bit_and_redoes_nothing(materials, never_killed, tmp_path, capsys):
    out = tmp_path / "one"
    rarely = STAGE.model_copy(update={"checkpoint_every": 100})

    run(materials, out, rarely)
    assert_same_result(out, never_killed)

    capsys.readouterr()
    run(materials, out, STAGE)
    assert capsys.readouterr().err == "stage one: up to date\n"


# Redone or not


@pytest.fixture
def finished(never_killed, tmp_path) -> Path:
    return Path(shutil.copytree(never_killed, tmp_path / "runs" / "one"))


def times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_a_finished_stage_is_left_alone(materials, finished, capsys):
    before = times(finished)

    run(materials, finished)

    assert capsys.readouterr().err == "stage one: up to date\n"
    assert times(finished) == before


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda inputs: {"stage": STAGE.model_copy(update={"lr": 2e-3})}, "(changed settings: stage)"),
        (lambda inputs: {"seed": 1}, "(changed settings: seed)"),
    ],
)
def test_a_changed_setting_redoes_the_stage_and_says_which(change, reason, materials, finished, never_killed, capsys):
    run(materials, finished, **change(materials))

    assert reason in capsys.readouterr().err
    name = "model/model.safetensors"
    assert (finished / name).read_bytes() != (never_killed / name).read_bytes()


def test_changed_rows_and_a_changed_model_redo_the_stage_and_say_which(materials, finished, tmp_path, capsys):
    rows = save_rows(tmp_path / "short", SHORT[:4])
    run(StageInputs(model=materials.model, rows=materials.rows | {"short": rows}), finished)
    assert "(changed inputs: rows short)" in capsys.readouterr().err

    model = save_folder(tmp_path / "model", build_model(seed=1))
    run(StageInputs(model=str(model), rows=materials.rows | {"short": rows}), finished)
    assert "(changed inputs: model)" in capsys.readouterr().err


def test_a_damaged_result_is_redone_and_the_same_again(materials, finished, never_killed, capsys):
    path = finished / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")

    run(materials, finished)

    assert "(file model/model.safetensors has changed)" in capsys.readouterr().err
    assert_same_result(finished, never_killed)


# What a stage starts from


def test_moments_of_an_earlier_stage_are_carried_on_and_only_if_given(materials, never_killed, tmp_path):
    start = str(never_killed / "model")
    cold = StageInputs(model=start, rows=materials.rows)
    warm = StageInputs(model=start, rows=materials.rows, moments=never_killed / OPTIMIZER)

    run(cold, tmp_path / "cold" / "one")
    run(warm, tmp_path / "warm" / "one")

    name = "model.norm.weight/step"
    assert float(load_file(tmp_path / "cold" / "one" / OPTIMIZER)[name]) == 6
    assert float(load_file(tmp_path / "warm" / "one" / OPTIMIZER)[name]) == 12
    # A stage that goes on from another draws the same rows in another order, so not even its first step is the same.
    losses = [metrics(tmp_path / kind / "one")[0]["loss"] for kind in ("cold", "warm")]
    assert losses[0] != losses[1]


def test_carried_moments_survive_a_kill(materials, never_killed, tmp_path, monkeypatch):
    inputs = StageInputs(model=str(never_killed / "model"), rows=materials.rows, moments=never_killed / OPTIMIZER)
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
    inputs = StageInputs(model=materials.model, rows={"long": tangled})
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

    run(StageInputs(model=model, rows=rows), tmp_path / "one", still)
    before, after = (AutoModelForCausalLM.from_pretrained(place) for place in (model, tmp_path / "one" / "model"))
    old, new = (each.get_input_embeddings().weight.detach() for each in (before, after))
    assert old.shape == new.shape, "nothing is resized"
    torch.testing.assert_close(new[[*knots.values()]], old[:known].mean(dim=0).expand(9, -1))
    torch.testing.assert_close(new[: known + 10], old[: known + 10])

    # Trained for a while, and then in a second stage that changes nothing.
    run(
        StageInputs(model=str(tmp_path / "one" / "model"), rows=rows),
        tmp_path / "two",
        build_stage(tokens=192, lr=1e-2),
    )
    run(StageInputs(model=str(tmp_path / "two" / "model"), rows=rows), tmp_path / "three", still)
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
    rows = {"plain": materials.rows["long"], "knotty": tangled_rows(tmp_path / "tangled", knots)}

    with pytest.raises(ConfigError, match=r"rows knotty: they hold <\|knot:D\|> as token 281, which is token 299 of"):
        run(StageInputs(model=model, rows=rows), tmp_path / "one", build_stage(mix={"knotty": 1.0}))


def test_a_model_of_random_weights_is_trained_and_depends_on_the_seed(materials, tmp_path):
    new = NewModel.model_validate({"size": "4M", "tokenizer": materials.model, "context": 32})
    inputs = StageInputs(model=new, rows=materials.rows)
    stage = build_stage(mix=STAGE.mix, tokens=64)
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        run(inputs, tmp_path / name, stage, seed)

    first, again, other = (
        (tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("first", "again", "other")
    )
    assert first == again
    assert first != other


def test_recompute_changes_memory_not_results(materials, never_killed, tmp_path):
    run(materials, tmp_path / "one", STAGE.model_copy(update={"recompute": "full"}))

    found, wanted = (load_file(out / "model" / "model.safetensors") for out in (tmp_path / "one", never_killed))
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, msg=name)


# Refusals


def test_a_step_that_is_not_a_number_stops_with_the_step_the_rows_and_the_way_out(materials, tmp_path):
    wild = STAGE.model_copy(update={"lr": 1e30})

    with pytest.raises(UnspoolError) as error:
        run(materials, tmp_path / "one", wild)

    sentence = str(error.value)
    assert "stage one: the loss or gradient of step 2 is not a number (rows " in sentence
    assert "lowering stages.one.lr" in sentence
    mix = Mix(STAGE.mix, {"long": 7, "short": 5}, {"long": 32, "short": 16}, 32, 0)
    assert all(f"{name}[{index}]" in sentence for slot in (2, 3) for name, index in mix.slot(slot))
    assert not (tmp_path / "one").exists()
    assert [line["step"] for line in metrics(tmp_path / "one.work")] == [1]


def test_a_model_that_training_would_get_wrong_is_refused_before_any_step(materials, tmp_path, monkeypatch):
    # As if no config named how this one changes its logits.
    monkeypatch.setattr("unspool.model.head._FACTORS", {})
    model = save_folder(tmp_path / "model", build_model("Granite", logits_scaling=4.0))

    with pytest.raises(ConfigError, match="logits after the head"):
        run(StageInputs(model=str(model), rows=materials.rows), tmp_path / "one")

    assert not (tmp_path / "one").exists()


def test_a_stage_may_claim_less_than_it_trains_on(materials, tmp_path):
    run(materials, tmp_path / "one", STAGE.model_copy(update={"claim": 16}))

    config = json.loads((tmp_path / "one" / "model" / "config.json").read_text())
    assert config["max_position_embeddings"] == 16 < STAGE.context
