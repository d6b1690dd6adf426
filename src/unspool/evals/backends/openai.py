"""Any server with OpenAI's HTTP interface: vLLM, SGLang, llama.cpp, TGI, hosted ones.

The completions endpoint gets token ids, so that the server reads exactly what the hashes name; servers that take no
ids get text. The chat endpoint gets text and applies its own template: there the answer prefix ends the user's
message, since not every server can continue an assistant's message.
"""

import json
import os
import random
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPException, InvalidURL
from threading import BoundedSemaphore
from typing import Any, Literal, TypeVar

import numpy as np

from unspool.core.errors import ConfigError, UnspoolError
from unspool.evals.backends.base import Backend, BackendOptions
from unspool.evals.prompts import Prompt, PromptQuestion

# Status codes that may be different a moment later.
TRANSIENT_STATUS = {408, 409, 425, 429, 500, 502, 503, 504}
MAX_PAUSE = 60.0
Result = TypeVar("Result")
_NO_ADDRESS = "is no address; give one such as http://localhost:8000/v1."


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    seconds: float = 600.0  # timeout of one attempt
    attempts: int = 6
    pause: float = 1.0  # seconds before the second attempt; doubled every time


class TransientError(Exception):
    """A failed attempt after which another may succeed."""

    def __init__(self, kind: str, problem: str, retry_after: float | None = None) -> None:
        super().__init__(problem)
        self.kind, self.problem, self.retry_after = kind, problem, retry_after


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A key must not be sent to another address than it was given for."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)


