"""Sliding windows in a plan: operations, seconds and bytes by layer type."""

import pytest
import transformers

from factory import build_model, random_row, save_mini, save_rows
from unspool.models.memory.policy import MemoryPolicy
from unspool.planning.cost import find_gpu
from unspool.planning.fit import Machine
from unspool.planning.footprint import StepSetup, footprint
from unspool.planning.recipe_inputs import SHAPES, PlannedModel, plan_data, planned_model, shape_of
from unspool.planning.recipe_plan import Plan, plan_recipe
from unspool.planning.step_time import (
    WINDOW_KERNEL,
    DeviceSpeed,
    Documents,
    Windows,
    documents,
    flops_per_token,
    step_seconds,
)
from unspool.recipe.load import load_recipe
from unspool.training.metrics.flops import count_flops

from .test_footprint import LLAMA_8B

K = 1024
OLMO = Windows(size=4 * K, share=0.75)
PLAIN_SPEED = DeviceSpeed(short=0)  # without the minimum cost of short documents


def model_of(kind: str, **changes: object) -> PlannedModel:
    values = getattr(transformers, f"{kind}Config")(**changes).to_dict()
    return PlannedModel(shape=shape_of(values, kind), values=values, origin="a test")


@pytest.mark.parametrize(
    ("kind", "changes", "windows"),
    [
        ("Olmo3", {}, OLMO),
        ("Gemma3Text", {"num_hidden_layers": 12, "sliding_window": 512}, Windows(size=512, share=10 / 12)),
        ("Mistral", {"sliding_window": 4096}, Windows(size=4096, share=1.0)),
        ("Mistral", {"sliding_window": None}, None),
        ("Qwen2", {}, None),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 64, "num_hidden_layers": 4, "max_window_layers": 3},
         Windows(size=64, share=0.25)),
        ("Llama", {}, None),
    ],
)  # fmt: skip
def test_windows_are_read_from_the_config(kind, changes, windows):
    assert model_of(kind, **changes).windows == windows


@pytest.mark.parametrize("lens", [[40, 9, 15], [64], [5] * 12])
def test_operations_are_those_that_mfu_counts(lens):
    model = build_model("Olmo3", num_hidden_layers=4, sliding_window=12)
    values = model.config.to_dict()
    planned = PlannedModel(shape=shape_of(values, "Olmo3"), values=values, origin="")
    assert planned.windows == Windows(size=12, share=0.75)
    wanted = count_flops(model).step(lens) / sum(lens)
    assert flops_per_token(planned.shape, documents(lens, planned.windows)) == pytest.approx(wanted)


def test_three_windows_in_four_layers_take_the_seconds_of_their_pairs():
    """One document of L tokens in windows of W: 2LW - W² instead of L² in three quarters of the layers."""
    held = StepSetup(tokens=64 * K)
    length, size = 64 * K, OLMO.size
    full, windowed = (
        step_seconds(LLAMA_8B, held, documents([length], windows), PLAIN_SPEED) for windows in (None, OLMO)
    )
    inside = (2 * length * size - size**2) / length**2
    assert windowed.attention / full.attention == pytest.approx(0.25 + 0.75 * WINDOW_KERNEL[256] * inside)
    assert (windowed.matmul, windowed.between, windowed.loss) == (full.matmul, full.between, full.loss)
    # Equal documents need no list of lengths.
    equal = Documents(tokens=1, squares=length, windows=OLMO).of(length)
    assert step_seconds(LLAMA_8B, held, equal, PLAIN_SPEED) == windowed


def test_documents_that_fit_into_the_window_cost_what_full_attention_costs():
    held = StepSetup(tokens=64 * K)
    full, windowed = (
        step_seconds(LLAMA_8B, held, documents([4 * K] * 16, windows), PLAIN_SPEED) for windows in (None, OLMO)
    )
    assert windowed == full


def test_weighing_labels_and_recomputation_see_the_windows_too():
    policy = MemoryPolicy(activation_checkpointing="full")
    held = StepSetup(tokens=64 * K, policy=policy, forward_only=(64 * K, 64 * K * 32 * K))
    full, windowed = (step_seconds(LLAMA_8B, held, documents([64 * K], one), PLAIN_SPEED) for one in (None, OLMO))
    assert windowed.weighing < full.weighing
    saved = full.recomputed - windowed.recomputed
    assert saved == pytest.approx((full.attention - windowed.attention) * forward_share())


def forward_share() -> float:
    """Forward ÷ whole time of attention at these rates."""
    from unspool.planning.step_time import ATTENTION, BACKWARD

    forward, backward, _ = ATTENTION[256]
    return (1 / forward) / (1 / forward + BACKWARD / backward)


def test_lengths_of_rows_and_of_a_corpus_are_not_averaged_before_the_window(tmp_path):
    recipe = save_mini(tmp_path)
    recipe.write_text(recipe.read_text().replace("name: mini\n", f"name: mini\nout: {tmp_path / 'run'}\n"))
    rows = [random_row((100, 28), 0), random_row((64, 64), 1), random_row((128,), 2, attention="full")]
    save_rows(tmp_path / "run" / "datasets" / "long", rows)
    windows = Windows(size=50, share=0.5)
    (use,) = plan_data(load_recipe(recipe), windows).stages["first"]
    inside = (100**2 - 50**2) + 28**2 + 2 * (64**2 - 14**2) + (128**2 - 78**2)
    assert use.window_len == pytest.approx(inside / (3 * 128))
    docs = plan_data(load_recipe(recipe), windows).documents["first"]
    assert docs.per_layer / docs.tokens == pytest.approx((use.document_len + use.window_len) / 2)
    (plain,) = plan_data(load_recipe(recipe)).stages["first"]
    assert (plain.window_len, plain.document_len) == (None, use.document_len)


# Plans of recipes


def planned(*overrides: str, model: str | None = None) -> Plan:
    machine = Machine(gpu=find_gpu("h100"), count=8)
    return plan_recipe(load_recipe("olmo3-64k", [*overrides, "stages.0.attention=full"]), machine, model=model)


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("asked the network"))


def test_olmo_3_is_planned_without_its_folder_and_cheaper_than_with_full_attention(offline, monkeypatch):
    windowed = planned()
    # 7,298,011,136 with the norms of queries and keys, as its repository states.
    assert windowed.model.shape.params == 7_298_011_136 - 32 * 2 * 4096
    assert windowed.model.windows == OLMO
    assert "layers 24 of 32 attend to the last 4K tokens only" in str(windowed)
    monkeypatch.setitem(SHAPES, "olmo-3-7b-midtrained", windowed.model.values | {"layer_types": ["full_attention"]})
    full = planned()
    assert full.model.windows is None and "sliding" not in str(full)
    (less,), (more,) = windowed.stages, full.stages
    length = 64 * K
    saved = 0.75 * (length - (2 * length * OLMO.size - OLMO.size**2) / length)
    assert more.flops_per_token - less.flops_per_token == pytest.approx(6 * 32 * 4096 * saved)
    assert less.chosen.hours < more.chosen.hours
    assert footprint(windowed.model.shape, StepSetup(tokens=K)) == footprint(full.model.shape, StepSetup(tokens=K))


@pytest.mark.parametrize("name", SHAPES)
def test_known_shapes_are_values_of_model(name, offline):
    assert planned_model(load_recipe("tiny"), name).origin == f"{name}, as published"
