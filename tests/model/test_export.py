import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from factory import CPU, build_model, build_tokenizer, random_tokens
from unspool.model.export import save_model
from unspool.model.load import load_model


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
