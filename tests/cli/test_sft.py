"""Instruction tuning through the command: conversations to rows to a trained model, loss on answers only."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from factory import SMALL_SIZE, packed_inputs
from unspool.cli.main import build_app
from unspool.core.artifacts import read_manifest
from unspool.data.facts import word_list
from unspool.data.packing.store import open_rows
from unspool.models.config import SIZES
from unspool.models.load import build_new
from unspool.models.location import resolve_path
from unspool.models.tokenizer import load_tokenizer
from unspool.recipe.load import load_recipe

TEMPLATE = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
RECIPE = """\
name: talks
model: {{size: 4M, tokenizer: asset:tiny-base, context_length: 128}}
engine: {{workers: 1}}
sources:
  talks: {{kind: chat, path: talks.jsonl, template: plain.jinja}}
datasets:
  chat: {{from: talks, seq_len: 128, packing: truncate}}
stages:
  - {{name: sft, context_length: 128, mix: {{chat: 1}}, tokens: {tokens}, batch_tokens: {tokens}, lr: 1e-3}}
"""


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SIZES, "4M", SMALL_SIZE)
        yield


def invoke(*args: str) -> Result:
    return CliRunner().invoke(build_app(), list(args))


def said(rng: np.random.Generator, count: int) -> str:
    return " ".join(rng.choice(word_list(), size=count))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A recipe whose one step takes every row once, trained."""
    folder = tmp_path_factory.mktemp("sft")
    rng = np.random.default_rng(0)
    talks = [
        {"messages": [{"role": role, "content": said(rng, 8)} for role in ("user", "assistant") * 2]} for _ in range(30)
    ]
    (folder / "talks.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    (folder / "plain.jinja").write_text(TEMPLATE)
    recipe, out = folder / "talks.yaml", folder / "out"
    recipe.write_text(RECIPE.format(tokens=128))
    result = invoke("pack", str(recipe), "--set", f"out={out}")
    assert result.exit_code == 0, result.output
    assert "trained" in result.stdout
    recipe.write_text(RECIPE.format(tokens=128 * len(open_rows(out / "datasets" / "chat"))))
    result = invoke("train", str(recipe), "--set", f"out={out}")
    assert result.exit_code == 0, result.output
    return folder


def first_loss(run: Path, *, masked: bool) -> float:
    """The loss of the first step, computed document by document with nothing of ours but the masks."""
    model_config = load_recipe(run / "talks.yaml").recipe.model
    tokenizer = load_tokenizer(resolve_path(model_config.tokenizer, run))
    model = build_new(model_config, tokenizer, seed=load_recipe(run / "talks.yaml").recipe.seed)
    rows = open_rows(run / "out" / "datasets" / "chat")
    total, count = 0.0, 0
    for index in range(len(rows)):
        row = rows[index]
        stops = np.cumsum(row.doc_lens)
        for start, stop in zip(stops - row.doc_lens, stops, strict=True):
            tokens = torch.from_numpy(row.tokens[start:stop].astype(np.int64))[None]
            if stop - start < 2:
                continue
            with torch.no_grad():
                logits = model(**packed_inputs(tokens, [int(stop - start)])).logits[0]
            losses = torch.nn.functional.cross_entropy(logits[:-1].float(), tokens[0, 1:], reduction="none")
            asked = (
                torch.from_numpy(row.loss_mask[start + 1 : stop].copy()) if masked else torch.ones(len(losses)).bool()
            )
            total, count = total + float(losses[asked].sum()), count + int(asked.sum())
    return total / count


def test_the_loss_counts_the_assistants_tokens_only(run):
    lines = (run / "out" / "stages" / "sft" / "metrics.jsonl").read_text().splitlines()
    loss = json.loads(lines[0])["loss"]
    assert len(lines) == 1
    assert loss == pytest.approx(first_loss(run, masked=True), rel=1e-5)
    assert abs(loss - first_loss(run, masked=False)) > 1e-3, "with and without masks are too alike to tell"


def test_the_counts_say_how_much_is_trained_on(run):
    counts = read_manifest(run / "out" / "datasets" / "chat")["counts"]
    assert 0 < counts["trained_tokens"] < 0.7 * counts["tokens"]
    assert counts["untrained_rows"] == 0


def test_a_second_time_nothing_is_done(run):
    result = invoke("pack", str(run / "talks.yaml"), "--set", f"out={run / 'out'}")
    assert "corpus talks: up to date" in result.stderr and "dataset chat: up to date" in result.stderr


def test_looking_shows_what_is_trained_on(run):
    shown = invoke("inspect", str(run / "out" / "datasets" / "chat"), "--index", "0").stdout
    assert "⟦…⟧ is trained on" in shown
    told = invoke("inspect", str(run / "out" / "corpus" / "talks"), "--index", "0", "--json").stdout
    (part,) = json.loads(told)["items"][0]["parts"]
    trained = "".join(span["text"] for span in part["spans"] if span["loss"])
    talk = json.loads((run / "talks.jsonl").read_text().splitlines()[0])["messages"]
    assert trained == "".join(f"{message['content']}<|endoftext|>" for message in talk[1::2])
    assert part["trained"] > 0


def test_a_missing_template_is_found_before_any_work(run, tmp_path):
    for given, message in (
        ("template: none.jinja", "sources.talks.template"),
        ("limit: 1K", "has no chat template"),
    ):
        text = RECIPE.format(tokens=128).replace("template: plain.jinja", given)
        (run / "other.yaml").write_text(text)
        result = invoke("pack", str(run / "other.yaml"), "--set", f"out={tmp_path / 'out'}")
        assert result.exit_code == 2
        assert message in result.stderr and "Traceback" not in result.stderr
