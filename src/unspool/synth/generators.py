"""Who writes: a server, a model in this process, or something that only pretends to.

Promise: a key is read from the environment when a request is sent, goes into its header and nowhere else.
Elsewhere: attempts, limits and what is kept (asking.py), a model in this process (local.py).
"""

import os
import time
from collections.abc import Callable
from typing import Any

from unspool.base.artefact import digest
from unspool.base.errors import ConfigError
from unspool.eval.backend import Backend
from unspool.eval.backends.http import Passing, Patience, attempt
from unspool.synth.asking import CHARS_PER_TOKEN, Answering, Asking
from unspool.synth.config import LocalGenerator, MockGenerator, ServerGenerator
from unspool.synth.local import LocalAnswering
from unspool.synth.mock import MockAnswering
from unspool.synth.pace import Pace
from unspool.synth.replies import Replies, Reply, Request

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
