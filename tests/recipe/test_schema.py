"""A recipe refuses what does not fit together also when it is built in Python."""

import json
from typing import Any, Literal

import pytest
import yaml
from pydantic import Field, ValidationError

from unspool.data.packing import config as packing_config
from unspool.data.packing.config import DatasetConfig
from unspool.data.strategies.base import StrategyConfig
from unspool.recipe.json_schema import child, editor_schema, form_of, recipe_schema
from unspool.recipe.load import load_recipe
from unspool.recipe.paths import bundled_recipes
from unspool.recipe.schema import Recipe, dump_recipe
from unspool.recipe.yaml_lines import CoreLoader, read_yaml
from unspool.rope import methods

from .conftest import VALID


def test_a_recipe_built_in_python_is_checked_as_well():
    data = yaml.load(VALID, CoreLoader)
    assert Recipe.model_validate(data).stages[1].init == "first"
    data["stages"][1]["mix"] = {"lng": 1}
    with pytest.raises(ValidationError, match="did you mean 'long'"):
        Recipe.model_validate(data)


def test_text_that_looks_like_a_number_survives_writing_and_reading(valid, tmp_path):
    recipe = load_recipe(
        valid, ["sources.wiki.path='8e6'", "model='1e5'", "sources.books.path='null'", "datasets.short.limit=1e6"]
    )
    copy = tmp_path / "copy.yaml"
    copy.write_text(dump_recipe(recipe.recipe))
    assert load_recipe(copy).recipe == recipe.recipe


def test_tangled_rows_are_accepted_in_a_stage_with_document_attention(valid):
    recipe = load_recipe(valid, ["datasets.short.utk={min_split: 256}"]).recipe
    assert recipe.stages[0].attention == "intra_document"


def test_every_strategy_is_accepted_in_a_stage_with_document_attention(valid):
    for strategy in ("cip={}", "nextlong={chunk: 256}"):
        assert load_recipe(valid, [f"datasets.short.{strategy}"]).recipe.stages[0].attention == "intra_document"


def test_positions_beyond_the_context_of_a_stage_are_refused(valid, problems):
    assert load_recipe(valid, ["datasets.short.pose={target: 4K}"])
    (sentence,) = problems(sets=["datasets.short.pose={target: 8K}"])
    assert "stages.0.mix.short" in sentence
    assert (
        "positions up to 8K, beyond the stage's context length of 4K; lower datasets.short.pose.target or raise"
        in sentence
    )


def test_positions_of_documents_are_refused_where_the_row_is_one(valid, problems):
    skips, full = "datasets.short.pose={target: 4K}", "stages.0.attention=full"
    (sentence,) = problems(sets=[skips, full])
    assert "positions restart in every document" in sentence
    assert "datasets.short.attention: full" in sentence
    assert load_recipe(valid, [skips, full, "datasets.short.attention=full"])
    assert load_recipe(valid, [skips, full, "datasets.short.cip={}"])


def test_the_default_output_folder_is_named_after_the_recipe(valid):
    assert str(load_recipe(valid).recipe.out) == "runs/small"
    assert str(load_recipe(valid, ["out=elsewhere"]).recipe.out) == "elsewhere"


def unknown_to_the_schema(shape: dict[str, Any], value: Any, path: str = "") -> list[str]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    missing = []
    for key, item in pairs:
        below = child(form_of(shape, value), key)
        missing += [f"{path}.{key}"] if below is None else unknown_to_the_schema(below, item, f"{path}.{key}")
    return missing


@pytest.mark.parametrize("name", list(bundled_recipes()))
def test_the_json_schema_for_editors_knows_every_key_of_the_bundled_recipes(name):
    data, _, _ = read_yaml(bundled_recipes()[name].path.read_text(), name)
    assert {"stages", "extends"} & set(data), "no stages, so the next line would check little"
    data.pop("set", None)  # its values have the shapes of their paths, which loading checks
    assert unknown_to_the_schema(editor_schema(), data) == []
    data["stages"] = [{"lrr": 1}]
    assert unknown_to_the_schema(editor_schema(), data) == [".stages.0.lrr"]


def test_the_json_schema_is_plain_json():
    assert json.loads(json.dumps(recipe_schema()))["$schema"].startswith("https://json-schema.org/")


def test_what_is_registered_after_a_recipe_was_loaded_is_known_to_the_checker(valid, problems, monkeypatch):
    load_recipe(valid)
    monkeypatch.setattr(packing_config, "STRATEGIES", dict(packing_config.STRATEGIES))
    monkeypatch.setattr(DatasetConfig, "__pydantic_fields__", dict(DatasetConfig.__pydantic_fields__))

    class Reversed(StrategyConfig):
        name = "reversed"
        title = "reversed"
        every: int = Field(2, ge=1)

    class Squared(methods.RopeMethod):
        method: Literal["squared"]
        power: float = Field(2.0, gt=0)

    try:
        packing_config.register_strategy(Reversed)
        methods.register_rope_method(Squared)
        changes = ["datasets.long.reversed.every=3", "stages.0.rope={method: squared, power: 3}"]
        recipe = load_recipe(valid, changes).recipe
        assert recipe.datasets["long"].reversed == Reversed(every=3)
        assert recipe.stages[0].rope == Squared(method="squared", power=3)
        assert problems(sets=["datasets.long.reversed={evry: 3}", "stages.0.rope={method: squared, power: 0}"]) == [
            "`overrides='datasets.long.reversed={evry: 3}'`: datasets.long.reversed.evry: unknown key; did you mean "
            "'every'? Allowed here: every.",
            "`overrides='stages.0.rope={method: squared, power: 0}'`: stages.0.rope.power = 0: must be a number "
            "above 0.",
        ]
    finally:
        methods.ROPE_METHODS.pop("squared", None)
        monkeypatch.undo()
        DatasetConfig.model_rebuild(force=True)
    assert "reversed" not in recipe_schema()["$defs"]["DatasetConfig"]["properties"]
