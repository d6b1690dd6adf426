"""Greedy generation for prompts that share no context: prefilled as packed documents, decoded as a padded batch.

The tokens equal those of each prompt alone, up to rounding. A step synchronizes with the device only to read the new
tokens. On CUDA, a step is one graph launch if the model allows it. Every prompt takes as much memory as the longest. In
a CUDA graph, finished prompts are computed until the batch ends, and their tokens are ignored.
"""

import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from unspool.models.attention.decode import PaddedAttention
from unspool.models.checks import intercept_attention

logger = logging.getLogger(__name__)

# CUDA graphs: one launch per decoding step.


def capture_graph(step: Callable[[], None], state: Sequence[Tensor]) -> torch.cuda.CUDAGraph | None:
    """Capture `step`, or return None if that fails.

    `state` holds every tensor that `step` both reads and updates; their values are restored. `step` must not write
    anything else that matters later.
    """
    device = state[0].device
    before = [tensor.clone() for tensor in state]
    # Torch requires a warm-up on another stream, which selects kernels and loads libraries before the capture.
    stream, main = _side_stream(device), torch.cuda.current_stream(device)
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(main)
    try:
        with torch.cuda.stream(stream):
            step()
            with _synchronizing_forbidden():
                step()
        main.wait_stream(stream)
        # Other threads of this process may use the device meanwhile.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            step()
    except RuntimeError as error:
        _warn_once(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}")
        return None
    finally:
        # After a failed capture, torch leaves the capture's stream selected.
        torch.cuda.set_stream(main)
        main.wait_stream(stream)
        for tensor, kept in zip(state, before, strict=True):
            tensor.copy_(kept)
    return graph


@contextmanager
def _synchronizing_forbidden() -> Iterator[None]:
    """Raise on synchronization. A capture would raise too, but would leave the allocator in a broken state."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # Torch warns that this mode misses some synchronizations; the capture finds those.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return one stream for all batches, because libraries keep a workspace for each stream that they have used."""
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


@cache
def _warn_once(reason: str) -> None:
    logger.warning(f"generating without a CUDA graph, which is slower ({reason})")


# The key-value cache of a batch.


@dataclass(frozen=True)
class Segment:
    """The tokens of one prompt in one pass."""

    prompt: int
    start: int  # position of the first token
    count: int


class Batch:
    """State of a batch, shared by all layers."""

    def __init__(self, num_prompts: int, capacity: int, device: torch.device) -> None:
        self.capacity = capacity  # tokens per prompt
        self.segments: list[Segment] = []  # of the current prefill pass; empty while answers are generated
        self.prompts = torch.arange(num_prompts, device=device)
        # Number of keys of each prompt, which is the position of its next token.
        self.lengths = torch.zeros(num_prompts, dtype=torch.int64, device=device)
        # The newest token of each prompt, which no layer has seen yet.
        self.tokens = torch.zeros(num_prompts, dtype=torch.int64, device=device)


class PaddedLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values [B, KV, capacity, D] of one layer, written in place."""

    keys: Tensor
    values: Tensor

    def __init__(self, batch: Batch) -> None:
        super().__init__()
        self._batch = batch

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            # Attention rounds keys to the values' dtype. Rounding here avoids rounding all keys in each step.
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = (self._allocate(new, value_states.dtype) for new in (key_states, value_states))
        batch = self._batch
        for cached, new in ((self.keys, key_states), (self.values, value_states)):
            if not batch.segments:
                cached[batch.prompts, :, batch.lengths] = new[:, :, 0].to(cached.dtype)
            at = 0
            for segment in batch.segments:
                end = segment.start + segment.count
                cached[segment.prompt, :, segment.start : end] = new[0, :, at : at + segment.count]
                at += segment.count
        if not batch.segments:
            return self.keys, self.values
        first = batch.segments[0]
        if not first.start:
            return key_states, value_states
        assert len(batch.segments) == 1, "only a single prompt can be read in chunks"
        own = slice(first.prompt, first.prompt + 1)
        end = first.start + first.count
        return self.keys[own, :, :end], self.values[own, :, :end]

    def select(self, prompts: Tensor) -> None:
        # Transposed on CUDA, so that the selection keeps the layout by token.
        self.keys, self.values = (
            cached.transpose(1, 2)[prompts].transpose(1, 2) if cached.is_cuda else cached[prompts]
            for cached in (self.keys, self.values)
        )

    def _allocate(self, new: Tensor, dtype: torch.dtype) -> Tensor:
        heads, dim, capacity = new.shape[1], new.shape[3], self._batch.capacity
        count = len(self._batch.prompts)
        # Zeros, because NaN in unused memory would reach the output, even with weight 0.
        if new.is_cuda:
            # By token, as the kernel takes it.
            return new.new_zeros(count, capacity, heads, dim, dtype=dtype).transpose(1, 2)
        return new.new_zeros(count, heads, capacity, dim, dtype=dtype)


@torch.inference_mode()
def answer_batch(
    model: Any,
    prompts: Sequence[np.ndarray],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
    row_tokens: int,
) -> list[list[int]]:
    """Generate up to a stop token (not included) or `max_new_tokens`; prompts are prefilled `row_tokens` at a time."""
    batch = Batch(len(prompts), max(map(len, prompts)) + max_new_tokens, model.device)
    cache = Cache(layer_class_to_replicate=partial(PaddedLayer, batch))
    for together in group_prompts([len(ids) for ids in prompts], row_tokens):
        _prefill(model, cache, batch, {at: prompts[at] for at in together}, row_tokens)
    batch.segments = []
    decoder = BatchDecoder(model, cache, batch)
    answers: list[list[int]] = [[] for _ in prompts]
    order = list(range(len(prompts)))  # the prompt of each line of the batch
    unfinished = set(order)
    with closing(decoder), intercept_attention(model, lambda layer: decoder.attend):
        while True:
            for at, token in zip(order, batch.tokens.tolist(), strict=True):
                if at not in unfinished:
                    continue
                if token not in stop_ids:
                    answers[at].append(token)
                if token in stop_ids or len(answers[at]) >= max_new_tokens:
                    unfinished.remove(at)
            if not unfinished:
                return answers
            if 2 * len(unfinished) <= len(order) and not decoder.is_graph:
                decoder.select([line for line, at in enumerate(order) if at in unfinished])
                order = [at for at in order if at in unfinished]
            decoder.step()


def group_prompts(lens: list[int], max_tokens: int) -> list[range]:
    """Group consecutive prompts to prefill as one packed row: as many as fit, at least one."""
    groups: list[range] = []
    start = used = 0
    for at, length in enumerate(lens):
        if at > start and used + length > max_tokens:
            groups.append(range(start, at))
            start, used = at, 0
        used += length
    return [*groups, range(start, len(lens))]


def _prefill(model: Any, cache: Cache, batch: Batch, prompts: dict[int, np.ndarray], max_tokens: int) -> None:
    """Prefill several prompts as documents of one packed row, or one long prompt in chunks."""
    lens = [len(ids) for ids in prompts.values()]
    lines = torch.tensor(list(prompts), device=model.device)
    for start in range(0, lens[0] if len(lens) == 1 else 1, max_tokens):
        some = {at: ids[start : start + max_tokens] if len(lens) == 1 else ids for at, ids in prompts.items()}
        counts = [len(ids) for ids in some.values()]
        batch.segments = [Segment(at, start, count) for at, count in zip(some, counts, strict=True)]
        positions = np.concatenate([np.arange(start, start + count) for count in counts])
        out = model(
            input_ids=to_tensor(model, np.concatenate(list(some.values())))[None],
            position_ids=to_tensor(model, positions)[None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=to_tensor(model, np.cumsum(counts) - 1),
            **({"doc_lens": tuple(counts)} if len(counts) > 1 else {}),
        )
    batch.tokens[lines] = out.logits[0].argmax(dim=-1)
    batch.lengths[lines] = to_tensor(model, np.array(lens))


class BatchDecoder:
    """The decoding steps of one batch."""

    def __init__(self, model: Any, cache: Cache, batch: Batch) -> None:
        self._model, self._cache, self._batch = model, cache, batch
        self._attention = PaddedAttention(batch.lengths, batch.capacity)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._tried_graph = not can_capture(model)

    @property
    def is_graph(self) -> bool:
        return self._graph is not None

    def attend(self, *args: Any) -> Tensor:
        return self._attention(*args)

    def step(self) -> None:
        """Add the newest tokens to the cache and replace them with the next tokens."""
        if not self._tried_graph:
            self._tried_graph = True
            self._graph = capture_graph(self._run_step, (self._batch.tokens, self._batch.lengths))
        launch: Callable[[], None] = self._run_step if self._graph is None else self._graph.replay
        launch()

    def select(self, lines: list[int]) -> None:
        """Continue with some lines of the batch."""
        batch, some = self._batch, torch.tensor(lines, device=self._model.device)
        for layer in self._cache.layers:
            layer.select(some)
        batch.prompts = batch.prompts[: len(lines)]
        batch.lengths, batch.tokens = batch.lengths[some], batch.tokens[some]
        self._attention = PaddedAttention(batch.lengths, batch.capacity)

    def close(self) -> None:
        if self._graph is not None:
            self._graph.reset()
            self._graph = None

    def _run_step(self) -> None:
        batch = self._batch
        self._attention.start_step()
        out = self._model(
            input_ids=batch.tokens[:, None],
            position_ids=batch.lengths[:, None],
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        batch.tokens.copy_(out.logits[:, -1].argmax(dim=-1))
        # Finished prompts continue too; the clamp keeps them within the capacity.
        batch.lengths.add_(1).clamp_(max=batch.capacity - 1)


def can_capture(model: Any) -> bool:
    """Return whether a CUDA graph is worth trying."""
    return bool(model.device.type == "cuda")


def to_tensor(model: Any, values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(model.device)
