"""Generators: an OpenAI-compatible server, a local model, or a mock."""

import hashlib
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
from unspool.core.http_client import RetryPolicy, TransientError, request_once
from unspool.evals.backends.base import Backend
from unspool.evals.backends.openai import chat_text, only_choice
from unspool.evals.prompt_encoder import PromptEncoder
from unspool.evals.prompts import Prompt, PromptQuestion, encode
from unspool.evals.suite import Question
from unspool.synthesis.config import Fault, LocalGenerator, MockGenerator, ServerGenerator
from unspool.synthesis.requests import (
    CHARS_PER_TOKEN,
    GeneratorBackend,
    GeneratorClient,
    GeneratorReplies,
    RateLimiter,
    Reply,
    Request,
)

OpenBackend = Callable[[str], tuple[Backend, str]]  # argument: model; returns its backend and the hash of its weights


def build_client(
    config: ServerGenerator | LocalGenerator | MockGenerator, replies: GeneratorReplies, *, open_backend: OpenBackend
) -> GeneratorClient:
    if isinstance(config, ServerGenerator):
        return GeneratorClient(
            ServerBackend(config),
            replies,
            width=config.concurrency,
            limiter=RateLimiter(
                requests_per_minute=config.requests_per_minute, tokens_per_minute=config.tokens_per_minute
            ),
            retry=server_retry(config),
        )
    backend: GeneratorBackend
    if isinstance(config, LocalGenerator):
        backend = LocalBackend(*open_backend(config.model), width=config.concurrency)
    else:
        backend = MockBackend(config.faults, config.seconds)
    return GeneratorClient(backend, replies, width=config.concurrency, retry=RetryPolicy(attempts=3, pause=0.001))


def server_retry(config: ServerGenerator) -> RetryPolicy:
    return RetryPolicy(seconds=config.timeout, attempts=config.attempts, pause=config.pause)


