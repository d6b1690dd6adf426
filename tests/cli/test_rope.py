"""`unspool rope`: advice that a recipe can take as it stands."""

import json

import pytest
import torch
import yaml
from pydantic import TypeAdapter
from typer.testing import CliRunner

from factory import build_model, build_tokenizer, save_folder
from unspool.cli.main import build_app
from unspool.models.export import save_model
from unspool.models.rotary import apply_rope
from unspool.rope.bound import bound, first_negative
from unspool.rope.harpe import HARPE
from unspool.rope.methods import ABF, AnyRopeMethod, YaRN
from unspool.rope.tables import shape_of

METHODS = ["unchanged", "abf", "ntk", "pi", "dynamic", "ntk-by-parts", "yarn", "llama3", "harpe", "cope"]


def run(*options: object):
    return CliRunner().invoke(build_app(), ["rope", *map(str, options)])


def shown(*options: object) -> str:
    done = run(*options)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture(scope="module")
def advice() -> dict:
    return json.loads(shown("--model", "asset:tiny-base", "--context", "2K", "--json"))


def test_each_method_is_advised_with_a_line_that_comes_to_what_is_said(advice):
    assert [each["method"] for each in advice["methods"]] == METHODS
    rope = shape_of(
        {
            "rope_parameters": advice["parameters"],
            "max_position_embeddings": advice["rope"]["max_positions"],
            "num_attention_heads": 4,
            "num_key_value_heads": advice["rope"]["num_kv_heads"],
            "head_dim": advice["rope"]["rotary_dim"],
        }
    )
    for each in advice["methods"][1:]:
        pasted = TypeAdapter(AnyRopeMethod).validate_python(yaml.safe_load(each["line"])["rope"])
        settled = pasted.resolve(rope, 2048)
        assert settled.parameters == each["parameters"]
        assert settled.max_positions == each["max_positions"]
        tables = settled.tables(rope, 2048).inv_freq.astype(float)
        lines = tables if tables.ndim == 2 else tables[None]
        reaches = [first_negative(line, advice["looked_until"]) or advice["looked_until"] for line in lines]
        assert each["reach"] == [min(reaches), max(reaches)]


def test_the_bound_is_exact_and_its_base_reaches_the_context(advice):
    assert advice["bound"] == bound(2048, 32)
    (abf,) = (each for each in advice["methods"] if each["method"] == "abf")
    assert abf["parameters"]["rope_theta"] == advice["bound"]
    assert abf["reach"][0] >= 2048
    assert min(abf["curve"]) >= 0
    assert min(advice["methods"][0]["curve"]) < 0
    assert len(abf["curve"]) == len(advice["edges"]) - 1


def test_the_terminal_shows_the_same_and_where_it_comes_from(advice):
    text = shown("--model", "asset:tiny-base", "--context", "2K")

    for each in advice["methods"][1:]:
        assert each["line"] in text
    for words in ("32 dimensions", "4 KV heads", "256 tokens", "bound of Men", "NTK rule", "arXiv 2410.02660", "×"):
        assert words in text
    assert "\x1b" not in text


def test_a_page_is_written_whole(tmp_path):
    page = tmp_path / "page.html"

    text = shown("--model", "asset:tiny-base", "--context", "2K", "--html", page)

    assert f"page: {page}" in text
    html = page.read_text()
    assert html.count("<svg") == len(METHODS)
    assert "http" not in html.replace("http-equiv", "")
    assert "<script" not in html


def test_models_that_have_been_extended_are_counted_from_their_original_length(tmp_path):
    for name, position in {
        "yarn": YaRN(method="yarn", beta_fast=4),
        "harpe": HARPE(method="harpe", low=1e4, high=1e5),
        "abf": ABF(method="abf", base=1e5),
    }.items():
        model = build_model(head_dim=16)
        apply_rope(model, position, 128)
        save_model(model, build_tokenizer(), tmp_path / name, dtype=torch.float32)

        found = json.loads(shown("--model", tmp_path / name, "--context", "512", "--json"))

        by_name = {each["method"]: each for each in found["methods"]}
        assert by_name["pi"]["parameters"]["factor"] == (8 if name == "yarn" else 4)
        assert (
            by_name["unchanged"]["summary"]
            == {
                "yarn": "base 10000, yarn scaling",
                "harpe": "a base per head, 10000 to 1e5",
                "abf": "base 1e5",
            }[name]
        )


def test_what_only_some_heads_or_layers_have_is_said(tmp_path):
    save_folder(tmp_path, build_model("llama-mqa", head_dim=16))

    text = shown("--model", tmp_path, "--context", "256")

    assert "a single KV head" in text
    assert "method: harpe" not in text


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (("--model", "asset:tiny-base", "--context", "long"), "--context long: write a size such as 64K"),
        (("--model", "asset:tiny-base", "--context", "128"), "--context 128: the model was trained for 256 already"),
        (("--model", "asset:tiny-bass", "--context", "8K"), "did you mean 'asset:tiny-base'?"),
    ],
)
def test_what_cannot_be_advised_is_one_sentence(options, wanted):
    done = run(*options)

    assert done.exit_code == 2
    assert wanted in done.stderr
    assert "Traceback" not in done.output


def test_a_model_without_rope_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))

    done = run("--model", tmp_path, "--context", "8K")

    assert done.exit_code == 2
    assert "'gpt2' has no RoPE base" in done.stderr
