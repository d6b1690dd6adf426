"""A distillation aux_loss training: what it adds to a step, what that keeps, and that kills change nothing."""

import json
import weakref
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch

from factory import CPU, build_model, build_stage, in_child
from unspool.core.errors import ConfigError
from unspool.data.packing.store import open_rows
from unspool.models.load import load_model
from unspool.models.rotary import apply_rope
from unspool.training.distill.distill import FILE, AttentionDistillation, build_distillation, check_distillation
from unspool.training.metrics.logger import METRICS
from unspool.training.optim.adamw import AdamW
from unspool.training.optim.updater import build_updater
from unspool.training.stage import StageInputs, run_stage

from .stage_runs import STAGE, assert_same_result, kill_after_step, run

TINY = str(files("unspool") / "assets" / "tiny-base")
WEIGHT = 0.7
DISTILLATION = {
    "datasets": "short",
    "before": 3,
    "during": WEIGHT,
    "after": 2,
    "batch_tokens": 32,
    "during_batch_tokens": 16,
    "lr": 1e-2,
}
NAN = {"model.layers.0.self_attn.q_proj.weight": torch.tensor(float("nan"))}
PLAIN = STAGE.model_dump(mode="json", exclude={"attention_distillation"})
WITH = build_stage(**PLAIN | {"attention_distillation": DISTILLATION})


def changed(**changes):
    return build_stage(**PLAIN | {"attention_distillation": DISTILLATION | changes})


@pytest.fixture(scope="session")
def inputs(materials) -> StageInputs:
    return replace(materials, attention_distillation={"short": materials.datasets["short"]})


@pytest.fixture(scope="session")
def undisturbed(inputs, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("during") / "one"
    run(inputs, out, WITH)
    return out


def metrics(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / METRICS).read_text().splitlines()]


# What it adds


def distance_by_transformers(teacher, student, tokens) -> torch.Tensor:
    """KL of the teacher's attention and the student's on the teacher's own hidden states, by plain modules."""
    seen: list[dict] = []
    with torch.no_grad():
        hidden = teacher.model(input_ids=tokens[None], output_hidden_states=True).hidden_states
    positions = torch.arange(len(tokens))[None]
    for model, layers in ((teacher, teacher.model.layers), (student, student.model.layers)):
        tables = model.model.rotary_emb(hidden[0], positions)
        for number, layer in enumerate(layers):
            normed = layer.input_layernorm(hidden[number])
            mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
            weights = layer.self_attn(hidden_states=normed, position_embeddings=tables, attention_mask=mask)[1]
            seen.append({"of": number, "weights": weights[0]})
    count = len(seen) // 2
    total = torch.zeros(())
    for wanted, found in zip(seen[:count], seen[count:], strict=True):
        p, q = wanted["weights"].detach(), found["weights"]
        allowed = torch.ones_like(p[0]).tril().bool()
        apart = torch.where(allowed, p * (p.clamp(min=1e-30).log() - q.clamp(min=1e-30).log()), 0.0)
        total = total + apart.sum(-1).mean()
    return total


def plain_model(position=None):
    """As `transformers` computes it, with attention that shows its weights."""
    model = build_model()
    if position is not None:
        apply_rope(model, position, STAGE.context_length)
    model.set_attn_implementation("eager")
    return model


def test_a_step_has_the_gradient_of_training_and_the_weighted_one_of_the_distance(inputs, tmp_path, monkeypatch):
    """By plain `transformers`: the rows that come after those of `before`, times the weight, added to training's."""
    taken: list[dict[str, torch.Tensor]] = []

    def take(self, trained, rates):
        taken.append({one.name: one.grad.clone() for one in trained})

    monkeypatch.setattr(AdamW, "step", take)
    run(inputs, tmp_path / "with" / "one", changed(before=0, after=0))
    run(inputs, tmp_path / "without" / "one", build_stage(**PLAIN))
    steps = len(taken) // 2
    assert steps == STAGE.steps > 1

    teacher, student = plain_model(), plain_model(STAGE.rope)
    stage = changed(before=0, after=0)
    ours = build_model()
    apply_rope(ours, STAGE.rope, STAGE.context_length)
    rows = {"short": open_rows(inputs.datasets["short"])}
    mix = build_distillation(
        stage, ours, build_updater(stage, ours), rows, tmp_path, seed=0, order="", load_teacher=build_model
    ).mix
    # Nothing was updated, so that every step has the gradient of the same weights.
    for step in (0, steps - 1):
        [(name, index)] = mix.slot(step)
        tokens = torch.from_numpy(rows[name][index].tokens.astype(np.int64))
        assert len(rows[name][index].doc_lens) == 1, "the reference below knows no documents"
        student.zero_grad()
        distance = distance_by_transformers(teacher, student, tokens)
        distance.backward()
        assert metrics(tmp_path / "with" / "one")[step]["attention_distillation"] == pytest.approx(
            distance.item(), rel=1e-4
        )
        for name, parameter in student.named_parameters():
            added = taken[step][name] - taken[steps + step][name]
            if "q_proj" in name or "k_proj" in name:
                torch.testing.assert_close(added, WEIGHT * parameter.grad, rtol=1e-3, atol=1e-6)
            else:
                assert not added.any(), name


