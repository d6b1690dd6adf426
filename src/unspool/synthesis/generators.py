"""Who writes: a server, a model in this process, or something that only pretends to.

Promise: a key is read from the environment when a request is sent, goes into its header and nowhere else.
Elsewhere: attempts, limits and what is kept (asking.py), a model in this process (local.py).
"""

import hashlib
import os
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np

from unspool.core.artifacts import digest
from unspool.core.errors import ConfigError
from unspool.evals.backends.base import Backend
from unspool.evals.backends.openai import Passing, Patience, attempt
from unspool.evals.prompts import Prompt, PromptEncoder, PromptQuestion, encode
from unspool.evals.suite import Question
from unspool.synthesis.config import Fault, LocalGenerator, MockGenerator, ServerGenerator
from unspool.synthesis.requests import CHARS_PER_TOKEN, Answering, Asking, Pace, Replies, Reply, Request

# A model in this process as a generator, greedy.


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
        room = self._backend.row_tokens
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
            questions=[PromptQuestion(ids=ids[len(shared) :], reference="", depth=None) for ids in all_ids],
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
    def _encoder(self) -> PromptEncoder:
        return PromptEncoder(self._backend.tokenizer)

    def _ids(self, request: Request) -> np.ndarray:
        chat = self._encoder.has_template
        begin = request.begin if chat or not request.begin else f"\n\n{request.begin}"
        return self._encoder.ids(
            Question(context=request.prompt, question="", references=("",), prefix=begin), chat=chat
        )


# A generator that only pretends: replies made by rule from what it is asked.


_PART = re.compile(r"<(part|summaries|text)>\n(.*)\n</\1>", re.DOTALL)
_SENTENCE = re.compile(r"[^.!?\n]+(?:[.!?]|\n|$)")
_ASKS = (
    "What is told about {words}?",
    "What does one learn of {words}?",
    "Which statement is made concerning {words}?",
    "How does the account put the matter of {words}?",
    "What is said where {words} are mentioned?",
)
_COPY = (
    "Question: Who kept the great ledger of the northern harbour in those years, for what reason was it kept, and what "
    "became of it when the winter storms had broken the old sea wall and the keeper went away?\nAnswer: {words}"
)


