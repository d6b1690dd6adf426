"""Self-Extend against scores written out one by one, and in evaluation."""

import json

import pytest
import torch
from typer.testing import CliRunner

from unspool.cli.main import build_app
from unspool.core.errors import ConfigError
from unspool.models.load import load_model
from unspool.models.location import ASSETS
from unspool.models.rotary import apply_rope
from unspool.rope.methods import SelfExtend
from unspool.training.config import StageConfig

MODEL = str(ASSETS / "tiny-base")


def slow_attention(query, key, value, inv_freq, window, group, scale):
    """[H, S, D] of one document: each score from its own relative distance."""
    heads, size, dim = query.shape
    shared = heads // len(key)
    out = torch.zeros_like(query)
    for head in range(heads):
        keys, values = key[head // shared], value[head // shared]
        for i in range(size):
            scores = []
            for j in range(i + 1):
                near = i - j < window
                distance = i - j if near else i // group + window - window // group - j // group
                angle = inv_freq[head // shared] * distance
                q, k = query[head, i], keys[j]
                half = dim // 2
                # The score of a rotation by the distance between them.
                even = (q[:half] * k[:half] + q[half:] * k[half:]) * angle.cos()
                odd = (q[:half] * k[half:] - q[half:] * k[:half]) * angle.sin()
                scores.append((even + odd).sum() * scale)
            out[head, i] = torch.stack(scores).softmax(0) @ values[: i + 1]
    return out


@pytest.fixture
def model():
    return load_model(MODEL, device=torch.device("cpu"), dtype=torch.float32).eval()


def test_scores_are_those_of_two_resolutions(model):
    from unspool.models.attention.self_extend import self_extend_attention

    apply_rope(model, SelfExtend(method="self-extend", window=8, group=4), 512)
    module = model.base_model.layers[0].self_attn
    assert module.self_extend == (8, 4)
    generator = torch.Generator().manual_seed(0)
    heads, kv = model.config.num_attention_heads, model.config.num_key_value_heads
    dim = 2 * module.head_inv_freq.shape[-1]
    query, key, value = (torch.randn(1, count, 30, dim, generator=generator) for count in (heads, kv, kv))
    found = self_extend_attention(module, query, key, value, None, {})[0].transpose(0, 1)
    wanted = slow_attention(query[0], key[0], value[0], module.head_inv_freq, 8, 4, dim**-0.5)
    assert torch.allclose(found, wanted, atol=1e-5)
    # Two documents in a row, each with its own positions.
    positions = torch.cat([torch.arange(18), torch.arange(12)])[None]
    packed = self_extend_attention(module, query, key, value, None, {"doc_lens": (18, 12), "position_ids": positions})
    second = slow_attention(*(each[0, :, 18:] for each in (query, key, value)), module.head_inv_freq, 8, 4, dim**-0.5)
    assert torch.allclose(packed[0, 18:].transpose(0, 1), second, atol=1e-5)


def test_within_the_window_nothing_changes_and_beyond_it_something_does(model):
    tokens = torch.arange(5, 205)[None]
    with torch.no_grad():
        own = model(input_ids=tokens).logits
        apply_rope(model, SelfExtend(method="self-extend", window=128, group=4), 512)
        extended = model(input_ids=tokens).logits
    assert torch.allclose(own[:, :128], extended[:, :128], atol=1e-3)
    assert not torch.allclose(own[:, 150:], extended[:, 150:], atol=1e-2)


def test_what_it_cannot_reach_and_training_are_refused(model):
    with pytest.raises(ConfigError, match=r"reach 544 tokens of a model with 256, and the context is 2,048"):
        apply_rope(model, SelfExtend(method="self-extend", window=224, group=10), 2048)
    stage = {"name": "a", "context_length": 128, "mix": {"b": 1}, "tokens": 256, "batch_tokens": 128, "lr": 1e-3}
    with pytest.raises(ValueError, match="self-extend is for evaluation without training"):
        StageConfig.model_validate({**stage, "rope": {"method": "self-extend"}})


def test_eval_scores_with_it_beyond_the_models_context():
    rope = "{method: self-extend, window: 64, group: 8}"
    done = CliRunner().invoke(
        build_app(),
        [
            *("eval", MODEL, "--suite", "niah", "--lengths", "256,1K", "--samples", "4", "--value", "words", "--json"),
            *("--rope", rope, "--device", "cpu"),
        ],
    )
    assert done.exit_code == 0, done.output
    cells = json.loads(done.stdout[done.stdout.index("{") :])["cells"]
    assert {cell["length"] for cell in cells} == {256, 1024} and all(
        cell["n"] for cell in cells if cell["depth"] is None
    )
