"""The recipe `olmo3-64k` as a system on the shipped model, and YaRN on a model with Olmo 3's layer types."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Olmo3Config
from typer.testing import CliRunner

from unspool.cli.main import build_app
from unspool.core.artifacts import read_manifest
from unspool.core.errors import ConfigError
from unspool.data.corpus.store import open_corpus
from unspool.data.packing.store import open_rows
from unspool.models.rotary import apply_rope
from unspool.recipe.load import load_recipe
from unspool.rope.methods import YaRN
from unspool.rope.tables import frequencies, tables

K = 1 << 10
SMALL = {
    "model": "asset:tiny-base",
    "sources.pdfs.path": "asset:demo/train.jsonl.zst",
    "sources.pdfs.aggregation.section": "[64, 512]",
    "sources.midtraining": "{kind: jsonl, path: asset:demo/heldout.jsonl.zst}",
    "datasets.long.seq_len": "512",
    "datasets.long.limit": "16K",
    "datasets.short.seq_len": "512",
    "datasets.short.limit": "16K",
    "stages.64k.context_length": "512",
    "stages.64k.tokens": "8K",
    "stages.64k.batch_tokens": "1K",
    "stages.64k.lr": "1e-3",
    "stages.64k.warmup_ratio": "0.25",
    "stages.64k.activation_checkpointing": "none",
    "evals": "[]",
    "engine.workers": "1",
}


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("olmo3") / "run"
    changes = [f"--set={key}={value}" for key, value in (SMALL | {"out": str(folder)}).items()]
    done = CliRunner().invoke(build_app(), ["train", "olmo3-64k", *changes])
    assert done.exit_code == 0, done.output
    return folder


def test_the_sources_are_filtered_and_get_their_tasks(out):
    counts = read_manifest(out / "corpus" / "pdfs")["counts"]

    assert counts["documents"] == 16 and counts["filtered"] == {"gzip_ratio_high": 4, "gzip_ratio_low": 4}
    assert 0 < counts["tasks"]["documents"] < 16
    assert counts["tasks"]["passages"] > 0 < counts["tasks"]["word_counts"]
    assert len(open_corpus(out / "corpus" / "pdfs").gzip_ratios) == 16
    assert open_corpus(out / "corpus" / "midtraining").gzip_ratios is None


def test_inspect_shows_ratios_and_tasks(out):
    shown = CliRunner().invoke(build_app(), ["inspect", str(out / "corpus" / "pdfs"), "--index", "3"]).stdout
    ratio = open_corpus(out / "corpus" / "pdfs").gzip_ratios[3]

    assert shown.count("gzip ratio   2.") == 8, "a histogram"
    assert f"gzip ratio {ratio:.2f}" in shown
    assert "tasks: documents " in shown and "filtered: gzip_ratio_high 4, gzip_ratio_low 4" in shown


def test_documents_are_masked_and_the_learning_rate_ends_at_zero(out):
    for name in ("long", "short"):
        row = open_rows(out / "datasets" / name)[0]
        assert (row.attention, len(row.tokens)) == ("intra_document", 512)
    lines = [json.loads(line) for line in (out / "stages" / "64k" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert len(steps) == 8 and all(np.isfinite(line["loss"]) for line in steps)
    rates = [line["lr"] for line in steps]
    assert max(rates) == rates[1] == pytest.approx(1e-3), "two steps of warm-up"
    assert rates[2:] == pytest.approx([1e-3 * left / 6 for left in range(5, -1, -1)], abs=1e-9), "a line down to zero"


def test_the_trained_model_has_yarn_of_factor_8(out):
    config = json.loads((out / "stages" / "64k" / "model" / "config.json").read_text())
    rope = config["rope_parameters"]

    assert config["max_position_embeddings"] == 8 * 256
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("yarn", 8, 256)
    assert (rope["beta_fast"], rope["beta_slow"]) == (32, 1)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("gzip_ratio={middle: 0.6, min: 2}", "sources.pdfs.gzip_ratio: set either middle, such as {middle: 0.6}, or"),
        ("gzip_ratio.middle=60", "sources.pdfs.gzip_ratio.middle = 60: must be a number above 0 and below 1"),
        ("gzip_ratio={keep: 0.6}", "sources.pdfs.gzip_ratio.keep: unknown key. Allowed here: max, middle, min"),
        ("aggregation.tasks={cwe: 1}", "the key 'cwe' is not known; write word_counts or passages"),
        ("aggregation.section=[64K, 4K]", "section needs .shortest, longest. with at least 64 tokens"),
        ("aggregation.share=0", "sources.pdfs.aggregation.share = 0: must be a number above 0 and of at most 1"),
    ],
)
def test_wrong_settings_in_a_recipe_are_named_with_what_is_allowed(change, problem):
    with pytest.raises(ConfigError, match=problem):
        load_recipe("olmo3-64k", [f"sources.pdfs.{change}"])


def test_yarn_changes_only_the_layers_with_full_attention():
    settings = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    config = Olmo3Config(
        **settings, num_hidden_layers=4, num_key_value_heads=2, sliding_window=16, max_position_embeddings=8 * K
    )
    assert config.layer_types == ["sliding_attention"] * 3 + ["full_attention"]
    model = AutoModelForCausalLM.from_config(config)
    method = load_recipe("olmo3-64k").recipe.stages[0].rope
    assert isinstance(method, YaRN)
    apply_rope(model, method, 64 * K)

    rope = model.config.rope_parameters
    assert rope["sliding_attention"] == {"rope_type": "default", "rope_theta": 5e5}
    assert (rope["full_attention"]["rope_type"], rope["full_attention"]["factor"]) == ("yarn", 8)
    assert model.config.max_position_embeddings == 64 * K
    rotary = model.model.rotary_emb
    plain = frequencies(np.array([5e5]), 16)[0]
    torch.testing.assert_close(rotary.sliding_attention_inv_freq, torch.tensor(plain, dtype=torch.float32))
    wanted = tables(rope["full_attention"], 16, max_positions=64 * K)
    full = rotary.full_attention_inv_freq
    torch.testing.assert_close(full, torch.tensor(wanted.inv_freq, dtype=torch.float32), rtol=1e-4, atol=0)
    assert full[-1] == pytest.approx(plain[-1] / 8, rel=1e-4), "the slowest dimension is interpolated"
    assert rotary.full_attention_attention_scaling == pytest.approx(0.1 * np.log(8) + 1)
    assert rotary.sliding_attention_attention_scaling == 1