def test_before_during_and_after_go_through_the_rows_one_after_the_other(inputs, tmp_path, monkeypatch):
    asked: list[int] = []
    model = build_model()
    apply_rope(model, WITH.rope, WITH.context_length)
    rows = {"short": open_rows(inputs.datasets["short"])}
    updater = build_updater(WITH, model)
    distillation = build_distillation(WITH, model, updater, rows, tmp_path, seed=0, order="", load_teacher=build_model)
    monkeypatch.setattr(type(distillation.mix), "slot", lambda mix, index: asked.append(index) or [("short", 0)])

    distillation.before()
    updater.begin(0.0)
    aux_loss = distillation.during()
    for step in range(1, WITH.steps + 1):
        aux_loss(step)
    distillation.after()

    # Two rows a step before and after, one during.
    assert asked == list(range(3 * 2 + WITH.steps + 2 * 2))


def test_metrics_tell_the_distance_of_every_step_and_only_where_there_is_one(inputs, undisturbed, tmp_path):
    assert all(line["attention_distillation"] > 0 for line in metrics(undisturbed))
    assert [json.loads(line)["phase"] for line in (undisturbed / FILE).read_text().splitlines()] == [
        *["before"] * 3,
        *["after"] * 2,
    ]
    run(inputs, tmp_path / "one", changed(during=0))
    assert not any("attention_distillation" in line for line in metrics(tmp_path / "one"))


