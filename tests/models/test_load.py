"""What cannot be loaded, or only in part, is refused in a sentence; nothing foreign is run."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    MambaConfig,
    OPTConfig,
    PhimoeConfig,
    PhimoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from factory import CPU, SHAPE, VOCAB, build_model, build_tokenizer, random_tokens, save_folder
from unspool.core.errors import ConfigError
from unspool.data.strategies.utk.special_tokens import KNOTS, knot_ids, trained_ids
from unspool.models.attention.interface import register
from unspool.models.config import SIZES, NewModel, original_context
from unspool.models.load import build_new, fit_vocabulary, load_model
from unspool.models.tokenizer import load_tokenizer
from unspool.models.weight_files import model_digest


def load(folder):
    return load_model(str(folder), device=CPU, dtype=torch.float32)


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2", "qwen3", "mistral"])
def test_a_folder_loads_with_our_attention_in_evaluation_mode(family, tmp_path):
    stock = build_model(family, attention="eager")
    save_folder(tmp_path, stock)

    model = load(tmp_path)

    assert model.config._attn_implementation == "unspool"
    assert not model.training
    with torch.no_grad():
        torch.testing.assert_close(model(random_tokens(9)).logits, stock(random_tokens(9)).logits, rtol=1e-4, atol=1e-5)


def test_products_of_fp32_stay_fp32_where_the_environment_allows_less(tmp_path):
    """With TF32 positions beyond 2K would be rounded, in versions of transformers that multiply them as matrices."""
    build_model("llama").save_pretrained(tmp_path)
    code = f"""
