"""A model in this process as a generator, greedy.

In: requests, from several threads. Out: replies.
Promise: a reply is what the model says to its request alone, up to rounding; with a width of 1 exactly.
Price: requests that come while others are being answered wait for them. Those that wait are then answered side by side
in one row: writing is bound by reading the weights, which is done once for all of them.
"""

import time
from concurrent.futures import Future
from functools import cached_property
from threading import Lock

import numpy as np

from unspool.base.artefact import digest
from unspool.eval.asking import Asker
from unspool.eval.backend import Backend
from unspool.eval.grouping import ROW_TOKENS
from unspool.eval.prompt import Prompt, Question, encode
from unspool.eval.task import Asked
from unspool.synth.replies import Reply, Request

# Requests come in bursts, when those that waited for the last row go on; so long the next row waits for more.
GATHER_SECONDS = 0.05
_Waiting = tuple[Request, "Future[Reply]"]


class LocalAnswering:
    """Through the model's chat template if it has one, else by going on from the text; up to `width` side by side."""

    def __init__(self, backend: Backend, weights: str, *, width: int = 1) -> None:
        self._backend, self._weights, self._width = backend, weights, width
        self._turn, self._lock = Lock(), Lock()
        self._waiting: list[_Waiting] = []

    @property
    def identity(self) -> str:
        return digest(["transformers", self._weights])

    def reply(self, request: Request) -> Reply:
        future: Future[Reply] = Future()
        with self._lock:
            self._waiting.append((request, future))
        with self._turn:
            while not future.done():
                self._answer_some()
        return future.result()

    def _answer_some(self) -> None:
        """Answer those that have waited longest; whoever has its turn does it for all of them."""
        if self._width > 1 and len(self._waiting) < self._width:
            time.sleep(GATHER_SECONDS)
        with self._lock:
            some = self._next_row()
            self._waiting = [waiting for waiting in self._waiting if waiting not in some]
        try:
            replies = self._replies([request for request, _ in some])
        except BaseException as error:  # the others must not wait for ever
            for _, future in some:
                future.set_exception(error)
            return
        for (_, future), reply in zip(some, replies, strict=True):
            future.set_result(reply)

    def _next_row(self) -> list[_Waiting]:
        """The first that waits, and others for which there is room and whose reply may be as long."""
        room = int(getattr(self._backend, "row_tokens", ROW_TOKENS))
        longest = self._waiting[0][0].max_tokens
        row: list[_Waiting] = []
        for request, future in self._waiting:
            if request.max_tokens != longest:
                continue
            room -= len(self._ids(request)) + longest
            if row and (len(row) >= self._width or room < 0):
                break
            row.append((request, future))
        return row

    def _replies(self, requests: list[Request]) -> list[Reply]:
        all_ids = [self._ids(request) for request in requests]
        longest = requests[0].max_tokens
        # One alone has its words as the context, which is read in chunks where it is long.
        shared = all_ids[0][:-1] if len(requests) == 1 else all_ids[0][:0]
        made = Prompt(
            suite="synth",
            length=max(map(len, all_ids)) + longest,
            index=0,
            context_ids=shared,
            questions=[Question(ids=ids[len(shared) :], reference="", depth=None) for ids in all_ids],
            answer_tokens=longest,
            match="contains",
        )
        began = time.perf_counter()
        texts = self._backend.answers(made)
        # Each its part, so that the seconds of all replies are those that passed.
        seconds = (time.perf_counter() - began) / len(requests)
        return [
            self._reply(request, text, len(ids), seconds)
            for request, text, ids in zip(requests, texts, all_ids, strict=True)
        ]

    def _reply(self, request: Request, text: str, prompt_tokens: int, seconds: float) -> Reply:
        tokens = len(encode(self._backend.tokenizer, text))
        return Reply(
            text=request.begin + text,
            prompt_tokens=prompt_tokens,
            reply_tokens=tokens,
            seconds=round(seconds, 3),
            is_cut=tokens >= request.max_tokens,
        )

    @cached_property
    def _asker(self) -> Asker:
        return Asker(self._backend.tokenizer)

    def _ids(self, request: Request) -> np.ndarray:
        chat = self._asker.has_template
        begin = request.begin if chat or not request.begin else f"\n\n{request.begin}"
        return self._asker.ids(Asked(context=request.prompt, question="", references=("",), prefix=begin), chat=chat)
