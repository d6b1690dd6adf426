"""Prompts that are answered in one padded batch, against each one alone."""

from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from factory import attention_inputs
from unspool.models.attention import decode
from unspool.models.attention.decode import (
    PaddedAttention,
    flash_kernel_is_correct,
    masked_attention,
    padding_mask,
)
from unspool.models.attention.reference import reference_attention
from unspool.models.generation import batched, greedy
from unspool.models.generation.batched import Batch, PaddedLayer, Segment, capture_graph
from unspool.models.generation.greedy import answer

from .test_greedy import KINDS, made, plain

NOTHING = np.empty(0, np.uint32)
FREE = {"max_new_tokens": 6, "stop_ids": ()}
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def prompts_of(*sizes: int) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [rng.integers(97, size=size).astype(np.uint32) for size in sizes]


@pytest.fixture(scope="module")
def llama():
    return made("unspool")


@pytest.fixture
def prompts() -> list[np.ndarray]:
    return prompts_of(30, 9, 17, 2, 41)


def shapes_of(model, run) -> list[tuple[int, ...]]:
    """What each pass over the model took."""
    shapes: list[tuple[int, ...]] = []
    hook = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    run()
    hook.remove()
    return shapes


@pytest.mark.parametrize("prefill_chunk", [None, 7, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_answered_as_alone(kind, prompts, prefill_chunk):
    model = made(kind)

    found = answer(model, NOTHING, prompts, **FREE, prefill_chunk=prefill_chunk)

    wanted = [plain(model, NOTHING, ids, 6) for ids in prompts]
    assert found == wanted
    assert len({tuple(ids) for ids in wanted}) == len(prompts), "equal answers would hide a mix-up"


def test_a_row_is_read_in_one_pass_and_a_token_of_each_is_written_in_one(llama, prompts):
    shapes = shapes_of(llama, lambda: answer(llama, NOTHING, prompts, **FREE))

    assert shapes == [(1, 99)] + [(5, 1)] * 5


def test_several_rows_feed_one_batch_and_a_long_prompt_is_read_in_parts(llama, prompts):
    shapes = shapes_of(llama, lambda: answer(llama, NOTHING, prompts, **FREE, prefill_chunk=40))

    assert shapes == [(1, 40), (1, 1), (1, 30), (1, 28)] + [(5, 1)] * 5


def test_what_does_not_fit_one_batch_makes_several(llama, prompts, monkeypatch):
    wanted = answer(llama, NOTHING, prompts, **FREE)
    monkeypatch.setattr(greedy, "CPU_BATCH_TOKENS", 41 + 6)
    found: list[list[int]] = []
    shapes = shapes_of(llama, lambda: found.extend(answer(llama, NOTHING, prompts, **FREE)))

    assert found == wanted
    alone = [(1, 41)] + [(1, 1)] * 5 + [(1, 30)] + [(1, 1)] * 5
    assert shapes == alone + [(1, 26)] + [(2, 1)] * 5 + [(1, 2)] + [(1, 1)] * 5


def test_the_order_of_prompts_changes_nothing(llama, prompts):
    wanted = answer(llama, NOTHING, prompts, **FREE)

    order = [2, 0, 4, 3, 1]
    assert answer(llama, NOTHING, [prompts[at] for at in order], **FREE) == [wanted[at] for at in order]
    assert answer(llama, NOTHING, [prompts[1]] * 3, **FREE) == [wanted[1]] * 3


@pytest.mark.parametrize("kind", ["unspool", "capped", "sinks"])
def test_a_stop_token_ends_an_answer_and_those_that_are_done_leave_the_batch(kind, prompts):
    model = made(kind)
    free = answer(model, NOTHING, prompts, max_new_tokens=9, stop_ids=())
    stops = {ids[at] for at, ids in enumerate(free[:4])}
    found: list[list[int]] = []
    shapes = shapes_of(model, lambda: found.extend(answer(model, NOTHING, prompts, max_new_tokens=9, stop_ids=stops)))

    cut = [next((ids[:at] for at, token in enumerate(ids) if token in stops), ids) for ids in free]
    assert found == cut and len({len(ids) for ids in cut}) > 1
    sizes = [shape[0] for shape in shapes[1:]]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] <= 2


def test_answers_may_all_be_empty_or_one_token_long(llama, prompts):
    firsts = [ids[0] for ids in answer(llama, NOTHING, prompts, max_new_tokens=1, stop_ids=())]

    assert firsts == [plain(llama, NOTHING, ids, 1)[0] for ids in prompts]
    assert answer(llama, NOTHING, prompts, max_new_tokens=4, stop_ids=set(firsts)) == [[]] * 5


def test_nothing_of_it_stays_on_the_model(llama, prompts):
    answer(llama, NOTHING, prompts, **FREE)

    assert not any(hasattr(module, "exchange") for module in llama.modules())


@pytest.mark.parametrize("wrong", [0, 1, -1])
def test_seeing_one_key_too_many_or_too_few_would_be_noticed(llama, prompts, monkeypatch, wrong):
    wanted = answer(llama, NOTHING, prompts, **FREE)
    own = decode.padding_mask
    monkeypatch.setattr(decode, "padding_mask", lambda seen, keys, window: own(seen + wrong, keys, window))

    assert (answer(llama, NOTHING, prompts, **FREE) == wanted) == (wrong == 0)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_one_query_over_its_own_keys_is_the_reference(window, softcap, has_sinks, monkeypatch):
    torch.manual_seed(0)
    # Keys of two prompts at a time, as where they take too much in fp32.
    monkeypatch.setattr(decode, "MAX_COPIED", 2 * 2 * 20 * 8)
    lengths = torch.tensor([3, 19, 11])
    query, key, value = torch.randn(3, 4, 1, 8), torch.randn(3, 2, 20, 8), torch.randn(3, 2, 20, 8)
    sinks = torch.randn(4) if has_sinks else None
    inputs = attention_inputs(query, key, value, scaling=0.3, window=window, softcap=softcap, sinks=sinks)
    told = PaddedAttention(lengths, 20)
    told.start_step()

    found = told(None, inputs)

    for at, length in enumerate(lengths.tolist()):
        own = slice(at, at + 1)
        seen = (query[own], key[own, :, : length + 1], value[own, :, : length + 1])
        torch.testing.assert_close(found[own], reference_attention(inputs.with_heads(*seen)))


def test_tokens_go_to_the_place_of_their_prompt():
    torch.manual_seed(0)
    batch = Batch(3, 6, torch.device("cpu"))
    layer = PaddedLayer(batch)
    row, rest, new = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 3, 4), torch.randn(3, 2, 1, 4)

    batch.segments = [Segment(0, 0, 4), Segment(1, 0, 1)]
    assert layer.update(row, 2 * row)[0] is row, "a row is attended to as it is"
    for piece, part in ((Segment(2, 0, 2), rest[:, :, :2]), (Segment(2, 2, 1), rest[:, :, 2:])):
        batch.segments = [piece]
        keys, values = layer.update(part, 2 * part)
    assert torch.equal(keys, rest) and torch.equal(values, 2 * rest)
    batch.segments, batch.lengths = [], torch.tensor([4, 1, 3])
    keys, values = layer.update(new, 2 * new)

    wanted = torch.zeros(3, 2, 6, 4)
    wanted[0, :, :4], wanted[1, :, :1], wanted[2, :, :3] = row[0, :, :4], row[0, :, 4:], rest[0]
    wanted[[0, 1, 2], :, [4, 1, 3]] = new[:, :, 0]
    assert torch.equal(keys, wanted) and torch.equal(values, 2 * wanted)
    layer.select(torch.tensor([2]))
    assert torch.equal(layer.keys, wanted[2:])


