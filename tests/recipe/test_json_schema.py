"""`unspool recipes schema`: a JSON schema for editors, and the descriptions that error messages show."""

import json
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner

from unspool.cli.main import build_app
from unspool.core.errors import ConfigError
from unspool.recipe.load import load_recipe
from unspool.recipe.paths import bundled_recipes
from unspool.recipe.yaml_lines import read_yaml


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    done = CliRunner().invoke(build_app(), ["recipes", "schema"])
    assert done.exit_code == 0
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def problems(schema: dict[str, Any], data: Any) -> list[str]:
    validator = jsonschema.validators.validator_for(schema)(schema)
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(data)]


def bundled(name: str) -> Any:
    return read_yaml(bundled_recipes()[name].path.read_text(encoding="utf-8"), name)[0]


def test_it_is_a_valid_schema(schema):
    jsonschema.validators.validator_for(schema).check_schema(schema)


@pytest.mark.parametrize("name", bundled_recipes())
def test_it_accepts_every_bundled_recipe(schema, name):
    assert problems(schema, bundled(name)) == []


@pytest.mark.parametrize(
    "place", [(), ("stages", 0), ("stages", 0, "rope"), ("datasets", "short"), ("evals", 0), ("sources", "books")]
)
def test_it_rejects_an_unknown_key_at_any_depth(schema, place):
    data = bundled("tiny")
    holder = data
    for key in place:
        holder = holder[key]
    holder["colour"] = "red"
    assert len(problems(schema, data)) >= 1


def test_every_key_has_its_description(schema):
    def nodes(node: Any) -> Any:
        if isinstance(node, dict):
            yield node
            for below in node.values():
                yield from nodes(below)

    keys = {
        f"{node.get('title')}.{key}": shape
        for node in nodes(schema)
        for key, shape in node.get("properties", {}).items()
        if isinstance(shape, dict) and key != "properties"
    }
    assert {"StageConfig.lr", "ABF.method", "JsonlSource.kind", "UtK.probability"} <= {*keys}
    assert [name for name, shape in keys.items() if not shape.get("description")] == []


def test_an_error_shows_the_first_sentence_of_the_description():
    with pytest.raises(ConfigError, match=r"7: must be a .* below 1\. Share of steps with linear warm-up\.$"):
        load_recipe("tiny", ["stages.0.warmup_ratio=7"])


def test_lengths_are_required_unless_a_preset_sets_them(schema):
    data = bundled("tiny")
    data["evals"] = [{"suite": "helmet", "preset": "prolong"}]
    assert problems(schema, data) == []
    data["evals"] = [{"suite": "helmet"}]
    assert len(problems(schema, data)) == 1
