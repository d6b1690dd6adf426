"""Memory settings on a GPU, in mixed precision: the same results, less memory, copies beside computing."""

from typing import Any

import pytest
import torch

from factory import random_tokens
from models.memory_factory import apart, build, forward, trained
from unspool.models.fuse import fuse_parts
from unspool.models.memory.checkpointing import apply_memory
from unspool.models.memory.offload import Offloader
from unspool.models.memory.policy import MemoryPolicy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIZE = {"hidden_size": 256, "intermediate_size": 1024, "max_position_embeddings": 8192, "initializer_range": 0.02}
DOC_LENS = (2048, 100, 1, 900, 1047)
POLICIES = {
    "full": MemoryPolicy(activation_checkpointing="full"),
    "keep-attention": MemoryPolicy(activation_checkpointing="keep-attention"),
    "offload": MemoryPolicy(activation_checkpointing="full", offload=True),
    "offload groups": MemoryPolicy(activation_checkpointing="keep-attention", layers_per_checkpoint=2, offload=True),
    "heads": MemoryPolicy(attention_heads_at_once=1),
    "tiles": MemoryPolicy(mlp_tiles=500),
    "all": MemoryPolicy(
        activation_checkpointing="keep-attention",
        layers_per_checkpoint=2,
        offload=True,
        mlp_tiles=500,
        attention_heads_at_once=1,
    ),
}
# bf16 has 8 bits; kernels that add up gradients in any order differ by about one of them.
ROUNDING = 3e-2


def on_gpu(policy: MemoryPolicy | None = None, *, compiled: bool = False) -> Any:
    model = build(**SIZE).cuda()
    if compiled:
        fuse_parts(model)
    # Only now, since settings look at the device that a model is on.
    apply_memory(model, policy or MemoryPolicy())
    return model


@pytest.mark.parametrize("name", POLICIES)
def test_settings_give_the_same_under_autocast(name):
    batches = [DOC_LENS, (4096,), DOC_LENS]

    assert apart(trained(on_gpu(POLICIES[name]), *batches), trained(on_gpu(), *batches)) < ROUNDING


@pytest.mark.parametrize("name", ["tiles", "all"])
def test_settings_give_the_same_when_compiled(name):
    model = on_gpu(POLICIES[name], compiled=True)

    assert apart(trained(model, DOC_LENS), trained(on_gpu(), DOC_LENS)) < ROUNDING


def test_each_setting_lowers_the_peak():
    peaks = {}
    for name in (None, "full", "offload", "all"):
        model = on_gpu(POLICIES[name] if name else None)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        forward(model, (4096,)).backward()
        peaks[name] = torch.cuda.max_memory_allocated() - before

    assert peaks["full"] < 0.7 * peaks[None]
    assert peaks["offload"] < peaks["full"]


def test_bytes_survive_a_busy_device():
    """Memory is let go and used again while copies are under way, as between layers."""
    offloader = Offloader(torch.device("cuda"), block_bytes=1 << 20)
    offloader.reserve(8 << 20)
    for _ in range(3):
        stored, chain, sums = None, [], []
        for number in range(12):
            tensor = random_tokens(1 << 18, number).cuda().float()
            sums.append(tensor.clone())
            stored = offloader.put(tensor, before=stored)
            chain.append(stored)
            del tensor
            # Takes the place of what was let go, and keeps the device busy.
            torch.full((1 << 18,), -1.0, device="cuda")
            torch.randn(2048, 2048, device="cuda") @ torch.randn(2048, 2048, device="cuda")
        for handle, wanted in zip(reversed(chain), reversed(sums), strict=True):
            found = offloader.take(handle)
            torch.randn(2048, 2048, device="cuda") @ torch.randn(2048, 2048, device="cuda")
            assert torch.equal(found, wanted)
    assert offloader.num_blocks == 12
    assert all(block.is_pinned() for block in offloader.free)