class Replayed:
    """What a graph does, as far as its batch can tell: two steps before, and then the same step again and again."""

    def __init__(self, step, state):
        before = [tensor.clone() for tensor in state]
        step()
        step()
        for tensor, kept in zip(state, before, strict=True):
            tensor.copy_(kept)
        self.replay, self.resets = step, 0

    def reset(self):
        self.resets += 1


@pytest.mark.parametrize("max_new_tokens", [1, 2, 9])
@pytest.mark.parametrize("kind", ["unspool", "our window", "sinks"])
def test_steps_before_a_capture_and_prompts_that_are_done_leave_no_trace(kind, prompts, max_new_tokens, monkeypatch):
    model = made(kind)
    options = {"max_new_tokens": max_new_tokens, "stop_ids": {plain(model, NOTHING, ids, 3)[2] for ids in prompts[:3]}}
    wanted = answer(model, NOTHING, prompts, **options)
    graphs = []
    monkeypatch.setattr(batched, "can_capture", lambda model: True)
    monkeypatch.setattr(batched, "capture_graph", lambda *args: graphs.append(Replayed(*args)) or graphs[-1])

    assert answer(model, NOTHING, prompts, **options) == wanted
    assert [graph.resets for graph in graphs] == [1] * (max_new_tokens > 1)


