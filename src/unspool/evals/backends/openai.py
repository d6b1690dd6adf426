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
from functools import cache
from http.client import HTTPException, InvalidURL
from threading import BoundedSemaphore
from typing import Any, Literal

import numpy as np

from unspool.core.errors import ConfigError, UnspoolError
from unspool.evals.backends.base import Backend, BackendOptions
from unspool.evals.prompts import Prompt, PromptQuestion

# One POST of JSON, tried again where that may help.


# Answers of a server that may be others a moment later.
PASSING = {408, 409, 425, 429, 500, 502, 503, 504}
LONGEST_PAUSE = 60.0


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
    problem = ""
    for number in range(patience.attempts):
        try:
            return attempt(url, body, key=key, seconds=patience.seconds)
        except Passing as passing:
            problem = passing.problem
            if number + 1 < patience.attempts:
                sleep(pause_after(number, passing, patience))
    raise UnspoolError(
        f"{url} gave no answer in {patience.attempts} attempts ({plain(problem)}). Start the server or raise "
        "--timeout, and run this again: what was answered is kept."
    )


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
        patience=Patience(seconds=options.timeout),
    )
    return OpenAiBackend(server, load_tokenizer(options.model))


def _text(value: Any) -> str:
    # Some servers give null for an answer of no tokens.
    return value if isinstance(value, str) else ""
