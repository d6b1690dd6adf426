"""Hostile recipes: each is refused in one line per problem, with exit code 2, before anything is written."""

import re
import time
from pathlib import Path

import pytest

from unspool.cli.main import build_app

RECIPE = """\
name: small
model: {size: 4M, tokenizer: asset:tiny-base, context_length: 64}
sources:
  books: {kind: jsonl, path: books.jsonl}
datasets:
  long: {from: books, seq_len: 4K}
stages:
  - {name: one, context_length: 4K, mix: {long: 1}, tokens: 1M, batch_tokens: 16K, lr: 1e-5}
evals:
  - {suite: niah, lengths: [4K]}
"""

BOMB = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
)

# What is replaced in the recipe, by what, and the line that it ends in.
CASES = {
    "anchors that expand without end": (RECIPE, BOMB + "\n", r"its anchors expand to too many values"),
    "an anchor that holds itself": ("name: small", "name: &a [*a]", r"its anchors expand to too many values"),
    "a Python object": ("name: small", "name: !!python/object/apply:os.system [id]", r"the YAML tag .* is not allowed"),
    "a tag of its own": ("lr: 1e-5", "lr: !float 1e-5", r"the YAML tag '!float' is not allowed"),
    "binary": ("name: small", "name: !!binary c21hbGw=", r"the YAML tag .* is not allowed"),
    "a key given twice": (
        "name: small",
        "name: small\nname: other",
        r"yaml:2: name: duplicate key, first given on line 1",
    ),
    "a list as a key": ("name: small", "? [name]\n: small", r"a key must be plain text"),
    "brackets nested deeply": ("name: small", "name: " + "[" * 1200 + "]" * 1200, r"nested too deeply|not valid YAML"),
    "mappings nested deeply": (
        "name: small",
        "name: " + "{a: " * 1200 + "}" * 1200,
        r"nested too deeply|not valid YAML",
    ),
    "two documents": ("name: small", "name: small\n---\nname: other", r"not valid YAML"),
    "control characters": ("name: small", "name: sm\x1ball", r"not valid YAML|not allowed"),
    "escaped control characters in a name": ("name: small", 'name: "sm\\e[2Jall"', r"name"),
    "a line break in a name": ("name: small", 'name: "a\\nb"', r"name"),
    "a name that leads out": ("name: one", "name: ../../one", r"stages\.0\.name"),
    "an absolute name": ("name: one", "name: /etc/one", r"stages\.0\.name"),
    "a dataset name that leads out": ("  long: {", "  ../long: {", r"datasets\.\.\./long"),
    "a source name with a slash": ("  books: {", "  a/b: {", r"sources\.a/b"),
    "a name of dots": ("name: one", 'name: ".."', r"stages\.0\.name"),
    "a name in another script": ("name: one", "name: größe", r"stages\.0\.name"),
    "an empty name": ("name: one", 'name: ""', r"stages\.0\.name"),
    "a very long name": ("name: one", f"name: {'x' * 400}", r"stages\.0\.name"),
    "NaN as a learning rate": ("lr: 1e-5", "lr: .nan", r"stages\.0\.lr"),
    "an infinite learning rate": ("lr: 1e-5", "lr: 1e999", r"stages\.0\.lr"),
    "a negative learning rate": ("lr: 1e-5", "lr: -1e-5", r"stages\.0\.lr"),
    "a negative size": ("seq_len: 4K", "seq_len: -4K", r"datasets\.long\.seq_len"),
    "a size of zero": ("seq_len: 4K", "seq_len: 0", r"datasets\.long\.seq_len"),
    "a huge size": ("tokens: 1M", "tokens: 99999999999T", r"stages\.0\.tokens"),
    "a number of 5,000 digits": ("tokens: 1M", "tokens: " + "9" * 5000, r"stages\.0\.tokens"),
    "a fraction of a token": ("tokens: 1M", "tokens: 0.3", r"stages\.0\.tokens"),
    "an unknown key": ("lr: 1e-5", "lr: 1e-5, lrr: 1", r"stages\.0\.lrr: unknown key; did you mean 'lr'"),
    "stages that are no list": (RECIPE[RECIPE.index("stages:") : RECIPE.index("evals:")], "stages: {}\n", r"stages"),
    "an empty mix": ("mix: {long: 1}", "mix: {}", r"stages\.0\.mix"),
    "shares that are not finite": ("mix: {long: 1}", "mix: {long: .inf}", r"stages\.0\.mix\.long"),
    "shares below zero": ("mix: {long: 1}", "mix: {long: -1}", r"stages\.0\.mix"),
    "shares of nothing": ("mix: {long: 1}", "mix: {long: 0}", r"stages\.0\.mix"),
    "a dataset that is not there": ("mix: {long: 1}", "mix: {short: 1}", r"dataset 'short' is not known"),
    "a source that is not there": ("from: books", "from: [1, 2]", r"datasets\.long\.from"),
    "null where a mapping is needed": ("long: {from: books, seq_len: 4K}", "long: null", r"datasets\.long"),
    "a boolean where a number is needed": ("lr: 1e-5", "lr: true", r"stages\.0\.lr"),
    "a stage that starts from itself": ("lr: 1e-5", "lr: 1e-5, init: one", r"stages\.0\.init"),
    "two stages of one name": (
        "evals:",
        "  - {name: one, context_length: 4K, mix: {long: 1}, tokens: 1M, batch_tokens: 16K, lr: 1e-5}\nevals:",
        r"stages",
    ),
    "a path with a NUL": ("path: books.jsonl", 'path: "a\\0b"', r"sources\.books\.path"),
    "a path that is too long": ("path: books.jsonl", "path: " + "x/" * 4000, r"sources\.books\.path"),
    "a variable that is not set": ("path: books.jsonl", "path: $NOT_SET/books.jsonl", r"sources\.books\.path"),
    "an out folder with a NUL": ("name: small", 'name: small\nout: "a\\0b"', r"out"),
    "an out folder that is a file": ("name: small", "name: small\nout: books.jsonl", r"books\.jsonl"),
    "an asset that leads out": ("asset:tiny-base", "asset:../../../etc", r"model"),
    "a regular expression that never ends": ("suite: niah", "suite: niah, text: '(a+)+$'", r"evals\.0\.text"),
    "only a comment": (RECIPE, "# nothing\n", r"the recipe is empty"),
    "a list": (RECIPE, "- a\n- b\n", r"a recipe must be a mapping"),
    "bytes that are no text": (RECIPE, None, r"is not UTF-8 text"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_recipe_is_refused_in_a_line_and_writes_nothing(name, tmp_path, monkeypatch, capsys):
    old, new, wanted = CASES[name]
    assert old in RECIPE
    monkeypatch.chdir(tmp_path)
    Path("books.jsonl").write_text('{"text": "one"}\n')
    if new is None:
        Path("small.yaml").write_bytes(b"\xff\xfe\x00\x01" * 9)
    else:
        Path("small.yaml").write_text(RECIPE.replace(old, new, 1), encoding="utf-8")
    began = time.monotonic()
    with pytest.raises(SystemExit) as stop:
        build_app()(["tokenize", "small.yaml"])
    printed = capsys.readouterr()

    assert stop.value.code == 2 and printed.out == ""
    lines = printed.err.splitlines()
    assert lines and all(line.startswith("error: ") for line in lines), printed.err
    assert any(re.search(wanted, line) for line in lines), printed.err
    assert max(map(len, lines)) < 2000, "a line that nobody reads"
    assert "\x1b" not in printed.err
    assert sorted(path.name for path in Path().iterdir()) == ["books.jsonl", "small.yaml"]
    assert time.monotonic() - began < 20


def test_the_recipe_passes_so_that_the_failures_above_mean_something(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("books.jsonl").write_text('{"text": "one"}\n')
    Path("small.yaml").write_text(RECIPE)
    with pytest.raises(SystemExit) as stop:
        build_app()(["recipes", "check", "small.yaml", "--inputs"])
    assert stop.value.code == 0, capsys.readouterr().err
