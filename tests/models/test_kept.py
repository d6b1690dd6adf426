"""Kept results go back to the calls that they came from, or an error says so."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from factory import CPU, build_model, packed_inputs, random_tokens
from models.memory_factory import LAYERS, Watch, apart, build, forward, trained
from unspool.core.errors import ConfigError
from unspool.models.attention import reference
from unspool.models.memory import kept
from unspool.models.memory.checkpointing import apply_memory
from unspool.models.memory.offload import Offloader
from unspool.models.memory.policy import MemoryPolicy

KEEP = {
    "attention": MemoryPolicy(activation_checkpointing="keep-attention"),
    "groups": MemoryPolicy(activation_checkpointing="keep-attention", layers_per_checkpoint=2),
    "products": MemoryPolicy(activation_checkpointing="keep-attention", keep_products=LAYERS),
    "host": MemoryPolicy(activation_checkpointing="keep-attention", keep_products=LAYERS, keep_on_host=LAYERS),
}


# Kernels that run in the region for reasons of their own


def run_once_before_attention(monkeypatch: Any, *, size: int) -> list[int]:
    """Let the first layer run an attention of its own the first time, as a warm-up would."""
    document = reference._attend_document
    times: list[int] = []

    def with_extra(inputs: Any) -> Tensor:
        if not times:
            times.append(1)
            some = torch.zeros(1, 1, size, 8)
            F.scaled_dot_product_attention(some, some, some)
        return document(inputs)

    monkeypatch.setattr(reference, "_attend_document", with_extra)
    return times


@pytest.mark.parametrize("name", KEEP)
def test_a_warm_up_inside_of_the_first_layer_changes_nothing(name, monkeypatch):
    wanted = trained(build())
    times = run_once_before_attention(monkeypatch, size=8)

    found = trained(build(policy=KEEP[name]))

    assert times == [1]
    assert apart(found, wanted) == 0


IN_A_NEW_PROCESS = """
import sys
sys.path.insert(0, sys.argv[1])
from models.memory_factory import apart, build, trained
from unspool.models.memory.checkpointing import MemoryPolicy, apply_memory

def on_gpu(policy):
    model = build(hidden_size=256, max_position_embeddings=16384, initializer_range=0.02).cuda()
    apply_memory(model, policy)
    return trained(model, (8192, 100, 1, 900, 1047), (64,) * 4, (2048,) * 2)

