"""Prompts that are answered in one padded batch on a GPU, with the kernel and with CUDA graphs."""

import numpy as np
import pytest
import torch

from factory import attention_inputs
from unspool.models.attention import decode
from unspool.models.attention.decode import (
    flash_attention,
    flash_kernel_is_correct,
    masked_attention,
    padding_mask,
)
from unspool.models.generation import batched
from unspool.models.generation.batched import answer_batch, capture_graph
from unspool.models.generation.greedy import answer

from .test_batched import CUDA, FREE, NOTHING, prompts_of
from .test_greedy import made

# Heads as FlashAttention takes them, and a prompt longer than a block of its keys.
WIDE = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}


def on_cuda(kind: str, dtype: torch.dtype):
    return made(kind, **WIDE).to("cuda", dtype)


def logits_after(model, prompt: np.ndarray, answered: list[int]) -> torch.Tensor:
    """At the place of every token of an answer, without a cache."""
    ids = torch.tensor([[*prompt.tolist(), *answered]], device=model.device)
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()


def assert_about_the_most_likely(model, prompts, answers, tolerance) -> None:
    """Every token is the most likely one, or as good as that: rounding may decide between two."""
    for prompt, ids in zip(prompts, answers, strict=True):
        logits = logits_after(model, prompt, ids)
        chosen = logits.gather(1, torch.tensor(ids, device=logits.device)[:, None])[:, 0]
        assert (logits.max(dim=1).values - chosen).max() <= tolerance * logits.std()


@pytest.fixture
def graphs(monkeypatch):
    """What came of every attempt to capture a step."""
    made_graphs = []

    def watched(step, state):
        made_graphs.append(capture_graph(step, state))
        return made_graphs[-1]

    monkeypatch.setattr(batched, "capture_graph", watched)
    return made_graphs


@pytest.mark.gpu
@CUDA
@pytest.mark.parametrize("kind", ["unspool", "our window", "capped", "harpe"])
def test_in_fp32_on_cuda_a_graph_writes_what_is_written_alone(kind, graphs):
    model, prompts = on_cuda(kind, torch.float32), prompts_of(300, 9, 170, 2, 411)

    found = answer(model, NOTHING, prompts, max_new_tokens=24, stop_ids=())

    assert len(graphs) == 1 and graphs[0] is not None, "the step was not captured"
    assert found == [answer(model, NOTHING, [ids], max_new_tokens=24, stop_ids=())[0] for ids in prompts]


@pytest.mark.gpu
@CUDA
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["unspool", "our window", "capped", "harpe"])
def test_in_half_precision_a_graph_writes_what_is_most_likely(kind, dtype, graphs):
    model, prompts = on_cuda(kind, dtype), prompts_of(300, 9, 170, 2, 411)

    found = answer(model, NOTHING, prompts, max_new_tokens=24, stop_ids=())

    assert len(graphs) == 1 and graphs[0] is not None, "the step was not captured"
    assert all(len(ids) == 24 for ids in found)
    assert_about_the_most_likely(model, prompts, found, tolerance=0.1)
    assert answer(model, NOTHING, prompts, max_new_tokens=24, stop_ids=()) == found, "not the same again"


@pytest.mark.gpu
@CUDA
def test_in_half_precision_a_graph_writes_what_single_launches_write(monkeypatch):
    model, prompts = on_cuda("unspool", torch.bfloat16), prompts_of(300, 9, 170, 2, 411)
    found = answer(model, NOTHING, prompts, max_new_tokens=24, stop_ids=())
    monkeypatch.setattr(batched, "capture_graph", lambda step, state: None)

    assert answer(model, NOTHING, prompts, max_new_tokens=24, stop_ids=()) == found


@pytest.mark.gpu
@CUDA
def test_a_stop_token_ends_an_answer_of_a_graph(graphs):
    model, prompts = on_cuda("unspool", torch.float32), prompts_of(300, 9, 170, 2, 411)
    free = answer(model, NOTHING, prompts, max_new_tokens=24, stop_ids=())
    stops = {ids[2 * at] for at, ids in enumerate(free[:4])}

    found = answer(model, NOTHING, prompts, max_new_tokens=24, stop_ids=stops)

    assert found == [next((ids[:at] for at, token in enumerate(ids) if token in stops), ids) for ids in free]
    assert graphs[-1] is not None


@pytest.mark.gpu
@CUDA
def test_a_model_that_waits_for_the_device_is_answered_without_a_graph(graphs):
    model, prompts = on_cuda("unspool", torch.float32), prompts_of(30, 9, 17)
    wanted = answer(model, NOTHING, prompts, **FREE)
    model.model.norm.register_forward_hook(lambda module, args, out: out * float(out.isfinite().all()))

    assert answer(model, NOTHING, prompts, **FREE) == wanted
    assert [graph is None for graph in graphs] == [False, True]
    # And what was begun leaves nothing behind: the next one is captured again.
    model.model.norm._forward_hooks.clear()
    assert answer(model, NOTHING, prompts, **FREE) == wanted and graphs[-1] is not None
    assert torch.rand(3, device="cuda").isfinite().all(), "random numbers are still made"


@pytest.mark.gpu
@CUDA
@pytest.mark.parametrize("heads", [(9, 3, 64), (32, 8, 128), (4, 4, 64), (8, 1, 256)])
@pytest.mark.parametrize("window", [None, 100])
def test_the_kernel_agrees_with_fp32(heads, window):
    num_heads, num_kv, dim = heads
    torch.manual_seed(0)
    room_len, seen = 1500, torch.tensor([1, 128, 700, 1500], dtype=torch.int32, device="cuda")
    options = {"device": "cuda", "dtype": torch.bfloat16}
    query = torch.randn(4, num_heads, 1, dim, **options)
    key, value = (torch.randn(4, room_len, num_kv, dim, **options).transpose(1, 2) for _ in range(2))
    mask = padding_mask(seen, torch.arange(room_len, device="cuda"), window)
    inputs = attention_inputs(query, key, value, window=window)

    assert flash_kernel_is_correct(query.device, torch.bfloat16, *heads), (
        "this torch has another operator; the slow way is taken"
    )
    found = flash_attention(inputs, seen, decode.padded_offsets(4, room_len, query.device))
    wanted = masked_attention(inputs.with_heads(query.float(), key.float(), value.float()), mask)

    torch.testing.assert_close(found.float(), wanted, rtol=0.02, atol=0.02)


@pytest.mark.gpu
@CUDA
def test_memory_is_given_back_after_a_batch():
    model, prompts = on_cuda("unspool", torch.bfloat16), prompts_of(300, 9, 170, 2)
    answer(model, NOTHING, prompts, **FREE)
    before = torch.cuda.memory_allocated()

    for _ in range(3):
        answer(model, NOTHING, prompts, **FREE)

    assert torch.cuda.memory_allocated() <= before + (1 << 20)


@pytest.mark.gpu
@CUDA
def test_rows_of_a_batch_on_cuda_are_read_into_place():
    model, prompts = on_cuda("unspool", torch.float32), prompts_of(300, 9, 170, 2, 411)

    found = [
        answer_batch(model, prompts, max_new_tokens=12, stop_ids=(), row_tokens=tokens) for tokens in (100, 400, 4000)
    ]

    assert found[0] == found[1] == found[2]
