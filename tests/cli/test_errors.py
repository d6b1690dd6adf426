"""What the user can mend ends in one line on stderr and exit code 2, never in a traceback."""

from pathlib import Path

import pytest
import typer

from unspool.cli.main import Commands, build_app
from unspool.core.errors import ConfigError, DataError

RECIPE = """\
name: small
model: org/name
sources:
  books: {kind: jsonl, path: books.jsonl}
datasets:
  long: {from: books, seq_len: 4K}
stages:
  - {name: one, context_length: 4K, mix: {long: 1}, tokens: 1M, batch_tokens: 16K, lr: 1e-5}
"""


def run(app: typer.Typer, *args: str) -> int:
    with pytest.raises(SystemExit) as stop:
        app(list(args))
    return int(stop.value.code or 0)


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
    """Check a recipe of this text; the one line it ends in."""
    monkeypatch.chdir(tmp_path)

    def run_check(text: str | None, *options: str) -> str:
        if text is not None:
            Path("small.yaml").write_text(text)
        assert run(build_app(), "recipes", "check", "small.yaml", *options) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith("error: ")
        assert printed.err.count("\n") == 1, printed.err
        return printed.err

    return run_check


def test_a_valid_recipe_passes_so_that_the_failures_below_mean_something(tmp_path, capsys):
    path = tmp_path / "small.yaml"
    path.write_text(RECIPE)
    assert run(build_app(), "recipes", "check", str(path)) == 0


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        (
            "seq_len: 4K",
            "seq_length: 4K",
            "small.yaml:6: datasets.long.seq_length: unknown key; did you mean 'seq_len'?",
        ),
        ("kind: jsonl", "kind: jsnol", "small.yaml:4: sources.books.kind = jsnol: not known; did you mean 'jsonl'?"),
        ("tokens: 1M", "tokens: 64Q", "small.yaml:8: stages.0.tokens = 64Q: unit 'Q' is not known"),
        ("lr: 1e-5", "lr: fast", "small.yaml:8: stages.0.lr = fast: must be a number above 0"),
        (", lr: 1e-5", "", "small.yaml:8: stages.0.lr: missing"),
        ("mix: {long", "mix: {lng", "small.yaml:8: stages.0.mix.lng: dataset 'lng' is not known; did you mean 'long'?"),
        ("model: org/name", "model: a: b", "small.yaml:2: not valid YAML"),
        ("model: org/name", "name: again\nmodel: org/name", "small.yaml:2: name: duplicate key, first given on line 1"),
        (RECIPE, "", "small.yaml: the recipe is empty"),
    ],
)
def test_a_wrong_recipe_gives_one_line_and_exit_code_2(old, new, wanted, check):
    assert old in RECIPE
    assert wanted in check(RECIPE.replace(old, new, 1))


def test_a_missing_recipe_gives_one_line_and_exit_code_2(check):
    assert "small.yaml does not exist" in check(None)


def test_a_missing_input_gives_one_line_and_exit_code_2(check):
    assert "small.yaml:4: sources.books.path = books.jsonl: no such file" in check(RECIPE, "--inputs")


def test_a_wrong_override_gives_one_line_and_exit_code_2(check):
    assert "--set stages.0.lrr=1: " in check(RECIPE, "--set", "stages.0.lrr=1")


def test_several_problems_give_a_line_each(tmp_path, capsys):
    path = tmp_path / "small.yaml"
    path.write_text(RECIPE.replace("length", "lenght").replace("1M", "64Q"))
    assert run(build_app(), "recipes", "check", str(path)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.startswith("error: ") for line in lines] == [True, True]


def test_an_unknown_verb_suggests_the_nearest(capsys):
    assert run(build_app(), "recips") == 2
    assert "Did you mean 'recipes'?" in capsys.readouterr().err


def test_an_unknown_bundled_recipe_suggests_the_nearest(capsys):
    assert run(build_app(), "recipes", "show", "tine") == 2
    assert "Did you mean 'tiny'?" in capsys.readouterr().err


def test_wrong_usage_exits_with_2(capsys):
    assert run(build_app(), "recipes", "show") == 2
    assert run(build_app(), "--nonsense") == 2


def app_that_raises(error: BaseException) -> typer.Typer:
    app = typer.Typer(cls=Commands)

    @app.command()
    def fail() -> None:
        raise error

    @app.command()
    def other() -> None: ...

    return app


@pytest.mark.parametrize("error", [ConfigError("mend the recipe."), DataError("mend the recipe.")])
def test_any_verb_may_raise_an_error_of_ours(error, capsys):
    assert run(app_that_raises(error), "fail") == 2
    assert capsys.readouterr().err == "error: mend the recipe.\n"


def test_an_interrupt_is_one_line_and_exit_code_130(capsys):
    assert run(app_that_raises(KeyboardInterrupt()), "fail") == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_bug_of_ours_is_not_disguised():
    with pytest.raises(ZeroDivisionError):
        app_that_raises(ZeroDivisionError())(["fail"])
