"""What is read at a time and answered in one batch follows from model, device and lengths alone."""

import pytest
import torch
from transformers import LlamaConfig

from unspool.models.generation import greedy
from unspool.models.generation.batched import group_prompts
from unspool.models.generation.greedy import MAX_PROMPTS, plan_batches, prefill_chunk_len


class Gpu:
    total_memory = 140 << 30


class Large:
    """8B parameters, of which only the sizes are asked for."""

    device = torch.device("cuda")
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    )

    def parameters(self):
        return iter([torch.empty(8 << 30, dtype=torch.bfloat16, device="meta")])


class OnCpu(Large):
    device = torch.device("cpu")


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Gpu)


def test_chunks_on_a_gpu_depend_on_its_size_and_the_length():
    assert prefill_chunk_len(Large(), 128 << 10) >= 128 << 10, "128K of an 8B model fits an H200 in one piece"
    assert 1024 <= prefill_chunk_len(Large(), 512 << 10) < 512 << 10


def test_a_batch_and_the_row_that_is_read_into_it_fit_the_gpu():
    kept, read, weights = 128 << 10, 2 * (8 * 4096 + 4 * 4096 + 4 * 14336), 16 << 30
    for length in (1000, 30_000, 130_000):
        [first, *_] = plan_batches(Large(), [length] * 64, 100)
        padded = len(first) * (length + 100)
        row = min(greedy.MAX_ROW_TOKENS, prefill_chunk_len(Large(), padded))

        assert weights + padded * kept + row * read <= 0.8 * Gpu.total_memory
        assert row >= 16_384
    assert len(plan_batches(Large(), [4000] * 64, 100)[0]) == 64


def test_batches_hold_every_prompt_once_and_alike_ones_together():
    lens = [5, 900, 7, 800, 6] * 30
    found = plan_batches(OnCpu(), lens, 24)

    assert sorted(at for some in found for at in some) == list(range(150))
    in_order = [lens[at] for some in found for at in some]
    assert in_order == sorted(lens, reverse=True)
    assert max(map(len, found)) <= MAX_PROMPTS


def test_batches_are_about_equally_large():
    assert [len(some) for some in plan_batches(OnCpu(), [10] * 65, 6)] == [33, 32]
    assert [len(some) for some in plan_batches(OnCpu(), [20_000] * 4, 6)] == [2, 2]
    assert [len(some) for some in plan_batches(OnCpu(), [greedy.CPU_BATCH_TOKENS] * 2, 6)] == [1, 1]


def test_one_long_prompt_does_not_make_short_ones_wait():
    found = plan_batches(OnCpu(), [10] * 30 + [greedy.CPU_BATCH_TOKENS] + [10] * 30, 6)

    assert [len(some) for some in found] == [1, 60] and found[0] == [30]


def test_rows_hold_what_fits_and_a_longer_one_alone():
    assert group_prompts([5, 4, 3], 9) == [range(2), range(2, 3)]
    assert group_prompts([50, 4, 3], 9) == [range(1), range(1, 3)]
    assert group_prompts([2], 9) == [range(1)]
