"""How many tokens of a source a recipe needs, by which a dataset on the Hub is limited."""

from typing import Any

import pytest

from unspool.data.sources.hub import HfSource
from unspool.recipe.needs import tokens_needed
from unspool.recipe.schema import Recipe


def recipe(**datasets: dict[str, Any]) -> Recipe:
    stage = {"context_length": 64, "lr": 1e-4, "batch_tokens": 64}
    return Recipe.model_validate(
        {
            "name": "needs",
            "model": "org/model",
            "sources": {name: {"kind": "hf", "path": f"org/{name}"} for name in ("web", "wiki")},
            "datasets": {name: {"seq_len": 64} | settings for name, settings in datasets.items()},
            "stages": [
                {"name": "one", "mix": {"short": 0.4, "long": 0.6}, "tokens": 100_000, **stage},
                {"name": "two", "mix": {"short": 1.0}, "tokens": 10_000, **stage},
            ],
        }
    )


def test_the_need_is_what_all_stages_draw_and_a_little_more():
    made = recipe(short={"from": {"web": 3, "wiki": 1}}, long={"from": "wiki"})
    short, long = 0.4 * 100_000 + 10_000, 0.6 * 100_000
    assert tokens_needed(made, "web") == pytest.approx(0.75 * short, rel=0.06)
    assert tokens_needed(made, "web") > 0.75 * short
    assert tokens_needed(made, "wiki") == pytest.approx(0.25 * short + long, rel=0.06)


def test_packing_that_drops_text_leaves_the_need_unknown_and_a_limit_of_the_dataset_counts():
    made = recipe(short={"from": "web", "limit": 5000}, long={"from": "wiki", "packing": "single_doc"})
    assert tokens_needed(made, "wiki") is None
    assert tokens_needed(made, "web") == pytest.approx(5000, rel=0.07)


def test_only_a_dataset_on_the_hub_without_a_limit_is_limited(tmp_path):
    hub = HfSource(kind="hf", path="org/name")
    assert hub.limited(700).limit == 700
    assert hub.limited(None).limit is None
    assert HfSource(kind="hf", path="org/name", limit=9).limited(700).limit == 9
    assert HfSource(kind="hf", path=str(tmp_path)).limited(700).limit is None
