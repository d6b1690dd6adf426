import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from factory import CPU, SHAPE, build_model, build_tokenizer, random_tokens
from unspool.models import export as export_module
from unspool.models.export import SCRIPT, build_request, save_model
from unspool.models.load import load_model
from unspool.models.rotary import apply_parameters, apply_rope
from unspool.rope.methods import LongRoPE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_and_config_are_written_in_the_dtype_asked_for(dtype, tmp_path):
    model = build_model()

    save_model(model, build_tokenizer(), tmp_path, dtype=dtype)

    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {dtype}  # noqa: SIM118
    # What `dtype="auto"` of other engines goes by.
    assert AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tied_weights_are_written_once_and_load_tied(dtype, tmp_path):
    save_model(build_model("llama-tied"), build_tokenizer(), tmp_path, dtype=dtype)

    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert [name for name in file.keys() if "embed" in name or "lm_head" in name] == ["model.embed_tokens.weight"]  # noqa: SIM118
    again = load_model(str(tmp_path), device=CPU, dtype=dtype)
    assert again.get_output_embeddings().weight is again.get_input_embeddings().weight


def test_the_model_in_memory_is_left_as_it_is(tmp_path):
    model = build_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    save_model(model, build_tokenizer(), tmp_path, dtype=torch.bfloat16)

    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.dtype == torch.float32


def test_bfloat16_weights_are_the_rounded_ones(tmp_path):
    model = build_model()
    save_model(model, build_tokenizer(), tmp_path, dtype=torch.bfloat16)

    again = load_model(str(tmp_path), device=CPU, dtype=torch.float32)

    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name].bfloat16().float()), name


def test_the_tokenizer_truncates_at_the_new_context_not_at_the_old(tmp_path):
    model, tokenizer = build_model(max_position_embeddings=256), build_tokenizer()
    tokenizer.model_max_length = 64

    save_model(model, tokenizer, tmp_path, dtype=torch.float32)

    again = AutoTokenizer.from_pretrained(tmp_path)
    assert len(again("the mill " * 500, truncation=True)["input_ids"]) == 256


def test_the_folder_holds_everything_plain_transformers_needs(tmp_path):
    model, tokenizer = build_model(), build_tokenizer()
    save_model(model, tokenizer, tmp_path, dtype=torch.float32)

    plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    text = "the old mill <|end|>"
    assert AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"] == tokenizer(text)["input_ids"]
    with torch.no_grad():
        tokens = random_tokens(12)
        torch.testing.assert_close(plain(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-5)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert "auto_map" not in config


def test_large_weights_are_split_over_files(tmp_path, monkeypatch):
    model = build_model()
    monkeypatch.setattr(export_module, "SHARD_SIZE", "20KB")

    save_model(model, build_tokenizer(), tmp_path, dtype=torch.float32)

    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    again = load_model(str(tmp_path), device=CPU, dtype=torch.float32)
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


ROPES = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "longrope": {
        "factor": 4.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 2.0, 3.0, 4.0],
        "original_max_position_embeddings": 64,
    },
}


FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]}


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("age", ["new", "old", "both"])
def test_readers_of_any_age_get_the_same_frequencies(kind, age, tmp_path):
    model = build_model(max_position_embeddings=64)
    # `dynamic` starts from the context that stands in the config.
    apply_parameters(model, {"rope_type": kind, "rope_theta": 5e4} | ROPES[kind], 64 if kind == "dynamic" else 256)
    save_model(model, build_tokenizer(), tmp_path, dtype=torch.float32)
    config = json.loads((tmp_path / "config.json").read_text())
    unread = {"new": ("rope_theta", "rope_scaling"), "old": ("rope_parameters",), "both": ()}[age]
    assert all(key in config for key in ("rope_theta", "rope_scaling", "rope_parameters"))
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in unread}))

    plain = AutoModelForCausalLM.from_pretrained(tmp_path).model.rotary_emb

    assert torch.equal(plain.inv_freq, model.model.rotary_emb.inv_freq)
    assert plain.attention_scaling == model.model.rotary_emb.attention_scaling


def read_by_4_57(config: dict[str, Any], dim: int, seq_len: int) -> tuple[np.ndarray, float]:
    """Frequencies and attention factor that transformers 4.57 reads from a longrope config, by its own rules."""
    scaling = config["rope_scaling"]
    original, factor = config.get("original_max_position_embeddings"), scaling.get("factor")
    if original:
        factor = config["max_position_embeddings"] / original
    else:
        original = config["max_position_embeddings"]
    attention = scaling.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    factors = scaling["long_factor"] if seq_len > original else scaling["short_factor"]
    return 1 / (np.array(factors) * config["rope_theta"] ** (np.arange(0, dim, 2) / dim)), attention


LONGROPES = {
    "factor by the lengths": {},
    "another factor": {"factor": 3.0},
    "an attention factor": {"attention_factor": 1.3},
}


def save_longrope(folder: Path, family: str, changes: dict[str, Any]) -> Any:
    """A model of 64 positions extended to 256; Phi-3 knows no other scaling than this."""
    own = {"pad_token_id": 0, "original_max_position_embeddings": 64} if family == "Phi3" else {}
    model = build_model(family, **own)
    apply_rope(model, LongRoPE.model_validate({"method": "longrope"} | FACTORS | changes), 256)
    save_model(model, build_tokenizer(), folder, dtype=torch.float32)
    return model


