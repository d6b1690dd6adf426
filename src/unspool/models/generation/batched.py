"""Answers to prompts that have nothing in common: read as documents of rows, written as one padded batch.

In: token ids. Out: the most likely tokens after each.
Promise: the same ids as decoding each prompt on its own, up to rounding; nothing waits for the device but reading the
new tokens, once a step; on CUDA a step is one launch, where the model allows it.
Price: every prompt takes the room of the longest. One that is done goes on unheard, in a graph to the end of its batch.
Elsewhere: which prompts make a batch (room.py), attention while answers are written (attention_decode.py).
"""

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

from unspool.core.progress import say
from unspool.models.attention.decode import OwnKeys
from unspool.models.checks import stand_between
from unspool.models.generation.batch_limits import rows

# One step of writing as one launch: a CUDA graph.


def captured(step: Callable[[], None], state: Sequence[Tensor]) -> torch.cuda.CUDAGraph | None:
    """`state`: all that `step` goes on from; what else it writes must not matter to a later call."""
    device = state[0].device
    before = [tensor.clone() for tensor in state]
    # Kernels are chosen and libraries loaded outside of the capture, on another stream, as torch asks for.
    stream, main = _side_stream(device), torch.cuda.current_stream(device)
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(main)
    try:
        with torch.cuda.stream(stream):
            step()
            with _waiting_forbidden():
                step()
        main.wait_stream(stream)
        # Other threads of this process may use the device for something else.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            step()
    except RuntimeError as error:
        _say_once(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}")
        return None
    finally:
        # Where a capture cannot be ended, torch stays on its stream.
        torch.cuda.set_stream(main)
        main.wait_stream(stream)
        for tensor, kept in zip(state, before, strict=True):
            tensor.copy_(kept)
    return graph


@contextmanager
def _waiting_forbidden() -> Iterator[None]:
    """Whatever waits for the device raises. In a capture it would too, and leave the allocator in disorder."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # That it does not find everything is no matter here: the capture comes next.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all batches: libraries keep a workspace for every stream that they have seen."""
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


@cache
def _say_once(reason: str) -> None:
    say(f"answers are written without a CUDA graph, which takes longer ({reason})")


@dataclass(frozen=True)
class Piece:
    """Tokens of a pass that belong to one prompt: the place of the first, and how many they are."""

    prompt: int
    start: int
    count: int


class Batch:
    """What stands where: shared by all layers, and changed from pass to pass."""

    def __init__(self, num_prompts: int, room: int, device: torch.device) -> None:
        self.room = room
        self.pieces: list[Piece] = []
        """What is being read; none while answers are written, a token of each prompt at a time."""
        self.prompts = torch.arange(num_prompts, device=device)
        self.lengths = torch.zeros(num_prompts, dtype=torch.int64, device=device)
        """Keys of each prompt, and so the place of its next token."""
        self.tokens = torch.zeros(num_prompts, dtype=torch.int64, device=device)
        """The newest of each prompt, which no layer has seen yet."""


class PaddedLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values [B, KV, room, D] of one layer; what is read goes to its place at once and is kept only there."""

    keys: Tensor
    values: Tensor

    def __init__(self, batch: Batch) -> None:
        super().__init__()
        self._batch = batch

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            # Attention rounds keys to the values' dtype; rounded here, it need not do so for all of them in each step.
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = (self._padded(new, value_states.dtype) for new in (key_states, value_states))
        now = self._batch
        for kept, new in ((self.keys, key_states), (self.values, value_states)):
            if not now.pieces:
                kept[now.prompts, :, now.lengths] = new[:, :, 0].to(kept.dtype)
            at = 0
            for piece in now.pieces:
                kept[piece.prompt, :, piece.start : piece.start + piece.count] = new[0, :, at : at + piece.count]
                at += piece.count
        if not now.pieces:
            return self.keys, self.values
        first = now.pieces[0]
        if not first.start:
            return key_states, value_states
        assert len(now.pieces) == 1, "only a prompt alone is read in parts"
        own = slice(first.prompt, first.prompt + 1)
        end = first.start + first.count
        return self.keys[own, :, :end], self.values[own, :, :end]

    def keep(self, prompts: Tensor) -> None:
        # By token and back: what lies so has to stay so.
        self.keys, self.values = (
            kept.transpose(1, 2)[prompts].transpose(1, 2) if kept.is_cuda else kept[prompts]
            for kept in (self.keys, self.values)
        )

    def _padded(self, new: Tensor, dtype: torch.dtype) -> Tensor:
        heads, dim, room = new.shape[1], new.shape[3], self._batch.room
        count = len(self._batch.prompts)
        # Zeros: what no prompt has written must not be NaN, which weighs even where its weight is 0.
        if new.is_cuda:
            # By token, as the kernel wants it.
            return new.new_zeros(count, room, heads, dim, dtype=dtype).transpose(1, 2)
        return new.new_zeros(count, heads, room, dim, dtype=dtype)


@torch.inference_mode()
def answer_batch(
    model: Any,
    prompts: Sequence[np.ndarray],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
    row_tokens: int,
) -> list[list[int]]:
    """Up to a stop token (left out) or `max_new_tokens`; read in rows, or parts of one prompt, of `row_tokens`."""
    batch = Batch(len(prompts), max(map(len, prompts)) + max_new_tokens, model.device)
    cache = Cache(layer_class_to_replicate=partial(PaddedLayer, batch))
    for together in rows([len(ids) for ids in prompts], row_tokens):
        _read(model, cache, batch, {at: prompts[at] for at in together}, row_tokens)
    batch.pieces = []
    writing = Writing(model, cache, batch)
    answers: list[list[int]] = [[] for _ in prompts]
    places = list(range(len(prompts)))  # whose answer stands in which line of the batch
    going = set(places)
    with closing(writing), stand_between(model, lambda layer: writing.attend):
        while True:
            for at, token in zip(places, batch.tokens.tolist(), strict=True):
                if at not in going:
                    continue
                if token not in stop_ids:
                    answers[at].append(token)
                if token in stop_ids or len(answers[at]) >= max_new_tokens:
                    going.remove(at)
            if not going:
                return answers
            if 2 * len(going) <= len(places) and not writing.is_graph:
                writing.keep([line for line, at in enumerate(places) if at in going])
                places = [at for at in places if at in going]
            writing.step()


def _read(model: Any, cache: Cache, batch: Batch, prompts: dict[int, np.ndarray], most: int) -> None:
    """Several prompts as documents of one row, or a long one in parts."""
    lens = [len(ids) for ids in prompts.values()]
    who = torch.tensor(list(prompts), device=model.device)
    for start in range(0, lens[0] if len(lens) == 1 else 1, most):
        some = {at: ids[start : start + most] if len(lens) == 1 else ids for at, ids in prompts.items()}
        counts = [len(ids) for ids in some.values()]
        batch.pieces = [Piece(at, start, count) for at, count in zip(some, counts, strict=True)]
        out = model(
            input_ids=_ids(model, np.concatenate(list(some.values())))[None],
            position_ids=_ids(model, np.concatenate([np.arange(start, start + count) for count in counts]))[None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=_ids(model, np.cumsum(counts) - 1),
            **({"doc_lens": tuple(counts)} if len(counts) > 1 else {}),
        )
    batch.tokens[who] = out.logits[0].argmax(dim=-1)
    batch.lengths[who] = _ids(model, np.array(lens))


class Writing:
    """The steps of one batch."""

    def __init__(self, model: Any, cache: Cache, batch: Batch) -> None:
        self._model, self._cache, self._batch = model, cache, batch
        self._own_keys = OwnKeys(batch.lengths, batch.room)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._is_tried = not can_capture(model)

    @property
    def is_graph(self) -> bool:
        return self._graph is not None

    def attend(self, *args: Any) -> Tensor:
        return self._own_keys(*args)

    def step(self) -> None:
        """Put the newest tokens into the cache, and those that follow into their place."""
        if not self._is_tried:
            self._is_tried = True
            self._graph = captured(self._eager, (self._batch.tokens, self._batch.lengths))
        launch: Callable[[], None] = self._eager if self._graph is None else self._graph.replay
        launch()

    def keep(self, lines: list[int]) -> None:
        """Go on with some of the batch."""
        batch, some = self._batch, torch.tensor(lines, device=self._model.device)
        for layer in self._cache.layers:
            layer.keep(some)
        batch.prompts, batch.lengths, batch.tokens = (
            batch.prompts[: len(lines)],
            batch.lengths[some],
            batch.tokens[some],
        )
        self._own_keys = OwnKeys(batch.lengths, batch.room)

    def close(self) -> None:
        if self._graph is not None:
            self._graph.reset()
            self._graph = None

    def _eager(self) -> None:
        batch = self._batch
        self._own_keys.feed()
        out = self._model(
            input_ids=batch.tokens[:, None],
            position_ids=batch.lengths[:, None],
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        batch.tokens.copy_(out.logits[:, -1].argmax(dim=-1))
        # One that is done goes on, but not beyond its room.
        batch.lengths.add_(1).clamp_(max=batch.room - 1)


def can_capture(model: Any) -> bool:
    """Whether it is worth trying."""
    return bool(model.device.type == "cuda")


def _ids(model: Any, values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(model.device)
