"""`unspool recipes` lists, prints and checks what is bundled."""

import json

import pytest

from unspool.cli.main import build_app
from unspool.recipe.paths import bundled_recipes


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as stop:
        build_app()(list(args))
    return int(stop.value.code or 0)


def test_the_list_names_every_bundled_recipe(capsys):
    assert run("recipes") == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in bundled_recipes())


def test_the_list_as_json_is_nothing_but_json(capsys):
    assert run("recipes", "--json") == 0
    entries = json.loads(capsys.readouterr().out)
    assert {entry["name"] for entry in entries} == set(bundled_recipes())
    assert all(entry["summary"] and entry["stages"] for entry in entries)


def test_show_prints_the_file_as_it_is(capsys):
    assert run("recipes", "show", "tiny") == 0
    assert capsys.readouterr().out == bundled_recipes()["tiny"].path.read_text()


@pytest.mark.parametrize("name", list(bundled_recipes()))
def test_every_bundled_recipe_passes_the_checker(name, capsys):
    assert run("recipes", "check", name) == 0
    assert capsys.readouterr().out == f"{name}: no problems found.\n"


def test_what_show_prints_can_be_saved_and_checked(capsys, tmp_path):
    run("recipes", "show", "smollm2-32k")
    mine = tmp_path / "mine.yaml"
    mine.write_text(capsys.readouterr().out)
    assert run("recipes", "check", str(mine), "--set", "stages.abf.lr=1e-4") == 0


def test_schema_prints_json_and_its_help_shows_the_line_for_editors(capsys):
    assert run("recipes", "schema") == 0
    assert "stages" in json.loads(capsys.readouterr().out)["properties"]
    assert run("recipes", "schema", "--help") == 0
    assert "# yaml-language-server: $schema=" in capsys.readouterr().out
