"""What is computed for host memory is what offloading takes."""

import threading

import pytest
import torch

from models.memory_factory import LAYERS, build, trained
from unspool.models.memory import checkpointing
from unspool.models.memory.checkpointing import release_host_memory, reserve_host_memory
from unspool.models.memory.host_bytes import (
    BLOCK_BYTES,
    LayerWidths,
    activation_bytes,
    with_fewer_kept,
    with_larger_groups,
)
from unspool.models.memory.policy import MemoryPolicy

GIB = 1 << 30
K = 1 << 10
LLAMA_8B = LayerWidths(num_layers=32, num_heads=32, hidden=4096, queries=4096, keys=1024, inner=14336)
KEPT = MemoryPolicy(activation_checkpointing="keep-attention", offload=True, keep_products=30, keep_on_host=15)


@pytest.mark.parametrize(
    "policy",
    [
        MemoryPolicy(activation_checkpointing="full"),
        MemoryPolicy(activation_checkpointing="full", offload=True),
        MemoryPolicy(activation_checkpointing="full", offload=True, layers_per_checkpoint=2),
        MemoryPolicy(activation_checkpointing="keep-attention", offload=True, keep_products=4, keep_on_host=3),
    ],
)
def test_the_blocks_of_a_step_are_those_computed_and_are_given_back(policy):
    model = build(policy=policy)
    # One document: each one's attention is a call of its own, and keeps results of its own.
    trained(model, (64,))
    computed = activation_bytes(policy, LayerWidths.of_config(model.config.to_dict()), 64, element_bytes=4)
    assert release_host_memory(model) == computed
    assert release_host_memory(model) == 0
    trained(model, (64,))
    assert release_host_memory(model) == computed
    # Reserved beforehand, a step needs no other block.
    reserve_host_memory(model, policy, tokens=64)
    trained(model, (64,))
    assert release_host_memory(model) == computed
    # Blocks that are pinned meanwhile are released too.
    reserve_host_memory(model, policy, tokens=64)
    release_host_memory(model)
    for thread in [one for one in threading.enumerate() if one.name == "unspool-pin"]:
        thread.join()
    assert release_host_memory(model) == 0


@pytest.mark.parametrize(("device", "element_bytes"), [("cuda", 2), ("cpu", 4)])
def test_bytes_are_reserved_for_the_device_that_computes_not_for_that_of_the_weights(
    device, element_bytes, monkeypatch
):
    """With parallel.offload the weights are in host memory, but layers compute in bf16 on the GPU."""
    policy = MemoryPolicy(activation_checkpointing="full", offload=True)
    model, reserved = build(policy=policy), []
    assert next(model.parameters()).device.type == "cpu"
    (offloader, _) = checkpointing._offloaders(model)
    monkeypatch.setattr(offloader, "device", torch.device(device))
    monkeypatch.setattr(offloader, "reserve", reserved.append)
    tokens = BLOCK_BYTES // model.config.hidden_size  # one block per byte of an element
    reserve_host_memory(model, policy, tokens=tokens)

    widths = LayerWidths.of_config(model.config.to_dict())
    assert reserved == [activation_bytes(policy, widths, tokens, element_bytes=element_bytes)]
    assert reserved[0] == element_bytes * (LAYERS - 1) * BLOCK_BYTES


def test_tensors_take_whole_blocks():
    policy = MemoryPolicy(activation_checkpointing="full", offload=True)
    one_token_more = 8 * K + 1  # 8 KiB each: a block holds 8K tokens
    assert activation_bytes(policy, LLAMA_8B, 8 * K) == 31 * BLOCK_BYTES
    assert activation_bytes(policy, LLAMA_8B, one_token_more) == 2 * 31 * BLOCK_BYTES


def test_512k_tokens_of_8b_as_measured():
    """62 GiB of host memory on an H200 with two layers per checkpoint, CUDA's own included."""
    policy = MemoryPolicy(activation_checkpointing="full", offload=True, layers_per_checkpoint=2)
    assert activation_bytes(policy, LLAMA_8B, 512 * K) / GIB == 60


@pytest.mark.parametrize("room", [200, 80, 60, 30, 15.5])
def test_fewer_layers_are_kept_until_they_fit_and_no_fewer_than_needed(room):
    found = with_fewer_kept(KEPT, LLAMA_8B, 64 * K, room=room * GIB)
    assert found is not None
    assert activation_bytes(found, LLAMA_8B, 64 * K) <= room * GIB
    dropped = KEPT.keep_on_host - found.keep_on_host
    assert found.keep_products == KEPT.keep_products - dropped, "the device keeps as many layers as before"
    one_more = MemoryPolicy(**vars(found) | {"keep_on_host": found.keep_on_host + 1, "keep_products": 30})
    assert found == KEPT or activation_bytes(one_more, LLAMA_8B, 64 * K) > room * GIB


def test_checkpoints_alone_may_not_fit_and_then_groups_are_larger():
    assert with_fewer_kept(KEPT, LLAMA_8B, 64 * K, room=15 * GIB) is None
    found = with_larger_groups(KEPT, LLAMA_8B, 64 * K, room=8 * GIB)
    assert found is not None
    assert (found.layers_per_checkpoint, found.keep_products, found.keep_on_host) == (2, 0, 0)
    everything_together = with_larger_groups(KEPT, LLAMA_8B, 64 * K, room=0)
    assert everything_together is not None and everything_together.layers_per_checkpoint == LLAMA_8B.num_layers
    assert LAYERS > 4, "the stages above keep four layers"