class MockAnswering:
    def __init__(self, faults: Mapping[Fault, float], seconds: float) -> None:
        self._faults, self._seconds = dict(faults), seconds
        self._tried: set[str] = set()
        self._lock = Lock()

    @property
    def identity(self) -> str:
        # Errors and slowness change no reply.
        return digest(["mock", {name: share for name, share in self._faults.items() if name not in ("error", "slow")}])

    def reply(self, request: Request) -> Reply:
        draw = hashlib.sha256(request.prompt.encode()).digest()
        self._trouble(request.prompt, draw)
        if self._seconds:
            time.sleep(self._seconds)
        text = self._text(request.prompt, draw)
        return Reply(
            text=text, prompt_tokens=len(request.prompt) // 4, reply_tokens=len(text) // 4, seconds=self._seconds
        )

    def _trouble(self, prompt: str, draw: bytes) -> None:
        """Some requests fail at their first attempt."""
        with self._lock:
            is_first = prompt not in self._tried
            if is_first and (_share(draw, 0) < self._faults.get("error", 0.0)):
                self._tried.add(prompt)
                raise Passing("http_500", "it pretends to be broken")
        if is_first and _share(draw, 1) < self._faults.get("slow", 0.0):
            time.sleep(0.05)

    def _text(self, prompt: str, draw: bytes) -> str:
        found = _PART.search(prompt)
        if '{"supported"' in prompt:
            return 'It does. {"supported": 1}'
        part = found[2] if found else prompt
        fault = self._fault(draw)
        if fault == "garbage":
            return "As a large pretender I would rather tell you a story."
        if fault == "empty":
            return ""
        sentences = [one.strip() for one in _SENTENCE.findall(part) if len(one.split()) >= 4] or [part[:200].strip()]
        if "Summary: your summary" in prompt:
            step = max(1, len(sentences) // 6)
            return f"Summary: {' '.join(sentences[::step][:6])}"
        sentence = sentences[int.from_bytes(draw[4:8]) % len(sentences)]
        if fault == "copy":
            return _COPY.format(words=" ".join(sentence.split()[:4]))
        words = sorted(set(re.findall(r"[^\W\d_]{4,}", sentence)), key=lambda word: (len(word), word))[-3:] or ["it"]
        asked = _ASKS[draw[8] % len(_ASKS)].format(words=", ".join(words))
        if fault == "refers":
            return f"Reasoning: some.\nQuestion: In the snippet, {asked}\nAnswer: {sentence}"
        if fault == "unsupported":
            return f"Reasoning: some.\nQuestion: {asked}\nAnswer: Zanzibar exported 9417 porcelain elephants overnight."
        return f"Reasoning: this tells of {words[-1]}.\nQuestion: {asked}\nAnswer: {sentence}"

    def _fault(self, draw: bytes) -> str | None:
        """At most one, so that their shares are those asked for."""
        at = _share(draw, 2)
        names: tuple[Fault, ...] = ("garbage", "empty", "refers", "unsupported", "copy")
        for name in names:
            at -= self._faults.get(name, 0.0)
            if at < 0:
                return name
        return None


def _share(draw: bytes, number: int) -> float:
    """A number from 0 to 1 out of a hash."""
    return int.from_bytes(draw[16 + 4 * number : 20 + 4 * number]) / 2**32


AnyOf = ServerGenerator | LocalGenerator | MockGenerator
OpenBackend = Callable[[str], tuple[Backend, str]]  # of a model: what answers, and the hash of its weights


def build_asking(config: AnyOf, replies: Replies, *, open_backend: OpenBackend) -> Asking:
    if isinstance(config, ServerGenerator):
        return Asking(
            ServerAnswering(config),
            replies,
            width=config.concurrency,
            pace=Pace(requests_per_minute=config.requests_per_minute, tokens_per_minute=config.tokens_per_minute),
            patience=Patience(seconds=config.timeout, attempts=config.attempts, pause=config.pause),
        )
    answering: Answering
    if isinstance(config, LocalGenerator):
        answering = LocalAnswering(*open_backend(config.model), width=config.concurrency)
    else:
        answering = MockAnswering(config.faults, config.seconds)
    return Asking(answering, replies, width=config.concurrency, patience=Patience(attempts=3, pause=0.001))


class ServerAnswering:
    """The chat endpoint of a server."""

    def __init__(self, config: ServerGenerator) -> None:
        self._config = config

    @property
    def identity(self) -> str:
        # Where the server stands does not matter, so that another that serves the same model goes on from there.
        return digest([self._config.model, self._config.temperature, self._config.top_p])

    def reply(self, request: Request) -> Reply:
        if request.begin:
            raise ConfigError(
                "templates: `begin` puts a reply's first words into the model's mouth, which OpenAI's chat interface "
                "cannot do; leave it out, or generate with kind: transformers."
            )
        body = {
            "model": self._config.model,
            "messages": [{"role": "user", "content": request.prompt}],
            "max_tokens": request.max_tokens,
            "temperature": self._config.temperature,
            "top_p": self._config.top_p,
            "stream": False,
        }
        began = time.perf_counter()
        key = os.environ.get(self._config.key_env)
        url = f"{self._config.url.rstrip('/')}/chat/completions"
        found = attempt(url, body, key=key, seconds=self._config.timeout)
        seconds = time.perf_counter() - began
        try:
            choice = found["choices"][0]
            text = choice["message"]["content"] or ""
            if not isinstance(text, str):
                raise TypeError
        except (KeyError, IndexError, TypeError):
            raise Passing("garbage", "it answered without `choices`; does it speak OpenAI's interface?") from None
        used = found.get("usage")
        used = used if isinstance(used, dict) else {}
        return Reply(
            # Some servers repeat what they were sent; a key must not reach a file.
            text=text.replace(key, "…") if key else text,
            prompt_tokens=_count(used.get("prompt_tokens"), request.prompt),
            reply_tokens=_count(used.get("completion_tokens"), text),
            seconds=round(seconds, 3),
            is_cut=choice.get("finish_reason") == "length",
        )


def _count(said: Any, text: str) -> int:
    return said if isinstance(said, int) and said >= 0 else len(text) // CHARS_PER_TOKEN
