"""A plan's data, settings and machines; the alternatives that it proposes are accepted."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from factory import random_row, save_folder, save_mini, save_rows
from unspool.core.errors import ConfigError
from unspool.models.memory.policy import MemoryPolicy
from unspool.planning.cost import find_gpu
from unspool.planning.fit import GIB, Case, Machine, changes, estimate, format_value, set_arguments
from unspool.planning.footprint import PARTS
from unspool.planning.recipe_inputs import ASSUMED, plan_data, planned_model
from unspool.planning.recipe_plan import Plan, as_plain, plan_recipe
from unspool.planning.step_time import device_speed, documents, flops_per_token
from unspool.recipe.launch import check_layouts
from unspool.recipe.load import load_recipe
from unspool.recipe.paths import bundled_recipes


def planned(recipe: str | Path, gpu: str, count: int = 1, *overrides: str, host: float | None = None) -> Plan:
    return plan_recipe(load_recipe(recipe, list(overrides)), Machine(gpu=find_gpu(gpu), count=count, host=host))


@pytest.fixture
def mini(tmp_path) -> Path:
    path = save_mini(tmp_path)
    path.write_text(path.read_text().replace("name: mini\n", f"name: mini\nout: {tmp_path / 'run'}\n"))
    return path


# The model


@pytest.mark.parametrize(
    ("recipe", "params"),
    [
        ("prolong-64k", 8_030_261_248),
        ("prolong-512k", 8_030_261_248),
        ("prolong-sft", 8_030_261_248),
        ("harpe-128k", 6_738_415_616),
        ("smollm2-32k", 134_515_008),
        ("tiny", 3_950_848),
    ],
)
def test_the_model_of_every_recipe_is_known_without_a_network(recipe, params, monkeypatch):
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("asked the network"))
    assert planned_model(load_recipe(recipe)).shape.params == params


def test_a_folder_counts_for_more_than_what_was_published(tmp_path):
    folder = save_folder(tmp_path / "llama-3-8b")
    loaded = load_recipe("smollm2-32k", [f"model={folder}"])
    assert planned_model(loaded).shape.hidden == 32
    assert planned_model(load_recipe("smollm2-32k"), str(folder)).shape.hidden == 32


def test_a_model_that_is_nowhere_is_refused_with_what_to_give():
    with pytest.raises(ConfigError, match=r"as `model`, or a model of the same shape: llama-3\.2-1b, "):
        planned_model(load_recipe("smollm2-32k", ["model=runs/nothing/stages/x/model"]))


def test_a_proposed_shorter_context_takes_the_seconds_of_a_plan_at_that_context():
    changes = ["stages.0.batch_tokens=2M", "stages.0.attention=full", "stages.0.context_length=2M"]
    machine = Machine(gpu=find_gpu("l4"), count=1, host=64 * GIB)
    found = plan_recipe(load_recipe("smollm2-32k", changes), machine)
    shorter = next(one.estimate for one in found.stages[0].alternatives if one.kind == "context")
    assert shorter.stage.context_length == 1 << 20
    docs = found.data.documents[shorter.stage.name]
    assert docs.mean <= shorter.stage.context_length, "the recipe's rows are as short as before"
    case = Case(
        loaded=found.loaded, values=found.model.values, shape=found.model.shape, docs=docs, speed=machine.speed,
        machine=machine,
    )  # fmt: skip
    assert shorter.seconds == estimate(case, shorter.stage).seconds


# Data


def test_sources_get_all_tokens_of_all_stages():
    for name in bundled_recipes():
        loaded = load_recipe(name)
        found = plan_data(loaded)
        wanted = sum(stage.steps * stage.batch_tokens for stage in loaded.recipe.stages)
        assert sum(source.tokens for source in found.sources) == pytest.approx(wanted), name
        for stage in loaded.recipe.stages:
            assert sum(use.tokens for use in found.stages[stage.name]) == pytest.approx(
                stage.steps * stage.batch_tokens
            )


def test_rows_that_are_built_are_counted_as_attention_sees_them(mini, tmp_path):
    rows = [random_row((100, 28), 0), random_row((64, 64), 1), random_row((128,), 2, attention="full")]
    save_rows(tmp_path / "run" / "datasets" / "long", rows)
    save_rows(tmp_path / "run" / "datasets" / "tangled", [random_row((50, 78), 3, attention="full")])
    found = plan_data(load_recipe(mini))
    (use,) = found.stages["first"]
    squares = 100**2 + 28**2 + 2 * 64**2 + 128**2
    assert use.document_len == pytest.approx(squares / (3 * 128))
    assert (use.available.tokens, use.available.how) == (3 * 128, "counted")
    assert use.epochs == 768 / (3 * 128)
    assert found.lengths_are_counted("first")
    mixed = {use.name: use.document_len for use in found.stages["utk"]}
    assert mixed["tangled"] == 128, "rows marked full see all of themselves"

    whole = plan_data(load_recipe(mini, ["stages.0.attention=full"]))
    assert whole.stages["first"][0].document_len == 128
    longer = plan_data(load_recipe(mini, ["datasets.long.seq_len=64"]))
    assert not longer.lengths_are_counted("first"), "these rows are of another length than the recipe now wants"


def test_unbuilt_data_are_estimated_and_marked_as_estimates(mini, tmp_path):
    found = plan_data(load_recipe(mini))
    (source,) = found.sources
    size = (tmp_path / "books.jsonl").stat().st_size
    assert (source.available.tokens, source.available.how) == (int(size / 4), "estimated")
    limited = plan_data(load_recipe(mini, ["sources.books.limit=1K"]))
    assert limited.sources[0].available.tokens == 1024
    away = plan_data(load_recipe(mini, ["sources.books.path=nowhere.jsonl"]))
    assert (away.sources[0].available.tokens, away.sources[0].epochs) == (None, None)
    short = plan_data(load_recipe("prolong-64k")).stages["64k"][-1]
    assert short.document_len == ASSUMED
    assert "assumed" in short.lengths


def test_a_corpus_that_is_built_is_counted(mini, tmp_path):
    lengths = {"at_least": [16, 64], "documents": [10, 2], "tokens": [200, 300]}
    folder = tmp_path / "run" / "corpus" / "books"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"counts": {"tokens": 500, "lengths": lengths}}))
    found = plan_data(load_recipe(mini))
    assert (found.sources[0].available.tokens, found.sources[0].available.how) == (500, "counted")
    (use,) = found.stages["first"]
    # Documents of 20 tokens, and of 150, which rows of 128 cut.
    assert use.document_len == pytest.approx((200 * 20 + 300 * 128) / 500)
    assert use.lengths == "counted in the corpus"


# Settings


def case_of(recipe: str, gpu: str, count: int) -> Case:
    loaded, machine = load_recipe(recipe), Machine(gpu=find_gpu(gpu), count=count)
    docs = plan_data(loaded).documents[loaded.recipe.stages[0].name]
    model, speed = planned_model(loaded), device_speed(machine.gpu)
    return Case(loaded=loaded, values=model.values, shape=model.shape, docs=docs, speed=speed, machine=machine)


@pytest.mark.parametrize("count", [1, 3, 8, 64, 128])
@pytest.mark.parametrize("ulysses", [1, 3, 8, 32])
def test_a_layout_is_refused_exactly_where_launch_refuses_it(count, ulysses):
    text = f"stages.0.parallel.ulysses={ulysses}"
    case = case_of("prolong-64k", "h100", count)
    loaded = load_recipe("prolong-64k", [text])
    case = replace(case, loaded=loaded)
    told: list[str] = []
    for work in (lambda: check_layouts(loaded, count), lambda: estimate(case, loaded.recipe.stages[0])):
        try:
            work()
            told.append("")
        except ConfigError as error:
            told.append(str(error).split(": ", 1)[-1] if "ranks: " in str(error) else str(error))
    # Launching knows the heads of models that are here, and this one is not.
    if told[0] or "query and" not in told[1]:
        assert told[0].split("parallel:")[-1] == told[1].split("parallel:")[-1]


def test_prolong_at_512k_finds_a_layout_on_eight_h100():
    (stage,) = planned("prolong-512k", "h100", 8).stages
    assert stage.problem
    assert stage.written is not None and not stage.written.fits
    assert stage.chosen is not None and stage.chosen.fits
    assert stage.chosen.layout.ulysses * stage.chosen.layout.shard == 8
    assert stage.chosen.layout.ring == 1, "documents are masked"
    assert stage.chosen.device_bytes <= 79.1 * GIB


@pytest.mark.parametrize(
    ("recipe", "gpu", "count", "host"),
    [
        ("prolong-512k", "h100", 8, None),
        ("prolong-64k", "h200", 1, None),
        ("prolong-64k", "4090", 1, None),
        ("prolong-512k", "h100", 1, 256 * GIB),
        pytest.param("utk-128k", "a100-40", 8, None, marks=pytest.mark.slow),
        ("harpe-128k", "h100", 8, None),
    ],
)
def test_what_a_refusal_names_is_accepted(recipe, gpu, count, host):
    refused = planned(recipe, gpu, count, host=host)
    assert not refused.fits
    (stage,) = refused.stages
    ways = [way for way in stage.alternatives if way.arguments]
    assert ways
    for way in ways:
        words = dict(zip(way.arguments[::2], way.arguments[1::2], strict=True))
        texts = [value for key, value in zip(way.arguments[::2], way.arguments[1::2], strict=True) if key == "--set"]
        memory = float(words["--host-mem"].rstrip("G")) * GIB if "--host-mem" in words else host
        again = planned(recipe, words.get("--gpu", gpu), int(words.get("--count", count)), *texts, host=memory)
        assert again.fits, way
        assert again.hours == pytest.approx(way.estimate.hours, rel=1e-6)


def test_a_context_that_fits_is_named_where_nothing_else_does():
    (stage,) = planned("prolong-512k", "l4", 1, host=64 * GIB).stages
    assert [way.kind for way in stage.alternatives if not way.arguments] in ([], ["context"])
    assert {"gpus", "gpu"} & {way.kind for way in stage.alternatives}


def test_what_fits_as_it_is_written_is_not_changed():
    found = planned("smollm2-32k", "h200")
    assert found.fits
    for stage in found.stages:
        assert stage.chosen is stage.written
        assert changes(stage.stage, stage.chosen.stage) == {}
        assert stage.alternatives == ()


def test_faster_settings_keep_the_optimizer_and_are_faster():
    (stage,) = planned("prolong-sft", "h100", 8).stages
    assert stage.fits
    assert stage.faster is not None
    assert stage.faster.seconds.step < stage.chosen.seconds.step
    assert not any(key.startswith("optimizer") for key in changes(stage.stage, stage.faster.stage))


def test_settings_are_format_value_as_a_recipe_reads_them():
    stage = load_recipe("prolong-64k").recipe.stages[0]
    policy = MemoryPolicy(activation_checkpointing="full", offload=True, mlp_tiles=16384)
    parallel = stage.parallel.model_copy(update={"ulysses": 8})
    words = set_arguments(0, stage, stage.model_copy(update={**vars(policy), "parallel": parallel}))
    assert words == [
        *("--set", "stages.0.offload=true"),
        *("--set", "stages.0.mlp_tiles=16K"),
        *("--set", "stages.0.parallel.ulysses=8"),
    ]
    assert format_value("micro_batch", None) == "null"


def test_plans_sum_up():
    found = planned("smollm2-32k", "h200")
    plain = as_plain(replace(found, price=2.0))
    assert plain["hours"] == pytest.approx(sum(stage["chosen"]["hours"] for stage in plain["stages"]))
    assert plain["cost"] == pytest.approx(2 * plain["gpu_hours"])
    for stage in plain["stages"]:
        memory, seconds = stage["chosen"]["memory"], stage["chosen"]["seconds"]
        assert set(memory["parts"]) == set(PARTS)
        assert sum(memory["parts"].values()) == memory["device"]
        assert sum(value for name, value in seconds.items() if name != "step") == pytest.approx(seconds["step"])
        assert stage["chosen"]["hours"] * 3600 == pytest.approx(stage["steps"] * seconds["step"])
        tokens = stage["steps"] * 128 * 1024
        assert stage["tokens"] == tokens
        assert stage["flops"] == pytest.approx(stage["flops_per_token"] * tokens)


def test_a_stage_that_changes_no_rope_has_that_of_the_stage_it_starts_from():
    found = planned("prolong", "h200", 64)
    assert found.stages[2].rope[0].startswith("abf with base 1.28e8, of stage 512k: ")


# Loss weights


def test_a_plan_prints_what_longce_costs_and_exact_is_free():
    plain, exact, longce, wider = (
        planned("utk-128k", "h200", 8, *words)
        for words in (
            [],
            ["stages.0.loss={weights: exact}"],
            ["stages.0.loss={weights: longce}"],
            ["stages.0.loss={weights: longce, stride: 4K}"],
        )
    )

    assert as_plain(exact)["stages"][0]["chosen"]["seconds"] == as_plain(plain)["stages"][0]["chosen"]["seconds"]
    assert as_plain(exact)["stages"][0]["weighing_flops_per_token"] == 0
    assert "weights    " not in f"{plain}{exact}"
    (stage,) = as_plain(longce)["stages"]
    seconds = stage["chosen"]["seconds"]
    # One row of 128K, and windows of 5K that begin every 1K.
    tokens, shape = 128 * 1024, longce.model.shape
    lens = [tokens, *[5 * 1024] * 123]
    assert stage["weighing_flops_per_token"] * tokens == pytest.approx(
        flops_per_token(shape, documents(lens)) * sum(lens) / 3
    )
    step = as_plain(plain)["stages"][0]["chosen"]["seconds"]["step"]
    assert seconds["step"] - seconds["weighing"] == pytest.approx(step)
    assert f"; {seconds['weighing']:.3g} s more per step, {seconds['weighing'] / step:.0%}" in str(longce)
    assert stage["weighing_flops_per_token"] > as_plain(wider)["stages"][0]["weighing_flops_per_token"] > 0


def test_faster_settings_do_not_share_rows_where_the_weights_cannot():
    plain, longce = (planned("utk-128k", "h200", 8, *words) for words in ([], ["stages.0.loss={weights: longce}"]))

    assert plain.stages[0].faster.layout.sequence_ranks > 1, "nothing would have shared rows"
    assert longce.stages[0].faster.layout.sequence_ranks == 1
