"""Mistakes in an evaluation, each with the sentence that it gets."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import unspool
from unspool.cli.main import build_app

TINY = str(Path(unspool.__file__).parent / "assets" / "tiny-base")
MISTAKES = {
    "misspelled suite": (
        ["--suite", "rulr"],
        "--suite 'rulr' is not known. Did you mean 'ruler'? Known: graphwalks, helmet, indirect_needle, infbench, "
        "key_value, longbench_v2, longppl, lveval, mrcr, niah, nocha, oolong, perplexity, ruler, short.",
    ),
    "misspelled task": (
        ["--suite", "ruler", "--tasks", "niah_singel_1", "--lengths", "256"],
        "evals: task of ruler 'niah_singel_1' is not known. Did you mean 'niah_single_1'? Known: cwe, fwe, "
        "niah_multikey_1, niah_multikey_2, niah_multikey_3, niah_multiquery, niah_multivalue, niah_single_1, "
        "niah_single_2, niah_single_3, qa_1, qa_2, vt.",
    ),
    "wrong unit of a length": (
        ["--suite", "niah", "--lengths", "4Q"],
        "--lengths '4Q': unit 'Q' is not known; units are K, M, B and T (powers of 1024).",
    ),
    "length of nothing": (
        ["--suite", "niah", "--lengths", "0"],
        "--lengths '0': a size must be between 1 and 8192T.",
    ),
    "misspelled backend": (
        ["--backend", "opnai"],
        "--backend 'opnai' is not known. Did you mean 'openai'? Known: adversarial, empty, openai, oracle, "
        "transformers, vllm.",
    ),
    "missing extra": (
        ["--backend", "vllm", "--suite", "niah", "--lengths", "128"],
        "--backend vllm: vllm is not installed; run `pip install vllm`, or start a vLLM server and use --backend "
        "openai --url ADDRESS.",
    ),
    "key of a suite for short": (
        ["--suite", "short", "--set", "wordings=all"],
        "--set has no effect on --suite short, which runs lm-eval tasks; remove it.",
    ),
    "endpoint without a server": (
        ["--suite", "niah", "--lengths", "128", "--endpoint", "chat"],
        "--endpoint works only with --backend openai, not with transformers.",
    ),
    "name on a server without a server": (
        ["--suite", "niah", "--lengths", "128", "--model-name", "mine"],
        "--model-name works only with --backend openai, not with transformers.",
    ),
    "task that does not fit its length": (
        ["--suite", "ruler", "--tasks", "vt", "--lengths", "256", "--samples", "1"],
        "ruler vt: length 256 is too short: with this tokenizer, the smallest prompt and its answer need about 674 "
        "tokens. Use a larger length or remove this task.",
    ),
    "tasks that do not fit their length": (
        ["--suite", "ruler", "--tasks", "vt,niah_single_1,niah_single_2", "--lengths", "256,512", "--samples", "1"],
        "ruler: length 256 is too short for 2 tasks: with this tokenizer, the smallest prompt and its answer need "
        "about 674 tokens for vt and 294 tokens for niah_single_2. Use a larger length or remove these tasks.",
    ),
    "file where the results should go": (
        ["--suite", "niah", "--lengths", "64", "--out", "taken/results"],
        "{cwd}/taken: file exists; it already exists; move it away, or use another path.",
    ),
    "file where the page should go": (
        ["--suite", "niah", "--lengths", "64", "--html", "taken/page.html"],
        "--html taken/page.html: {cwd}/taken is a file, not a folder; use another path.",
    ),
    "missing text": (
        ["--suite", "perplexity", "--lengths", "64", "--text", "nothing.txt"],
        "--text: path 'nothing.txt' does not exist (looked for {cwd}/nothing.txt); give a file, a folder or a pattern.",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_by_one_sentence(mistake, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").touch()
    options, sentence = MISTAKES[mistake]

    result = CliRunner().invoke(build_app(), ["eval", TINY, *options])

    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == "error: " + sentence.format(cwd=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_set_passes_any_key_of_the_suite():
    options = ["--suite", "niah", "--lengths", "256", "--samples", "6", "--backend", "oracle", "--json"]
    own = ["--set", "wordings=all", "--set", "distractors=0,3", "--set", "placement=strata"]
    result = CliRunner().invoke(build_app(), ["eval", TINY, *options, *own])

    assert result.exit_code == 0, result.stderr
    cells = json.loads(result.stdout)["cells"]
    assert {cell["task"] for cell in cells if "task" in cell} >= {"wording ship", "0 distractors", "3 distractors"}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("wordings", "--set 'wordings': write KEY=VALUE, such as --set wordings=all."),
        (
            "wordings=heldot",
            "wordings: wording 'heldot' is not known; known: development, heldout, all, heldout-2, magic",
        ),
        ("wordigns=all", "--set: niah has no key 'wordigns'; did you mean 'wordings'?"),
        ("samples=3", "--set: 'samples' has its own argument, --samples; use that."),
    ],
)
def test_set_refuses_what_the_suite_does_not_have(given, sentence):
    result = CliRunner().invoke(build_app(), ["eval", TINY, "--suite", "niah", "--lengths", "256", "--set", given])

    assert result.exit_code == 2
    assert sentence in result.stderr
