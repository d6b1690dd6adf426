"""Every byte that is put away comes back, and host memory is pinned once."""

import threading

import pytest
import torch

from factory import CPU
from models.memory_factory import apart, build, trained
from unspool.core.errors import UnspoolError
from unspool.models.memory import checkpointing
from unspool.models.memory.kept import Kept, Key
from unspool.models.memory.offload import Offloader, Stored, is_dense
from unspool.models.memory.policy import MemoryPolicy

OFFLOAD = MemoryPolicy(activation_checkpointing="full", offload=True)


def test_tensors_of_any_size_and_dtype_come_back_in_the_opposite_order():
    offloader = Offloader(CPU, block_bytes=64)
    tensors = [torch.randn(3, 11), torch.arange(16), torch.randn(1, 5, 2).to(torch.bfloat16), torch.randn(1)]
    stored = None
    chain = []
    for tensor in tensors:
        stored = offloader.put(tensor, before=stored)
        chain.append(stored)

    for handle, tensor in zip(reversed(chain), reversed(tensors), strict=True):
        found = offloader.take(handle)
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)
    assert len(offloader.free) == offloader.num_blocks == 3 + 2 + 1 + 1


def test_the_layout_comes_back_too_since_kernels_of_the_backward_pass_read_by_it():
    by_token = torch.randn(1, 5, 3, 4).transpose(1, 2)
    offloader = Offloader(CPU, block_bytes=64)
    handle = offloader.put(by_token)
    offloader.put(torch.randn(1))
    assert handle.on_device is None, "nothing was brought back, so the next lines would check nothing"

    found = offloader.take(handle)

    assert found.stride() == by_token.stride()
    assert torch.equal(found, by_token)


def test_what_has_gaps_stays_on_the_device():
    padded = torch.randn(3, 8)[:, :5]
    kept = Kept(Offloader(CPU), None)
    kept.put(Key("aten.mm.default", ()), (padded, torch.randn(3, 5).T))

    stays, leaves = kept._entries[0].result
    assert isinstance(leaves, Stored)
    assert stays.stride() == padded.stride() == (8, 1)
    assert [is_dense(one) for one in (padded, padded.contiguous(), torch.empty(0, 3), torch.zeros(()))] == [
        False,
        True,
        True,
        True,
    ]


def test_the_original_is_let_go_and_the_next_one_is_fetched_ahead():
    offloader = Offloader(CPU, block_bytes=64)
    first = offloader.put(torch.randn(4), before=None)
    second = offloader.put(torch.randn(4), before=first)
    third = offloader.put(torch.randn(4), before=second)

    assert first.on_device is None
    assert second.on_device is None
    assert third.on_device is not None, "its copy may not be done yet"
    offloader.take(third)
    assert second.on_device is not None
    assert first.on_device is None


def test_only_inputs_of_layers_but_the_last_are_put_away_and_blocks_are_used_again(monkeypatch):
    made = []

    class Watched(Offloader):
        def __init__(self, device):
            super().__init__(device, block_bytes=1024)
            self.shapes, self.chained = [], []
            made.append(self)

        def put(self, tensor, *, before):
            self.shapes.append(tuple(tensor.shape))
            self.chained.append(before is not None)
            return super().put(tensor, before=before)

    monkeypatch.setattr(checkpointing, "Offloader", Watched)
    model = build(policy=OFFLOAD)
    batches = [(40, 24), (64,), (8, 8)]

    found = trained(model, *batches)

    (offloader,) = made
    assert offloader.shapes == [(1, 64, 32)] * 8 + [(1, 16, 32)] * 4
    assert offloader.chained == [False, True, True, True] * 3, "each is to be fetched while the next is worked on"
    assert offloader.num_blocks == 4 * 64 * 32 * 4 // 1024
    assert len(offloader.free) == offloader.num_blocks
    assert apart(found, trained(build(), *batches)) == 0


def test_reserved_blocks_are_used_while_others_are_pinned(monkeypatch):
    slow = threading.Event()
    pin = Offloader._pin

    def pin_slowly(offloader):
        slow.wait(0.01)
        return pin(offloader)

    monkeypatch.setattr(Offloader, "_pin", pin_slowly)
    offloader = Offloader(CPU, block_bytes=64)
    offloader.reserve(20 * 64)
    stored = [offloader.put(torch.randn(4 * 16)) for _ in range(6)]  # 24 blocks

    assert offloader.num_blocks == 24, "more than 20 were needed, and no block may be pinned twice"
    assert len({block.data_ptr() for one in stored for block in one.blocks}) == 24


def test_what_cannot_be_reserved_is_reported_where_it_is_needed(monkeypatch):
    def refuse(offloader):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(Offloader, "_pin", refuse)
    offloader = Offloader(CPU, block_bytes=64)
    offloader.reserve(20 * 64)

    with pytest.raises(UnspoolError, match=r"no more than 0\.0 GiB could be pinned"):
        offloader.put(torch.randn(16))
    for thread in [one for one in threading.enumerate() if one.name == "unspool-pin"]:
        thread.join()
    assert offloader.num_blocks == 0
