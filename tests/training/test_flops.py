"""What MFU counts: against counts by hand, and against torch's own counter."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from factory import CPU, build_model, packed_inputs, random_tokens
from unspool.training.metrics.flops import MfuCounter, count_flops, known_peak, peak_flops, visible_pairs

# The shape of factory.SHAPE: two layers, hidden 32, MLP 48, 4 heads of 8 (2 for keys), vocabulary 300.
PROJECTIONS = 32 * 32 + 2 * 32 * 16 + 32 * 32
MLP = 3 * 32 * 48
HEAD = 300 * 32


def counted(model, doc_lens) -> int:
    """Operations that torch counts in a forward and a backward pass whose attention is written as plain products."""
    tokens = random_tokens(sum(doc_lens))
    with FlopCounterMode(display=False) as counter:
        logits = model(**packed_inputs(tokens, doc_lens), use_cache=False).logits
        logits.float().logsumexp(-1).sum().backward()
    # Up to 5.18, transformers turns positions into angles by a matrix product, which is none of a model's work.
    angles = counter.get_flop_counts().get(f"{type(model).__name__}.model.rotary_emb", {})
    return counter.get_total_flops() - sum(angles.values())


def test_the_count_of_a_small_model_by_hand():
    count = count_flops(build_model())

    assert count.per_token == 6 * (2 * (PROJECTIONS + MLP) + HEAD)
    # Two layers · 4 heads · (8 + 8) · half a square, 2 operations each, 3 passes; documents do not see each other.
    attention = 2 * 4 * 16 * (20**2 + 12**2) / 2 * 2 * 3
    assert count.step([20, 12]) == 32 * count.per_token + attention
    assert count.step([32]) > count.step([20, 12]) > count.step([1] * 32)


@pytest.mark.parametrize("family", ["llama", "llama-mha", "llama-mqa", "llama-tied", "qwen2", "qwen3"])
def test_the_count_is_that_of_torch_up_to_causal_halving(family):
    model = build_model(family, attention="eager").train()

    ours = count_flops(model)
    weights, attention = 24 * ours.per_token, ours.step([24]) - 24 * ours.per_token

    assert counted(model, [24]) == weights + 2 * attention


def test_a_tied_head_counts_once_and_an_embedding_not_at_all():
    tied, untied = build_model("llama-tied"), build_model()
    assert sum(w.numel() for w in untied.parameters()) - sum(w.numel() for w in tied.parameters()) == HEAD
    assert count_flops(tied).per_token == count_flops(untied).per_token


def test_a_mixture_counts_the_experts_that_a_token_meets():
    shape = {"num_local_experts": 8, "num_experts_per_tok": 2}
    one = count_flops(build_model("Mixtral", sliding_window=None, **shape)).per_token
    router = 8 * 32
    assert one == 6 * (2 * (PROJECTIONS + 2 * MLP + router) + HEAD)

    more = count_flops(build_model("Mixtral", sliding_window=None, **shape | {"num_local_experts": 16})).per_token
    assert more - one == 6 * 2 * router, "experts that no token meets cost nothing"


def test_a_shared_expert_is_met_by_all():
    shape = {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 48, "decoder_sparse_step": 1}
    model = build_model("Qwen2Moe", shared_expert_intermediate_size=48, **shape)
    gates = 4 * 32 + 32  # the router's, and that of the shared expert
    biases_leave_no_trace = PROJECTIONS + 2 * MLP + gates
    assert count_flops(model).per_token == 6 * (2 * biases_leave_no_trace + HEAD)


def test_a_window_bounds_what_a_token_sees():
    lens = np.array([4.0, 10.0])
    assert visible_pairs(lens, None).tolist() == [8.0, 50.0]
    assert visible_pairs(lens, 10).tolist() == [8.0, 50.0], "a window that reaches everywhere is none"
    # 10 tokens of which each sees 4: 4 · 10, less the corner that does not exist.
    assert visible_pairs(lens, 4).tolist() == [8.0, 32.0]

    model = build_model("Mistral", sliding_window=4)
    assert [layer.window for layer in count_flops(model).layers] == [4, 4]


def test_only_sliding_layers_have_a_window():
    kinds = ["sliding_attention", "full_attention"]
    model = build_model("Gemma2", sliding_window=8, layer_types=kinds, head_dim=8)
    assert [layer.window for layer in count_flops(model).layers] == [8, None]


def test_what_is_not_trained_costs_no_gradient_of_its_own():
    model = build_model()
    all_trained = count_flops(model).per_token
    for name, weight in model.named_parameters():
        weight.requires_grad_("mlp" not in name)
    assert all_trained - count_flops(model).per_token == 2 * 2 * MLP


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", None),
        ("NVIDIA H20", 148e12),
        ("AMD Instinct MI300X", 1307e12),
        ("Tesla V100-SXM2-32GB", None),
        ("Some future device", None),
    ],
)
def test_peaks_are_known_by_name_or_not_at_all(name, peak):
    assert known_peak(name) == peak


def test_a_cpu_has_no_peak():
    assert peak_flops(CPU) is None


def test_a_count_that_forgets_the_head_is_caught_by_torch():
    model = build_model(attention="eager").train()
    ours = count_flops(model)
    wrong = dataclasses.replace(ours, per_token=ours.per_token - 6 * HEAD)
    attention = ours.step([24]) - 24 * ours.per_token
    assert counted(model, [24]) != 24 * wrong.per_token + 2 * attention


@pytest.mark.gpu
def test_this_gpu_has_a_peak_or_none():
    peak = peak_flops(torch.device("cuda"))
    assert peak is None or 1e13 < peak < 1e16


def test_an_8b_model_at_64k_comes_out_at_the_published_rate():
    shape = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=32, num_key_value_heads=8))
    # A rate that transformers with Liger reached on an H200: 427 TFLOP/s by this convention, 43% of 989.
    rate = count_flops(model).step([65536]) / 65536 * 4423
    assert rate == pytest.approx(427e12, rel=2e-3)
    assert MfuCounter(count_flops(model), known_peak("NVIDIA H200")).mfu([65536], 65536 / 4423) == pytest.approx(
        0.432, abs=1e-3
    )
