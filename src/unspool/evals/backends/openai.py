"""Any server that speaks OpenAI's HTTP interface: vLLM, SGLang, llama.cpp, TGI, hosted ones.

In: prompts, an address. Out: answers, greedy.
Promise: to the completions endpoint go token ids, so that what the server reads is what the hashes name; servers that
take no ids get text. The chat endpoint gets words, and puts its own template around them: there the answer's first
words end the user's message, since not every server can go on from an assistant's.
Elsewhere: attempts and errors (http.py).
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
from functools import cache
from http.client import HTTPException, InvalidURL
from threading import BoundedSemaphore
from typing import Any, Literal, TypeVar

import numpy as np

from unspool.core.errors import ConfigError, UnspoolError
from unspool.evals.prompts import Prompt, PromptQuestion

# One POST of JSON, tried again where that may help.


# Answers of a server that may be others a moment later.
PASSING = {408, 409, 425, 429, 500, 502, 503, 504}
LONGEST_PAUSE = 60.0
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Patience:
    seconds: float = 600.0  # of one attempt
    attempts: int = 6
    pause: float = 1.0  # before the second attempt; doubled every time


class Passing(Exception):  # noqa: N818
    """An attempt that went wrong in a way that another may not: the kind that is counted, and what was said."""

    def __init__(self, kind: str, problem: str, retry_after: float | None = None) -> None:
        super().__init__(problem)
        self.kind, self.problem, self.retry_after = kind, problem, retry_after


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A key is for the address it was given for, not for wherever that one points to."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


@cache
def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_NoRedirect)


def post(
    url: str,
    body: Mapping[str, Any],
    *,
    key: str | None,
    patience: Patience,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """What the server answers, as JSON."""
    try:
        return retry(lambda: attempt(url, body, key=key, seconds=patience.seconds), patience, sleep=sleep)
    except Passing as passing:
        raise UnspoolError(
            f"{url} gave no answer in {patience.attempts} attempts ({plain(passing.problem)}). Start the server or "
            "raise --timeout, and run this again: what was answered is kept."
        ) from None


def retry(
    call: Callable[[], Result],
    patience: Patience,
    *,
    sleep: Callable[[float], None] = time.sleep,
    on_error: Callable[[Passing], None] = lambda error: None,
) -> Result:
    """Call until there is no Passing; raises that of the last attempt."""
    number = 0
    while True:
        try:
            return call()
        except Passing as error:
            on_error(error)
            if number + 1 >= patience.attempts:
                raise
            sleep(pause_after(number, error, patience))
            number += 1


def pause_after(number: int, passing: Passing, patience: Patience) -> float:
    """Seconds to wait after attempt `number`, from 0; not all at the same moment where many requests wait."""
    pause = min(LONGEST_PAUSE, patience.pause * 2.0**number) * (0.5 + random.random() / 2)
    return max(pause, min(LONGEST_PAUSE, passing.retry_after or 0.0))


def attempt(url: str, body: Mapping[str, Any], *, key: str | None, seconds: float) -> dict[str, Any]:
    """One POST; Passing where another attempt may help, ConfigError where only the user can."""
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    try:
        request = urllib.request.Request(url, data=json.dumps(body).encode(), headers=headers, method="POST")
        with _opener().open(request, timeout=seconds) as response:
            found = json.loads(response.read())
    except urllib.error.HTTPError as error:
        problem = f"HTTP {error.code}: {_said(error, key)}"
        if error.code not in PASSING:
            raise ConfigError(
                f"{url} refuses the request ({problem}). Check --url, --model-name and the key."
            ) from None
        raise Passing(f"http_{error.code}", problem, _seconds(error.headers.get("Retry-After"))) from None
    except InvalidURL:
        raise ConfigError(f"--url {url} is no address; give one such as http://localhost:8000/v1.") from None
    except HTTPException as error:
        raise Passing("closed", f"the answer broke off ({type(error).__name__})") from None
    except ValueError as error:
        if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
            raise Passing("garbage", "it answered something that is no JSON") from None
        raise ConfigError(f"--url {url} is no address; give one such as http://localhost:8000/v1.") from None
    except OSError as error:
        # Refused and broken connections and time limits, as themselves or as a URLError around them.
        cause = getattr(error, "reason", error)
        kind = "timeout" if isinstance(cause, TimeoutError) else "connection"
        raise Passing(kind, str(cause) or type(cause).__name__) from None
    if not isinstance(found, dict):
        raise Passing("garbage", "it answered JSON that is no object")
    return found


def _seconds(said: str | None) -> float | None:
    """What `Retry-After` asks for; dates are left to our own pauses."""
    try:
        return max(0.0, float(said)) if said is not None else None
    except ValueError:
        return None


def _said(error: urllib.error.HTTPError, key: str | None) -> str:
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
    return plain(str(text).replace(key, "…") if key else str(text)) or str(error.reason)


def plain(text: str, limit: int = 200) -> str:
    """The first line of what somebody else wrote, without what a terminal would obey."""
    line = next((line for line in text.splitlines() if line.strip()), "")
    return "".join(char for char in line.strip() if char.isprintable())[:limit]


Endpoint = Literal["completions", "chat", "text"]


@dataclass(frozen=True, kw_only=True)
class Server:
    """Where to ask, and how."""

    url: str  # such as http://localhost:8000/v1
    model: str
    endpoint: Endpoint = "completions"  # text: completions with words instead of ids
    key_env: str = "OPENAI_API_KEY"  # variable that holds the key, if the server wants one
    patience: Patience = field(default_factory=Patience)
    width: int = 8  # requests at a time

    def complete(self, prompt: str | list[int], max_tokens: int) -> str:
        body = {"prompt": prompt, "max_tokens": max_tokens}
        choice = self._choice(self._post("completions", body))
        return _text(choice.get("text"))

    def chat(self, words: str, max_tokens: int, *, temperature: float = 0.0) -> str:
        body = {"messages": [{"role": "user", "content": words}], "max_tokens": max_tokens, "temperature": temperature}
        message = self._choice(self._post("chat/completions", body)).get("message")
        return _text(message.get("content") if isinstance(message, dict) else None)

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        full = {"model": self.model, "temperature": 0.0, "stream": False, **body}
        return post(f"{self.url.rstrip('/')}/{path}", full, key=os.environ.get(self.key_env), patience=self.patience)

    def _choice(self, found: dict[str, Any]) -> dict[str, Any]:
        try:
            choice = found["choices"][0]
        except (KeyError, IndexError, TypeError):
            choice = None
        if not isinstance(choice, dict):
            raise UnspoolError(f"{self.url} answered without `choices`; it does not speak OpenAI's interface.")
        return choice


class OpenAiBackend:
    def __init__(self, server: Server, tokenizer: Any) -> None:
        self.server, self.tokenizer = server, tokenizer
        self.width = server.width
        # Several prompts may be under way, each with several questions.
        self._slots = BoundedSemaphore(server.width)

    def answers(self, prompt: Prompt) -> list[str]:
        def one(question: PromptQuestion) -> str:
            with self._slots:
                return send(question)

        def send(question: PromptQuestion) -> str:
            ids = np.concatenate([prompt.context_ids, question.ids]).tolist()
            if self.server.endpoint == "completions":
                return self.server.complete(ids, prompt.answer_tokens)
            if self.server.endpoint == "text":
                return self.server.complete(self._words(question, ids), prompt.answer_tokens)
            return self.server.chat(self._words(question, ids), prompt.answer_tokens)

        if len(prompt.questions) == 1:
            return [one(prompt.questions[0])]
        with ThreadPoolExecutor(self.width) as pool:
            return list(pool.map(one, prompt.questions))

    def window_losses(self, ids: np.ndarray) -> np.ndarray:
        raise ConfigError("suite loss needs a model in this process, not a server; leave it out or drop --backend.")

    def _words(self, question: PromptQuestion, ids: list[int]) -> str:
        if question.words is None:
            return str(self.tokenizer.decode(ids, skip_special_tokens=True))
        return question.words.text + question.words.asked.prefix


def _text(value: Any) -> str:
    # Some servers say null for an answer of no tokens.
    return value if isinstance(value, str) else ""