kept = on_gpu(MemoryPolicy(activation_checkpointing="keep-attention", keep_products=5))
print(apart(kept, on_gpu(MemoryPolicy())))
"""


@pytest.mark.gpu
def test_the_first_attention_of_a_process_can_be_kept():
    command = [sys.executable, "-c", IN_A_NEW_PROCESS, str(Path(__file__).parents[1])]

    found = subprocess.run(command, capture_output=True, text=True, check=False)

    assert found.returncode == 0, found.stderr
    assert float(found.stdout) < 3e-2  # kernels add up gradients in any order, in bf16


# Calls that the two passes do not have in common


def region(steps: list[Any], offloader: Offloader | None = None) -> tuple[Tensor, Tensor]:
    """One checkpoint of kept products; what `steps` holds is called in front of it, one each pass."""
    inputs, weight = torch.randn(6, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    waiting = iter(steps)

    def run(hidden: Tensor) -> Tensor:
        next(waiting)()
        for _ in range(2):
            hidden = kept.call(torch.mm, hidden, weight).sin()
        return hidden

    out = checkpoint(run, inputs, use_reentrant=False, context_fn=lambda: kept.Kept(offloader, None).contexts())
    out.sum().backward()
    return inputs.grad, weight.grad


def nothing() -> None:
    pass


def product(*shape: int) -> Any:
    return lambda: kept.call(torch.mm, torch.zeros(shape), torch.zeros(4, 4))


def test_a_kept_call_in_the_forward_pass_alone_is_refused_by_its_shape():
    with pytest.raises(RuntimeError) as error:
        region([product(3, 4), nothing])

    assert str(error.value) == (
        "A bug in Unspool: the recomputation of a layer requests the kept result of "
        "aten.mm.default([6, 4] float32, [4, 4] float32), but the forward pass recorded "
        "aten.mm.default([3, 4] float32, [4, 4] float32) at this place."
    )


def test_a_kept_call_of_another_dtype_or_operator_is_refused():
    half = torch.zeros(6, 4, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"recorded aten.mm.default\(\[6, 4\] bfloat16, \[4, 4\] bfloat16\)"):
        region([lambda: kept.call(torch.mm, half, half[:4]), nothing])
    heads = torch.zeros(1, 1, 8, 8)
    with pytest.raises(RuntimeError, match=r"recorded aten\._scaled_dot_product_flash_attention_for_cpu\.default"):
        region([lambda: kept.call(F.scaled_dot_product_attention, heads, heads, heads), nothing])


def test_a_kept_call_of_the_same_shape_in_the_forward_pass_alone_leaves_a_result_behind():
    with pytest.raises(
        RuntimeError, match=r"recorded 1 more kept results than its recomputation requested, first aten"
    ):
        region([product(6, 4), nothing])


def test_a_kept_call_in_the_recomputation_alone_finds_no_result():
    with pytest.raises(RuntimeError, match=r"requests .*mm.*but the forward pass recorded no further result"):
        region([nothing, product(6, 4)])


def test_calls_that_both_passes_make_and_calls_beside_the_helper_are_accepted():
    torch.manual_seed(0)
    wanted = region([nothing, nothing])
    for steps in ([product(3, 4)] * 2, [lambda: torch.mm(torch.zeros(6, 4), torch.zeros(4, 4)), nothing]):
        torch.manual_seed(0)
        found = region(steps)
        assert all(torch.equal(ours, right) for ours, right in zip(found, wanted, strict=True))


def test_a_nested_call_is_kept_once():
    torch.manual_seed(0)
    wanted = region([nothing, nothing])
    torch.manual_seed(0)
    both = [lambda: kept.call(product(6, 4))] * 2

    found = region(both)

    assert all(torch.equal(ours, right) for ours, right in zip(found, wanted, strict=True))


def test_results_that_the_recomputation_does_not_reach_are_let_go():
    """It stops at the last saved tensor: here the last product's input, before that product runs."""
    offloader = Offloader(CPU, block_bytes=64)
    made: list[kept.Kept] = []
    inputs, weights = torch.randn(6, 4, requires_grad=True), [torch.randn(4, 4, requires_grad=True) for _ in range(3)]

    def contexts() -> Any:
        made.append(kept.Kept(offloader, None))
        return made[-1].contexts()

    def run(hidden: Tensor) -> Tensor:
        for weight in weights:
            hidden = kept.call(torch.mm, hidden, weight)
        kept.call(torch.mm, hidden.detach(), weights[0].detach())  # saves nothing
        return hidden

    out = checkpoint(run, inputs, use_reentrant=False, context_fn=contexts)
    assert len(made[0]._entries) == 2
    with Watch() as watch:
        out.sum().backward()

    assert watch.calls["aten.mm.default"] == 2 * len(weights), "none is computed again"
    assert not made[0]._entries
    assert len(offloader.free) == offloader.num_blocks


def test_layers_with_frozen_weights_give_the_same_bits():
    def frozen(policy: MemoryPolicy) -> dict[str, Tensor]:
        model = build(policy=policy)
        for name, weight in model.named_parameters():
            weight.requires_grad_("q_proj" in name)
        inputs = packed_inputs(random_tokens(64), (20, 44))
        model.base_model(**inputs, use_cache=False).last_hidden_state.pow(2).sum().backward()
        return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}

    wanted = frozen(MemoryPolicy())
    for policy in KEEP.values():
        assert apart(frozen(policy), wanted) == 0


# Attention functions that are not ours


def model_with(attention: str, policy: MemoryPolicy) -> Any:
    model = build_model(attention=attention).train()
    apply_memory(model, policy)
    return model


def test_stock_attention_is_kept():
    wanted = trained(model_with("sdpa", MemoryPolicy()), (64,))
    calls = []
    for policy in (MemoryPolicy(activation_checkpointing="full"), KEEP["attention"]):
        model = model_with("sdpa", policy)
        with Watch() as watch:
            found = trained(model, (64,))
        calls.append(watch.attention_calls)
        assert apart(found, wanted) == 0

    assert calls[0] == 2 * calls[1] > 0


def test_a_function_without_a_kernel_that_can_be_kept_is_refused():
    def plain(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        return query.transpose(1, 2), None

    AttentionInterface.register("plain", plain)

    with pytest.raises(
        ConfigError,
        match=r"activation_checkpointing: attention 'plain' runs no kernel .*checkpointing to full",
    ):
        forward(model_with("plain", KEEP["attention"]))
    forward(model_with("plain", MemoryPolicy(activation_checkpointing="full", attention_heads_at_once=1))).backward()