def test_a_distance_that_is_not_a_number_changes_nothing_and_stays_valid_json(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(
        AttentionDistillation, "during", lambda distillation: lambda step: distillation.updater.add(NAN) or float("nan")
    )
    stage = build_stage(
        **PLAIN | {"attention_distillation": DISTILLATION | {"before": 0, "after": 0}, "guard": {"nan": "skip"}}
    )

    run(inputs, tmp_path / "one", stage)

    found = metrics(tmp_path / "one")
    assert all(line["attention_distillation"] is None and line["skipped"] for line in found)


def test_the_teacher_is_gone_before_another_is_loaded(inputs, tmp_path, monkeypatch):
    alive: list[int] = []
    teachers: list[weakref.ref] = []
    load = AttentionDistillation._teacher

    def counted(distillation):
        alive.append(sum(one() is not None for one in teachers))
        teacher = load(distillation)
        teachers.append(weakref.ref(teacher))
        return teacher

    monkeypatch.setattr(AttentionDistillation, "_teacher", counted)
    run(inputs, tmp_path / "one", WITH)
    assert alive == [0, 0, 0]


# What it keeps


def test_queries_and_keys_of_the_shipped_model_stay_near_what_they_attended_to(text_rows, tmp_path):
    """The same steps with a weight that only measures, and with one that counts."""
    inputs = StageInputs(model=TINY, datasets={"short": text_rows}, attention_distillation={"short": text_rows})
    found = {}
    for weight in (1e-9, 4.0):
        stage = build_stage(
            rope={"method": "abf", "base": 5e5},
            mix={"short": 1.0},
            context_length=512,
            batch_tokens=1024,
            tokens=12 * 1024,
            lr=3e-3,
            lr_overrides={"q_proj": 3e-3, "k_proj": 3e-3, "model": 0},
            attention_distillation={"datasets": "short", "during": weight, "during_batch_tokens": 512},
        )
        run(inputs, tmp_path / str(weight) / "one", stage)
        found[weight] = [line["attention_distillation"] for line in metrics(tmp_path / str(weight) / "one")]
    measured, counted = found[1e-9], found[4.0]
    assert measured[0] == pytest.approx(counted[0], rel=1e-5), "the same rows and weights"
    assert counted[-1] < 0.7 * counted[0]
    assert counted[-1] < 0.85 * measured[-1]


# Killed


@pytest.mark.parametrize("step", [0, 3, 4])
def test_a_killed_stage_ends_with_the_same_bits(step, inputs, undisturbed, tmp_path, monkeypatch):
    out = tmp_path / "one"
    with monkeypatch.context() as patched:
        kill_after_step(step)(patched.setattr)
        assert in_child(lambda: run(inputs, out, WITH)) == -9
    assert not out.exists()

    run(inputs, out, WITH)

    assert_same_result(out, undisturbed)
    assert [line["attention_distillation"] for line in metrics(out)] == [
        line["attention_distillation"] for line in metrics(undisturbed)
    ]


# Refused


def test_what_cannot_be_is_refused(inputs, tmp_path):
    stage = build_stage(
        **PLAIN
        | {"attention_distillation": DISTILLATION, "optimizer": {"step": "in-backward"}, "micro_batch_tokens": 64}
    )
    with pytest.raises(
        ConfigError, match=r"attention_distillation\.during cannot be combined with optimizer\.step in-backward"
    ):
        check_distillation(stage, TINY, {}, world_size=1)
    frozen = build_stage(**PLAIN | {"attention_distillation": DISTILLATION, "lr_overrides": {"q_proj": 0, "k_proj": 0}})
    with pytest.raises(ConfigError, match=r"lr_overrides sets them to 0; set an lr above 0"):
        run(inputs, tmp_path / "one", frozen)
    with pytest.raises(
        ConfigError, match=r"distillation\.during_batch_tokens 40 is not a multiple of the row length 16"
    ):
        run(inputs, tmp_path / "one", changed(during_batch_tokens=40))
    with pytest.raises(ValueError, match=r"set before or after \(steps\) or during \(a weight\)"):
        changed(before=0, during=0, after=0)
    with pytest.raises(ValueError, match="set lr, the peak learning rate of its own steps"):
        changed(lr=None)
    assert changed(before=0, after=0, lr=None).attention_distillation.lr is None


def test_the_untrained_part_of_a_model_gets_nothing(inputs, tmp_path):
    """Values are trained here and queries are not: only keys are kept near the teacher's."""
    stage = build_stage(
        **PLAIN | {"attention_distillation": DISTILLATION | {"before": 0, "after": 0}, "lr_overrides": {"q_proj": 0}}
    )
    run(inputs, tmp_path / "one", stage)
    model = load_model(str(tmp_path / "one" / "model"), device=CPU, dtype=torch.float32)
    start = build_model().state_dict()
    assert torch.equal(
        model.state_dict()["model.layers.0.self_attn.q_proj.weight"], start["model.layers.0.self_attn.q_proj.weight"]
    )
    assert not torch.equal(
        model.state_dict()["model.layers.0.self_attn.k_proj.weight"], start["model.layers.0.self_attn.k_proj.weight"]
    )


@pytest.mark.gpu
@pytest.mark.parametrize("position", [{"method": "abf", "base": 5e5}, {"method": "harpe", "low": 1e5, "high": 5e5}])
def test_on_cuda_it_follows_the_cpu_to_bfloat16(position, text_rows, tmp_path):
    inputs = StageInputs(model=TINY, datasets={"short": text_rows}, attention_distillation={"short": text_rows})
    stage = build_stage(
        rope=position,
        mix={"short": 1.0},
        context_length=512,
        batch_tokens=1024,
        tokens=4 * 1024,
        lr=1e-3,
        attention_distillation={
            "datasets": "short",
            "before": 2,
            "during": 4.0,
            "after": 2,
            "batch_tokens": 1024,
            "during_batch_tokens": 512,
            "lr": 1e-3,
        },
    )
    for device in ("cpu", "cuda"):
        run_stage(stage, inputs, tmp_path / device / "one", seed=0, device=torch.device(device))
    on_cpu, on_gpu = (
        [line["attention_distillation"] for line in metrics(tmp_path / device / "one")] for device in ("cpu", "cuda")
    )
    assert on_gpu == pytest.approx(on_cpu, rel=0.03)