class FakeStreams:
    """What torch keeps of streams, without a device; a capture that fails stays on its stream, as torch's does."""

    def __init__(self, monkeypatch, error: Exception | None):
        self.main, self.side = (SimpleNamespace(wait_stream=lambda other: None) for _ in range(2))
        self.now, self.error = self.main, error
        fakes = {
            "CUDAGraph": SimpleNamespace,
            "current_stream": lambda device: self.now,
            "set_stream": lambda stream: setattr(self, "now", stream),
            "stream": self.on,
            "graph": self.capture,
            "get_sync_debug_mode": lambda: 0,
            "set_sync_debug_mode": lambda mode: None,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(batched, "_side_stream", lambda device: self.side)

    @contextmanager
    def on(self, stream):
        before, self.now = self.now, stream
        yield
        self.now = before

    @contextmanager
    def capture(self, graph, stream, capture_error_mode):
        before, self.now = self.now, stream
        yield
        if self.error is not None:
            raise self.error
        self.now = before


@pytest.mark.parametrize("error", [None, RuntimeError("a capture that was broken before"), RuntimeError()])
def test_a_capture_leaves_state_and_stream_as_they_were(error, monkeypatch):
    streams, state, on = FakeStreams(monkeypatch, error), torch.tensor([3, 4]), []

    def step():
        on.append(streams.now)
        state.add_(1)

    assert (capture_graph(step, (state,)) is None) == (error is not None)
    assert on == [streams.side] * 3, "two steps before the one that is captured"
    assert state.tolist() == [3, 4] and streams.now is streams.main


def flash_forward(query, key, value, query_ends, key_ends, max_q, max_k, dropout, is_causal, debug, **options):
    """What FlashAttention-2 does with documents of one query each; `seqused_k` says how many of its keys are there."""
    assert (max_q, dropout, is_causal, debug) == (1, 0.0, False, False) and torch.diff(query_ends).eq(1).all()
    assert query_ends.dtype == key_ends.dtype == options["seqused_k"].dtype == torch.int32
    left, right = options["window_size_left"], options["window_size_right"]
    assert right == (-1 if left < 0 else 0), "other windows are taken for something else"
    rules = {"scaling": options["scale"], "window": None if left < 0 else left + 1}
    outs = []
    for at, (start, end) in enumerate(pairwise(key_ends.tolist())):
        count = int(options["seqused_k"][at])
        assert count <= end - start == max_k
        own = (heads[start : start + count].transpose(0, 1)[None] for heads in (key, value))
        outs.append(reference_attention(attention_inputs(query[at][None, :, None], *own, **rules))[0, 0])
    return (torch.stack(outs),)


@pytest.mark.parametrize("kind", ["unspool", "our window", "harpe"])
def test_answers_by_the_kernel_are_those_of_each_prompt_alone(kind, prompts, monkeypatch):
    model = made(kind)
    wanted = [plain(model, NOTHING, ids, 6) for ids in prompts]
    monkeypatch.setattr(decode, "has_flash_kernel", lambda inputs: True)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_forward)

    assert answer(model, NOTHING, prompts, **FREE) == wanted


def test_a_kernel_that_is_missing_or_looks_at_too_many_keys_is_not_used(monkeypatch):
    heads = (torch.device("cpu"), torch.float32, 4, 2, 8)
    flash_kernel_is_correct.cache_clear()
    assert not flash_kernel_is_correct(*heads), "a CPU has none"

    def kernel(extra):
        def by_other(inputs, num_keys, offsets):
            mask = padding_mask(num_keys + extra, torch.arange(inputs.key.shape[2]), inputs.window)
            return masked_attention(inputs, mask)

        return by_other

    for extra, wanted in ((0, True), (1, False)):
        flash_kernel_is_correct.cache_clear()
        monkeypatch.setattr(decode, "flash_attention", kernel(extra))
        assert flash_kernel_is_correct(*heads) == wanted
    flash_kernel_is_correct.cache_clear()


def test_a_model_that_does_not_attend_through_us_is_answered_one_prompt_at_a_time(monkeypatch, prompts):
    monkeypatch.setattr(greedy, "answer_batch", None)

    assert len(answer(made("sdpa"), NOTHING, prompts, **FREE)) == 5