@pytest.mark.parametrize("family", ["llama", "Phi3"])
@pytest.mark.parametrize("changes", LONGROPES.values(), ids=LONGROPES)
def test_longrope_means_the_same_before_v5(family, changes, tmp_path):
    """4.57 looks for the original length beside the settings only: without it, short factors at every length."""
    model = save_longrope(tmp_path, family, changes)
    config = json.loads((tmp_path / "config.json").read_text())
    if family == "Phi3" and changes:
        # Its config class before v5 allows exactly three fields, which cannot express these, and refuses more.
        assert len(config["rope_scaling"]) > 3
        return
    assert family != "Phi3" or set(config["rope_scaling"]) == {"type", "short_factor", "long_factor"}
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).model.rotary_emb
    for seq_len in (32, 64, 65, 200):
        inv_freq, attention = read_by_4_57(config, 8, seq_len)
        for rotary in (model.model.rotary_emb, plain):
            rotary(torch.zeros(1), torch.arange(seq_len)[None])
            np.testing.assert_allclose(rotary.inv_freq.numpy(), inv_freq, rtol=1e-6)
            assert rotary.attention_scaling == pytest.approx(attention, rel=1e-9)


BEFORE_V5 = os.environ.get("UNSPOOL_TRANSFORMERS_4_57")


@pytest.mark.slow
@pytest.mark.skipif(not BEFORE_V5, reason="UNSPOOL_TRANSFORMERS_4_57 names no folder with transformers 4.57")
@pytest.mark.parametrize("family", ["llama", "mistral", "Phi3"])
@pytest.mark.parametrize("changes", LONGROPES.values(), ids=LONGROPES)
def test_transformers_4_57_computes_the_same_logits_below_and_above_the_original_length(family, changes, tmp_path):
    """Its folder: pip install --no-deps --target FOLDER transformers==4.57.* tokenizers==0.22.* huggingface_hub==0.*"""
    model = save_longrope(tmp_path, family, changes)
    lengths = {"below": 32, "above": 200}
    passes = [
        {"name": name, "ids": random_tokens(length)[0].tolist(), "positions": list(range(length))}
        | {"keep": 16, "dtype": "float32", "cached": False}
        for name, length in lengths.items()
    ]
    request = build_request(tmp_path, passes, text=None, device=CPU) | {"out": str(tmp_path / "out")}
    done = subprocess.run(
        [sys.executable, "-P", str(SCRIPT)],
        input=json.dumps(request) + "\n",
        env=os.environ | {"PYTHONPATH": str(BEFORE_V5)},
        capture_output=True,
        text=True,
    )
    error = json.loads(done.stdout)["error"]
    if family == "Phi3" and changes:
        assert "three fields" in error, "it must not load with other frequencies"
        return
    assert error is None
    found = load_file(tmp_path / "out")
    for name, length in lengths.items():
        with torch.no_grad():
            wanted = model(input_ids=random_tokens(length), use_cache=False).logits[0, -16:]
        torch.testing.assert_close(found[name], wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


def test_the_original_length_beside_longrope_does_not_outlive_it(tmp_path):
    save_longrope(tmp_path / "longrope", "llama", {})
    again = load_model(str(tmp_path / "longrope"), device=CPU, dtype=torch.float32)
    apply_parameters(again, {"rope_type": "default", "rope_theta": 5e5}, 256)
    save_model(again, build_tokenizer(), tmp_path / "abf", dtype=torch.float32)

    assert "original_max_position_embeddings" not in json.loads((tmp_path / "abf" / "config.json").read_text())


def test_old_words_do_not_outlive_the_settings_they_repeat(tmp_path):
    model = build_model(max_position_embeddings=64)
    apply_parameters(model, {"rope_type": "yarn", "rope_theta": 1e4} | ROPES["yarn"], 256)
    save_model(model, build_tokenizer(), tmp_path / "yarn", dtype=torch.float32)
    again = load_model(str(tmp_path / "yarn"), device=CPU, dtype=torch.float32)
    apply_parameters(again, {"rope_type": "default", "rope_theta": 5e5}, 256)
    save_model(again, build_tokenizer(), tmp_path / "abf", dtype=torch.float32)

    config = json.loads((tmp_path / "abf" / "config.json").read_text())
    assert (config["rope_theta"], config["rope_scaling"]) == (5e5, None)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "abf")
    assert torch.equal(plain.model.rotary_emb.inv_freq, again.model.rotary_emb.inv_freq)


def test_layers_of_several_kinds_keep_their_settings(tmp_path):
    kinds = ["sliding_attention", "full_attention"]
    config = transformers.Gemma3TextConfig(**SHAPE, head_dim=8, sliding_window=16, layer_types=kinds)
    model = transformers.Gemma3ForCausalLM(config).eval()
    apply_parameters(model, {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}, 512)
    save_model(model, build_tokenizer(), tmp_path, dtype=torch.float32)

    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()

    for kind in kinds:
        name = f"{kind}_inv_freq"
        assert torch.equal(getattr(plain.model.rotary_emb, name), getattr(model.model.rotary_emb, name)), kind