class ServerBackend:
    """The chat endpoint of a server."""

    def __init__(self, config: ServerGenerator) -> None:
        self._config = config

    @property
    def identity(self) -> str:
        # Exclude the address, so that another server with the same model can resume a run.
        return digest([self._config.model, self._config.temperature, self._config.top_p])

    def reply(self, request: Request) -> Reply:
        if request.begin:
            raise ConfigError(
                "templates: the OpenAI chat API does not support `begin`, the first words of a reply; remove it, "
                "or generate with kind: transformers."
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
        url = f"{self._config.url.rstrip('/')}/chat/completions"
        found = request_once(url, body, key_env=self._config.key_env, retry=server_retry(self._config))
        seconds = time.perf_counter() - began
        text = chat_text(found)
        usage = found.get("usage")
        usage = usage if isinstance(usage, dict) else {}
        return Reply(
            text=text,
            prompt_tokens=_num_tokens(usage.get("prompt_tokens"), request.prompt),
            reply_tokens=_num_tokens(usage.get("completion_tokens"), text),
            seconds=round(seconds, 3),
            is_cut=only_choice(found).get("finish_reason") == "length",
        )


MAX_TOKENS = 10**9  # maximum that a server may report for one reply


def _num_tokens(reported: Any, text: str) -> int:
    return reported if isinstance(reported, int) and 0 <= reported <= MAX_TOKENS else len(text) // CHARS_PER_TOKEN


# Requests arrive in bursts, so a batch waits this long for more requests.
BATCH_WAIT_SECONDS = 0.05
_Waiting = tuple[Request, "Future[Reply]"]


class LocalBackend:
    """A local model with greedy decoding, and up to `width` requests per batch.

    Uses the model's chat template if there is one. Otherwise the model continues the text.
    """

    def __init__(self, backend: Backend, weights_hash: str, *, width: int = 1) -> None:
        self._backend, self._weights_hash, self._width = backend, weights_hash, width
        self._batch_lock, self._lock = Lock(), Lock()
        self._waiting: list[_Waiting] = []

    @property
    def identity(self) -> str:
        return digest(["transformers", self._weights_hash])

    def reply(self, request: Request) -> Reply:
        future: Future[Reply] = Future()
        with self._lock:
            self._waiting.append((request, future))
        # The thread that gets the lock also answers for the other threads.
        with self._batch_lock:
            while not future.done():
                self._answer_batch()
        return future.result()

    def _answer_batch(self) -> None:
        """Answer the requests that have waited the longest."""
        if self._width > 1 and len(self._waiting) < self._width:
            time.sleep(BATCH_WAIT_SECONDS)
        with self._lock:
            batch = self._next_batch()
            self._waiting = [waiting for waiting in self._waiting if waiting not in batch]
        try:
            replies = self._replies([request for request, _ in batch])
        except BaseException as error:  # otherwise the other threads would wait forever
            for _, future in batch:
                future.set_exception(error)
            return
        for (_, future), reply in zip(batch, replies, strict=True):
            future.set_result(reply)

    def _next_batch(self) -> list[_Waiting]:
        """The first request, and others with the same max_tokens that fit the backend's row."""
        tokens_left = self._backend.row_tokens
        max_tokens = self._waiting[0][0].max_tokens
        batch: list[_Waiting] = []
        for request, future in self._waiting:
            if request.max_tokens != max_tokens:
                continue
            tokens_left -= len(self._ids(request)) + max_tokens
            if batch and (len(batch) >= self._width or tokens_left < 0):
                break
            batch.append((request, future))
        return batch

    def _replies(self, requests: list[Request]) -> list[Reply]:
        all_ids = [self._ids(request) for request in requests]
        max_tokens = requests[0].max_tokens
        # Pass a single prompt as context, because long contexts are prefilled in chunks.
        shared = all_ids[0][:-1] if len(requests) == 1 else all_ids[0][:0]
        prompt = Prompt(
            suite="synth",
            length=max(map(len, all_ids)) + max_tokens,
            index=0,
            context_ids=shared,
            questions=[PromptQuestion(ids=ids[len(shared) :], reference="", depth=None) for ids in all_ids],
            answer_tokens=max_tokens,
            match="contains",
        )
        began = time.perf_counter()
        texts = self._backend.answers(prompt)
        # Divide the time, so that the seconds of all replies sum to the elapsed time.
        seconds = round((time.perf_counter() - began) / len(requests), 3)
        replies = []
        for request, text, ids in zip(requests, texts, all_ids, strict=True):
            tokens = len(encode(self._backend.tokenizer, text))
            replies.append(
                Reply(
                    text=request.begin + text,
                    prompt_tokens=len(ids),
                    reply_tokens=tokens,
                    seconds=seconds,
                    is_cut=tokens >= request.max_tokens,
                )
            )
        return replies

    @cached_property
    def _encoder(self) -> PromptEncoder:
        return PromptEncoder(self._backend.tokenizer)

    def _ids(self, request: Request) -> np.ndarray:
        chat = self._encoder.has_template
        begin = request.begin if chat or not request.begin else f"\n\n{request.begin}"
        return self._encoder.ids(
            Question(context=request.prompt, question="", references=("",), prefix=begin), chat=chat
        )


_PART = re.compile(r"<(part|summaries|text)>\n(.*)\n</\1>", re.DOTALL)
_SENTENCE = re.compile(r"[^.!?\n]+(?:[.!?]|\n|$)")
_QUESTIONS = (
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


class MockBackend:
    """Rule-based replies, with faults chosen by the hash of the prompt."""

    def __init__(self, faults: Mapping[Fault, float], seconds: float) -> None:
        self._faults, self._seconds = dict(faults), seconds
        self._tried: set[str] = set()
        self._lock = Lock()

    @property
    def identity(self) -> str:
        # Errors and slow replies do not change a reply.
        return digest(["mock", {name: share for name, share in self._faults.items() if name not in ("error", "slow")}])

    def reply(self, request: Request) -> Reply:
        draw = hashlib.sha256(request.prompt.encode()).digest()
        self._fail_or_wait(request.prompt, draw)
        if self._seconds:
            time.sleep(self._seconds)
        text = self._text(request.prompt, draw)
        return Reply(
            text=text, prompt_tokens=len(request.prompt) // 4, reply_tokens=len(text) // 4, seconds=self._seconds
        )

    def _fail_or_wait(self, prompt: str, draw: bytes) -> None:
        """Make some requests fail at their first attempt, and others wait."""
        with self._lock:
            is_first = prompt not in self._tried
            if is_first and _share(draw, 0) < self._faults.get("error", 0.0):
                self._tried.add(prompt)
                raise TransientError("http_500", "mock error")
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
        question = _QUESTIONS[draw[8] % len(_QUESTIONS)].format(words=", ".join(words))
        if fault == "refers":
            return f"Reasoning: some.\nQuestion: In the snippet, {question}\nAnswer: {sentence}"
        if fault == "unsupported":
            return (
                f"Reasoning: some.\nQuestion: {question}\nAnswer: Zanzibar exported 9417 porcelain elephants overnight."
            )
        return f"Reasoning: this tells of {words[-1]}.\nQuestion: {question}\nAnswer: {sentence}"

    def _fault(self, draw: bytes) -> str | None:
        """At most one fault, with the configured shares."""
        left = _share(draw, 2)
        names: tuple[Fault, ...] = ("garbage", "empty", "refers", "unsupported", "copy")
        for name in names:
            left -= self._faults.get(name, 0.0)
            if left < 0:
                return name
        return None


def _share(draw: bytes, number: int) -> float:
    """A number in [0, 1], from a hash."""
    return int.from_bytes(draw[16 + 4 * number : 20 + 4 * number]) / 2**32