import torch
from unspool.models.load import load_model
print(torch.get_float32_matmul_precision())
load_model({str(tmp_path)!r}, device=torch.device("cpu"), dtype=torch.float32)
print(torch.get_float32_matmul_precision())
"""
    env = os.environ | {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=env)
    assert done.stdout.split() == ["high", "highest"]


def test_weights_that_are_missing_are_refused_not_invented(tmp_path):
    save_folder(tmp_path, build_model(num_hidden_layers=1))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 2}))

    with pytest.raises(ConfigError, match=r"weights are missing from its files.*model\.layers\.1\."):
        load(tmp_path)


def test_a_file_cut_short_is_refused(tmp_path):
    save_folder(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])

    with pytest.raises(ConfigError, match=r"model\.safetensors is damaged"):
        load(tmp_path)


def test_pickled_weights_are_not_loaded(tmp_path):
    model = build_model()
    save_folder(tmp_path, model)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")

    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        load(tmp_path)


def test_code_in_a_model_folder_is_never_run_nor_asked_about(tmp_path, monkeypatch):
    marker = tmp_path / "ran"
    code = f"open({str(marker)!r}, 'w')\nfrom transformers import PretrainedConfig as Own\n"
    (tmp_path / "own.py").write_text(code)
    settings = {"model_type": "of-its-own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("the user was asked to trust it"))

    with pytest.raises(ConfigError, match="could not be loaded"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="no tokenizer"):
        load_tokenizer(str(tmp_path))

    assert not marker.exists()


@pytest.mark.parametrize("content", [None, "{}", "not json"])
def test_a_folder_without_a_model_is_refused(content, tmp_path):
    if content is not None:
        (tmp_path / "config.json").write_text(content)

    with pytest.raises(ConfigError, match=f"^model {tmp_path}"):
        load(tmp_path)
    with pytest.raises(ConfigError, match=f"^model {tmp_path}: no tokenizer"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ConfigError, match=f"^model {tmp_path}"):
        original_context(str(tmp_path))


def test_layers_that_attend_by_masks_of_their_own_are_refused(tmp_path):
    register()
    config = PhimoeConfig(**SHAPE, num_local_experts=2, sliding_window=5)
    save_folder(tmp_path, PhimoeForCausalLM(config))

    with pytest.raises(ConfigError, match="needs its own attention masks"):
        load(tmp_path)


def test_the_language_model_of_a_model_that_also_sees_is_loaded_alone(tmp_path):
    text = SHAPE | {"head_dim": 8, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(text_config=text, vision_config=vision | {"image_size": 28, "patch_size": 14})
    torch.manual_seed(0)
    whole = Gemma3ForConditionalGeneration(config).eval()
    save_folder(tmp_path, whole)

    model = load(tmp_path)

    assert type(model).__name__ == "Gemma3ForCausalLM"
    with torch.no_grad():
        wanted = whole(random_tokens(20)).logits
        torch.testing.assert_close(model(random_tokens(20)).logits, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (GPT2Config(vocab_size=300, n_embd=32, n_layer=1, n_head=2), "gpt2"),
        (OPTConfig(vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, ffn_dim=32), "opt"),
        (BloomConfig(vocab_size=300, hidden_size=32, n_layer=1, n_head=2), "bloom"),
        (GPTJConfig(vocab_size=300, n_embd=32, n_layer=1, n_head=2, rotary_dim=8), "has its own attention code"),
        (MambaConfig(vocab_size=300, hidden_size=32, num_hidden_layers=1, state_size=4), "mamba"),
        (T5Config(vocab_size=300, d_model=32, d_ff=32, num_layers=1, num_heads=2), "could not be loaded"),
    ],
)
def test_models_without_rotary_positions_are_refused_in_a_sentence(config, reason, tmp_path):
    kind = T5ForConditionalGeneration._from_config if config.model_type == "t5" else AutoModelForCausalLM.from_config
    save_folder(tmp_path, kind(config))

    with pytest.raises(ConfigError, match=reason) as caught:
        load(tmp_path)

    assert "\n" not in str(caught.value)


def test_the_original_context_is_what_the_config_says(tmp_path):
    save_folder(tmp_path)

    assert original_context(str(tmp_path)) == 64


def test_a_config_without_a_context_is_refused(tmp_path):
    save_folder(tmp_path, GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=32, n_layer=1, n_head=2)))

    with pytest.raises(ConfigError, match="no max_position_embeddings"):
        original_context(str(tmp_path))


# New models


def test_a_new_model_is_the_same_for_the_same_seed_and_runs_our_attention():
    new = NewModel.model_validate({"size": "4M", "tokenizer": "unused", "context_length": "1K", "base": 5e5})
    tokenizer = build_tokenizer()

    first, again, other = (build_new(new, tokenizer, seed=seed) for seed in (1, 1, 2))

    weights = [model.get_input_embeddings().weight for model in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert first.config.max_position_embeddings == 1024
    assert first.config.rope_parameters["rope_theta"] == 5e5
    assert first.config._attn_implementation == "unspool"
    assert first.config.vocab_size == len(tokenizer)
    assert first.config.eos_token_id == tokenizer.eos_token_id
    assert first.config.hidden_size == SIZES["4M"]["hidden_size"]
    assert first.get_output_embeddings().weight is first.get_input_embeddings().weight


def test_an_unknown_size_is_refused():
    with pytest.raises(ValueError, match="size must be one of 4M"):
        NewModel.model_validate({"size": "4T", "tokenizer": "unused", "context_length": 64})


# Added tokens


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
@pytest.mark.parametrize("num_embeddings", [281, 285, VOCAB])
def test_new_tokens_start_at_the_mean_and_others_stay(family, num_embeddings):
    """Also where the model has embeddings to spare, which no text has ever trained."""
    tokenizer = build_tokenizer()
    known = len(tokenizer)
    assert known == 281, "the sizes above mean: none, some and more than enough to spare"
    model = build_model(family, vocab_size=num_embeddings)
    before = [layer.weight.detach().clone() for layer in (model.get_input_embeddings(), model.get_output_embeddings())]
    trained = trained_ids(tokenizer)
    new = sorted(knot_ids(tokenizer).values())

    fit_vocabulary(model, new, trained)

    assert new == list(range(known, known + len(KNOTS)))
    size = max(num_embeddings, known + len(KNOTS))
    assert model.config.vocab_size == size
    for layer, old in zip((model.get_input_embeddings(), model.get_output_embeddings()), before, strict=True):
        weight = layer.weight.detach()
        assert weight.shape == (size, 32)
        assert torch.equal(weight[:known], old[:known])
        torch.testing.assert_close(weight[new], old[:known].mean(dim=0).expand(len(new), -1))
        assert torch.equal(weight[new[-1] + 1 :], old[new[-1] + 1 :])
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied == (family == "llama-tied")


def test_reused_tokens_start_at_the_mean_of_those_that_were_trained():
    """Tokens in reserve and embeddings without a token, which no text has trained, are no part of it."""
    model = build_model("llama")
    with torch.no_grad():
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            layer.weight[100:130] = 1e6
            layer.weight[281:] = 1e6
    old = model.get_input_embeddings().weight.detach().clone()
    trained = np.array([*range(100), *range(130, 281)])

    fit_vocabulary(model, {129, 128}, trained)

    weight = model.get_input_embeddings().weight.detach()
    torch.testing.assert_close(weight[128:130], old[trained].mean(dim=0).expand(2, -1))
    others = [row for row in range(VOCAB) if row not in (128, 129)]
    assert torch.equal(weight[others], old[others])


def test_a_head_with_a_bias_gives_new_tokens_the_mean_bias():
    model = build_model("llama")
    model.set_output_embeddings(torch.nn.Linear(32, VOCAB))
    bias = model.get_output_embeddings().bias.detach().clone()

    fit_vocabulary(model, [281], np.arange(281))

    assert model.get_output_embeddings().bias[281].item() == pytest.approx(bias[:281].mean().item(), abs=1e-6)


def test_a_tokenizer_that_gained_nothing_leaves_the_model_alone():
    model = build_model()
    before = model.get_input_embeddings().weight.detach().clone()

    fit_vocabulary(model, [], np.arange(281))

    assert torch.equal(model.get_input_embeddings().weight, before)


# Identity


def test_a_digest_follows_the_content_of_a_folder_and_the_name_of_a_hub_id(tmp_path):
    first, second = save_folder(tmp_path / "a"), save_folder(tmp_path / "b")
    assert model_digest(str(first)) == model_digest(str(second))

    save_folder(second, build_model(seed=1))

    assert model_digest(str(first)) != model_digest(str(second))
    assert model_digest("org/name") == model_digest("org/name") != model_digest("org/other")
