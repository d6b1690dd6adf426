"""A recipe's stages are checked against the ranks of a job before it starts."""

from pathlib import Path

import pytest

from factory import build_model, save_folder, save_mini
from unspool.core.errors import ConfigError
from unspool.recipe.launch import check_layouts, model_values
from unspool.recipe.load import load_recipe


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    return save_mini(tmp_path_factory.mktemp("mini"))


def check(recipe: Path, world_size: int, **changes: str) -> list[str]:
    texts = [f"{name.replace('__', '.')}={value}" for name, value in changes.items()]
    return check_layouts(load_recipe(recipe, texts), world_size)


def test_the_layout_of_every_stage_is_described(recipe):
    assert check(recipe, 2) == [
        f"stage {name}: shard 2; 2 rows at a time, each on 1 rank" for name in ("first", "abf", "utk")
    ]


@pytest.mark.parametrize(
    ("world_size", "changes", "told"),
    [
        (4, {}, "stage first on 4 ranks: .*set batch_tokens to 512"),
        (2, {"stages__1__parallel__ulysses": "3"}, "stage abf on 2 ranks: .*must be one of 1 or 2"),
        (16, {"stages__0__parallel__ulysses": "16"}, "8 query and 4 KV heads.*use 1, 2, 4 or 8"),
        (2, {"stages__0__parallel__ring": "2"}, "does not support document masks"),
        (2, {"stages__0__parallel__shard": "1"}, "use shard 2 or auto"),
        (2, {"stages__0__optimizer__weights": "bf16"}, "optimizer.weights bf16 is not supported on several devices"),
        (2, {"stages__0__parallel__offload": "true", "stages__0__samples": "{prompts: [a]}"}, "samples cannot be"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(recipe, world_size, changes, told):
    with pytest.raises(ConfigError, match=told):
        check(recipe, world_size, **changes)


def test_a_ring_may_share_rows_that_see_all_of_themselves(recipe):
    changes = {f"stages__{index}__parallel__ring": "2" for index in range(3)}
    full = {f"stages__{index}__attention": "full" for index in range(3)}
    assert "ring 2" in check(recipe, 2, **changes, **full)[0]


RING = {
    f"stages__{index}__{key}": value
    for index in range(3)
    for key, value in (("parallel__ring", "2"), ("attention", "full"))
}


@pytest.mark.parametrize(
    ("family", "changes", "told"),
    [
        ("Gemma2", {"head_dim": 8}, "ring=2 does not support logit soft-caps, which this model has; use ring 1"),
        ("mistral", {"sliding_window": 100}, "ring=2 does not support sliding windows"),
    ],
)
def test_a_ring_is_refused_for_attention_that_it_cannot_compute(recipe, tmp_path, family, changes, told):
    folder = save_folder(tmp_path / "model", build_model(family, **changes))

    with pytest.raises(ConfigError, match=told):
        check(recipe, 2, model=str(folder), **RING)


def test_a_ring_may_compute_windows_that_are_no_shorter_than_the_context(recipe, tmp_path):
    folder = save_folder(tmp_path / "model", build_model("mistral", sliding_window=128))

    assert "ring 2" in check(recipe, 2, model=str(folder), **RING)[0]


def test_short_rows_that_share_a_context_are_refused_on_a_ring(recipe):
    with pytest.raises(ConfigError, match="does not support document masks"):
        check(recipe, 2, **RING, datasets__long__seq_len="64")


def test_8_bit_states_may_be_sharded(recipe):
    assert "shard 2" in check(recipe, 2, stages__0__optimizer__states="8bit")[0]


def test_heads_are_read_from_a_folder_and_not_from_the_hub(recipe, tmp_path, monkeypatch):
    loaded = load_recipe(recipe, [f"model={save_folder(tmp_path / 'model')}"])
    assert model_values(loaded)["num_key_value_heads"] == 2
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("asked the network"))
    unknown = load_recipe(
        recipe, ["model=nobody/has-this", "stages.0.parallel.ulysses=2", "stages.1.parallel.ulysses=2"]
    )
    assert model_values(unknown) is None
    assert "ulysses 2" in check_layouts(unknown, 2)[0], "ranks check it when they have the model"
