"""Fused parts say what the model says, in every family, and nothing is compiled twice."""

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from factory import CPU, build_model
from models.memory_factory import apart, trained
from unspool.models import fuse
from unspool.models.generation.greedy import answer
from unspool.training.parallel.fsdp import build_empty


@pytest.fixture
def without_inductor(monkeypatch):
    """What would be compiled, counted and run as it is."""
    made = []
    monkeypatch.setattr(fuse.torch, "compile", lambda function: made.append(function) or function)
    fuse._compiled_rotation.cache_clear()
    yield made
    fuse._compiled_rotation.cache_clear()


@pytest.mark.parametrize("family", ["llama", "qwen2", "Qwen3", "Gemma2", "Olmo2", "Mistral"])
def test_loss_and_gradient_stay(family, without_inductor):
    wanted = trained(build_model(family).train())
    model = build_model(family).train()

    fuse.fuse_parts(model)

    assert apart(trained(model), wanted) < 1e-6
    gates = [part for part in fuse.tokenwise_modules(model) if getattr(part.forward, "__name__", "") == "gated"]
    assert len(gates) == model.config.num_hidden_layers, "the MLPs of this family were not recognised"


@pytest.mark.parametrize("family", ["llama", "qwen2", "Qwen3", "Gemma2", "Olmo2", "Mistral"])
def test_a_model_without_weights_is_fused_in_the_same_places(family, without_inductor):
    """So ranks that read their shards later compute what one rank computes."""
    model, empty = build_model(family), build_empty(build_model(family).config)

    fuse.fuse_parts(model)
    fuse.fuse_parts(empty, device=CPU)

    names = [[part.forward.__name__ for part in fuse.tokenwise_modules(one)] for one in (model, empty)]
    assert names[0] == names[1] and "gated" in names[1]
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert not list(reachable_weights(empty)), "a fused function holds the weights that it was tested with"


def reachable_weights(model):
    """Tensors with memory for matrices, in the closures of the functions that replaced `forward`."""
    for module in fuse.tokenwise_modules(model):
        for cell in getattr(module.forward, "__closure__", None) or ():
            inside = cell.cell_contents
            if isinstance(inside, nn.Module):
                yield from (weight for weight in inside.parameters() if not weight.is_meta)


def test_gate_and_rotation_are_compiled_once_for_all_layers(without_inductor):
    model = build_model("llama", num_hidden_layers=4)

    fuse.fuse_parts(model)

    names = [function.__name__ for function in without_inductor]
    assert names.count("by_token") == 1
    assert sum(name == "<lambda>" for name in names) == 1
    assert names.count("forward") == 2 * 4 + 1, "two norms a layer and the last one"


def test_rotated_heads_lie_as_attention_kernels_want_them(without_inductor):
    model = build_model("llama")
    fuse.fuse_parts(model)
    rotate = model.base_model.layers[0].self_attn.forward.__func__.__globals__[fuse.ROTATE]

    seen = rotate(*(torch.randn(1, 6, 4, 8).transpose(1, 2) for _ in range(2)), *(torch.randn(1, 6, 8),) * 2)

    assert all(turned.transpose(1, 2).is_contiguous() for turned in seen)


def test_an_mlp_that_only_looks_like_one_is_left_to_its_own_code(without_inductor):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj = nn.Linear(8, 12), nn.Linear(8, 12)
            self.down_proj, self.act_fn = nn.Linear(12, 8), nn.SiLU()

        def forward(self, hidden):
            return 2 * self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden))

    assert not fuse._fuse_gate(Scaled(), {}, 8, CPU, None)
    with torch.device("meta"):
        assert not fuse._fuse_gate(Scaled(), {}, 8, CPU, None)


def test_other_models_of_the_family_keep_their_own_rotation(without_inductor):
    fused, other = build_model("llama"), build_model("llama")
    fuse.fuse_parts(fused)

    function = other.base_model.layers[0].self_attn.forward.__func__

    assert function.__globals__[fuse.ROTATE].__name__ == fuse.ROTATE


@pytest.fixture
def compilations(monkeypatch):
    """Counts what is compiled; graphs are run as they are."""
    counter, compiled = CompileCounter(), torch.compile
    monkeypatch.setattr(fuse.torch, "compile", lambda function: compiled(function, backend=counter))
    torch._dynamo.reset()
    fuse._compiled_rotation.cache_clear()
    yield counter
    fuse._compiled_rotation.cache_clear()
    torch._dynamo.reset()


def test_prompts_of_many_lengths_are_compiled_for_once_and_written_tokens_never(compilations):
    model, plain = build_model("llama", num_hidden_layers=3), build_model("llama", num_hidden_layers=3)
    rng = np.random.default_rng(0)
    fuse.fuse_parts(model, least_tokens=16)
    counts = []
    for size in (20, 33, 47, 64, 21):
        ids = rng.integers(300, size=size).astype(np.uint32)
        for context, asked in ((ids, [ids[:1]]), (ids[:0], [ids[:15], ids[5:]]), (ids[:18], [ids[:5], ids[5:]])):
            found = answer(model, context, asked, max_new_tokens=4, stop_ids=(), prefill_chunk=18)
            assert found == answer(plain, context, asked, max_new_tokens=4, stop_ids=(), prefill_chunk=18)
            counts.append(compilations.frame_count)

    # Norms, the gate, the rotation: each once, for all layers.
    assert counts[0] == counts[-1] == 3


def test_fewer_tokens_than_told_are_never_compiled_for(compilations):
    model = build_model("llama")
    fuse.fuse_parts(model, least_tokens=65)
    with torch.inference_mode():
        model(input_ids=torch.zeros(1, 64, dtype=torch.int64))

    assert compilations.frame_count == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_fused_parts_read_many_lengths_as_before(monkeypatch):
    torch._dynamo.reset()
    options = {"hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 8192}
    model = build_model("llama", **options).to("cuda")
    prompts = [
        np.random.default_rng(size).integers(300, size=size).astype(np.uint32) for size in (700, 1300, 900, 5000)
    ]
    nothing = prompts[0][:0]

    def read():
        alone = [answer(model, ids, [ids[-1:]], max_new_tokens=8, stop_ids=(), prefill_chunk=2048) for ids in prompts]
        return [*alone, answer(model, nothing, prompts, max_new_tokens=8, stop_ids=())]

    wanted = read()
    fuse.fuse_for_reading(model)
    found = read()
    with torch._dynamo.config.patch(error_on_recompile=True):
        again = read()

    assert found == wanted == again