def post_json(
    url: str,
    body: Mapping[str, Any],
    *,
    key: str | None,
    retry: RetryPolicy,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """POST JSON and return the JSON reply, with retries."""
    try:
        return with_retries(lambda: post_once(url, body, key=key, seconds=retry.seconds), retry, sleep=sleep)
    except TransientError as error:
        raise UnspoolError(
            f"{url} gave no answer in {retry.attempts} attempts ({printable_line(error.problem)}). Start the server or "
            "raise --timeout, and run this again: finished answers are kept."
        ) from None


def with_retries(
    call: Callable[[], Result],
    retry: RetryPolicy,
    *,
    sleep: Callable[[float], None] = time.sleep,
    on_error: Callable[[TransientError], None] = lambda error: None,
) -> Result:
    """Call until it succeeds; raises the TransientError of the last attempt."""
    number = 0
    while True:
        try:
            return call()
        except TransientError as error:
            on_error(error)
            if number + 1 >= retry.attempts:
                raise
            sleep(retry_delay(number, error, retry))
            number += 1


def retry_delay(number: int, error: TransientError, retry: RetryPolicy) -> float:
    """Seconds to wait after attempt `number`, from 0; random, so that many requests do not return at once."""
    pause = min(MAX_PAUSE, retry.pause * 2.0**number) * (0.5 + random.random() / 2)
    return max(pause, min(MAX_PAUSE, error.retry_after or 0.0))


def post_once(url: str, body: Mapping[str, Any], *, key: str | None, seconds: float) -> dict[str, Any]:
    """POST once; TransientError where another attempt may help, ConfigError where only the user can."""
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    try:
        request = urllib.request.Request(url, data=json.dumps(body).encode(), headers=headers, method="POST")
        with _OPENER.open(request, timeout=seconds) as response:
            found = json.loads(response.read())
    except urllib.error.HTTPError as error:
        problem = f"HTTP {error.code}: {_error_message(error, key)}"
        if error.code not in TRANSIENT_STATUS:
            raise ConfigError(
                f"{url} refuses the request ({problem}). Check --url, --model-name and the key."
            ) from None
        raise TransientError(f"http_{error.code}", problem, _retry_after(error)) from None
    except InvalidURL:
        raise ConfigError(f"--url {url} {_NO_ADDRESS}") from None
    except HTTPException as error:
        raise TransientError("closed", f"the reply was truncated ({type(error).__name__})") from None
    except ValueError as error:
        if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
            raise TransientError("garbage", "the reply is not JSON") from None
        raise ConfigError(f"--url {url} {_NO_ADDRESS}") from None
    except OSError as error:
        # Refused and broken connections and timeouts, as themselves or inside a URLError.
        cause = getattr(error, "reason", error)
        kind = "timeout" if isinstance(cause, TimeoutError) else "connection"
        raise TransientError(kind, str(cause) or type(cause).__name__) from None
    if not isinstance(found, dict):
        raise TransientError("garbage", "the reply is JSON but not an object")
    return found


def _retry_after(error: urllib.error.HTTPError) -> float | None:
    """Seconds from the `Retry-After` header; None for dates."""
    try:
        return max(0.0, float(error.headers.get("Retry-After", "")))
    except ValueError:
        return None


def _error_message(error: urllib.error.HTTPError, key: str | None) -> str:
    try:
        text = error.read(2000).decode("utf-8", "replace")
    except (OSError, HTTPException):
        return str(error.reason)
    try:
        found = json.loads(text)
        inner = found.get("error", found)
        text = inner.get("message", text) if isinstance(inner, dict) else str(inner)
    except (ValueError, AttributeError):
        pass
    # Some servers repeat what they were sent.
    return printable_line(str(text).replace(key, "…") if key else str(text)) or str(error.reason)


def printable_line(text: str, limit: int = 200) -> str:
    """The first line of an untrusted text, without control characters."""
    line = next((line for line in text.splitlines() if line.strip()), "")
    return "".join(char for char in line.strip() if char.isprintable())[:limit]


Endpoint = Literal["completions", "chat", "text"]


@dataclass(frozen=True, kw_only=True)
class Server:
    """Address and settings of a server."""

    url: str  # such as http://localhost:8000/v1
    model: str
    endpoint: Endpoint = "completions"  # text: completions with text instead of ids
    key_env: str = "OPENAI_API_KEY"  # environment variable with the key, if the server wants one
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    width: int = 8  # concurrent requests
    sampling: Mapping[str, Any] = field(default_factory=dict)  # temperature, top_p, seed; greedy if empty

    def complete(self, prompt: str | list[int], max_tokens: int) -> str:
        return _text(self._choice("completions", {"prompt": prompt, "max_tokens": max_tokens}).get("text"))

    def chat(self, text: str, max_tokens: int, *, temperature: float = 0.0) -> str:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, "temperature": temperature}
        message = self._choice("chat/completions", body).get("message")
        return _text(message.get("content") if isinstance(message, dict) else None)

    def _choice(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        full = {"model": self.model, "temperature": 0.0, "stream": False, **body, **self.sampling}
        found = post_json(f"{self.url.rstrip('/')}/{path}", full, key=os.environ.get(self.key_env), retry=self.retry)
        try:
            choice = found["choices"][0]
        except (KeyError, IndexError, TypeError):
            choice = None
        if not isinstance(choice, dict):
            raise UnspoolError(f"{self.url} answered without `choices`; is the server OpenAI-compatible?")
        return choice


class OpenAiBackend(Backend):
    def __init__(self, server: Server, tokenizer: Any) -> None:
        self.server, self.tokenizer = server, tokenizer
        self.width = server.width
        # Several prompts may be in progress, each with several questions.
        self._slots = BoundedSemaphore(server.width)

    def answers(self, prompt: Prompt) -> list[str]:
        def answer(question: PromptQuestion) -> str:
            with self._slots:
                return self._answer(prompt, question)

        if len(prompt.questions) == 1:
            return [answer(prompt.questions[0])]
        with ThreadPoolExecutor(self.width) as pool:
            return list(pool.map(answer, prompt.questions))

    def _answer(self, prompt: Prompt, question: PromptQuestion) -> str:
        ids = np.concatenate([prompt.context_ids, question.ids]).tolist()
        if self.server.endpoint == "completions":
            return self.server.complete(ids, prompt.answer_tokens)
        if question.text is None:
            text = str(self.tokenizer.decode(ids, skip_special_tokens=True))
        else:
            text = question.text.prompt + question.text.question.prefix
        ask = self.server.complete if self.server.endpoint == "text" else self.server.chat
        return ask(text, prompt.answer_tokens)


def build(options: BackendOptions) -> OpenAiBackend:
    from unspool.models.tokenizer import load_tokenizer

    if options.url is None:
        raise ConfigError("--backend openai needs the server's address, such as --url http://localhost:8000/v1.")
    server = Server(
        url=options.url,
        model=options.model_name or options.model,
        endpoint=options.endpoint,
        width=options.requests,
        retry=RetryPolicy(seconds=options.timeout),
    )
    return OpenAiBackend(server, load_tokenizer(options.model))


def _text(value: Any) -> str:
    # Some servers give null for an answer of no tokens.
    return value if isinstance(value, str) else ""
