"""`unspool eval --rope`: a model scored with other positions, without training."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from unspool.cli.eval_options import read_rope
from unspool.cli.main import build_app
from unspool.evals.backends.base import BackendOptions, RopeOverride
from unspool.models.load import load_model
from unspool.models.location import resolve_path
from unspool.models.rotary import apply_rope
from unspool.models.tokenizer import load_tokenizer
from unspool.rope.methods import ABF, YaRN

SHIPPED = "asset:tiny-base"
LOSS = ["--suite", "perplexity", "--lengths", "1K", "--samples", "2", "--device", "cpu", "--json"]


def scored(*args: str) -> dict:
    done = CliRunner().invoke(build_app(), ["eval", *args, *LOSS])
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def refused(*args: str) -> str:
    done = CliRunner().invoke(build_app(), ["eval", SHIPPED, "--lengths", "1K", *args])
    assert (done.exit_code, done.stdout) == (2, "")
    return done.stderr


def test_scores_are_those_of_a_folder_that_has_the_positions_in_its_config(tmp_path):
    ref = resolve_path(SHIPPED, tmp_path)
    model = load_model(ref, device=torch.device("cpu"), dtype=torch.float32)
    apply_rope(model, YaRN(method="yarn"), 1024)
    model.save_pretrained(tmp_path / "yarn")
    load_tokenizer(ref).save_pretrained(tmp_path / "yarn")

    wanted, found, plain = scored(str(tmp_path / "yarn")), scored(SHIPPED, "--rope", "yarn"), scored(SHIPPED)

    assert found["cells"] == wanted["cells"] != plain["cells"]
    assert (found["model"], plain["model"]) == ("tiny-base+yarn", "tiny-base")


def test_scores_of_one_method_and_context_are_not_taken_for_those_of_another():
    def identity(**how):
        return BackendOptions(kind="transformers", model=resolve_path(SHIPPED, Path()), **how).identity

    ways = [
        {},
        *(
            {"rope": RopeOverride(rope=position, context_length=context)}
            for position in (YaRN(method="yarn"), ABF(method="abf", base=2e4), ABF(method="abf", base=3e4))
            for context in (1024, 2048)
        ),
    ]
    assert len({identity(**how) for how in ways}) == len(ways)


def test_a_method_alone_or_with_settings():
    assert read_rope("yarn") == YaRN(method="yarn")
    assert read_rope("{method: abf, base: 8e6}") == ABF(method="abf", base=8e6)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--rope", "yam"], "--rope: method = yam: "),
        (["--rope", "yam"], "yarn"),
        (["--rope", "{method: abf, bass: 8e6}"], "--rope: bass: unknown key; did you mean 'base'?"),
        (["--rope", "{method: abf, base: many}"], "--rope: base = many: must be "),
        (["--rope", "[yarn"], "cannot be read"),
        (["--rope", "3"], "write a method"),
        (["--context", "8K"], "also pass --rope"),
        (["--rope", "yarn", "--context", "much"], "--context 'much'"),
        (["--rope", "yarn", "--suite", "short"], "--context 32K"),
        (
            ["--rope", "yarn", "--suite", "ruler", "--lm-eval", "tasks"],
            "--rope cannot be combined with --lm-eval",
        ),
        (["--rope", "yarn", "--backend", "oracle"], "--rope works only with --backend transformers"),
    ],
)
def test_invalid_options_are_refused_in_one_sentence(args, says):
    assert says in refused(*args)
