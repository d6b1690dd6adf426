"""Any server with OpenAI's HTTP interface: vLLM, SGLang, llama.cpp, TGI, hosted ones.

The completions endpoint gets token ids, so that the server reads exactly what the hashes name; servers that take no
ids get text. The chat endpoint gets text and applies its own template: there the answer prefix ends the user's
message, since not every server can continue an assistant's message.
"""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from threading import BoundedSemaphore, Event
from typing import Any, Literal, TypeVar

import numpy as np

from unspool.core.errors import ConfigError, UnspoolError
from unspool.core.http_client import KEY_ENV, RetryPolicy, TransientError, check_url, printable_line, request_json
from unspool.evals.backends.base import Backend, BackendOptions, ContextLimit, claimed_context
from unspool.evals.prompts import Prompt, PromptQuestion

Endpoint = Literal["completions", "chat", "text"]
Result = TypeVar("Result")
Sleep = Callable[[float], Any]


@dataclass(frozen=True, kw_only=True)
class Server:
    """Address and settings of a server."""

    url: str  # such as http://localhost:8000/v1
    model: str
    endpoint: Endpoint = "completions"  # text: completions with text instead of ids
    key_env: str = KEY_ENV  # environment variable with the key, if the server wants one
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    width: int = 8  # concurrent requests
    sampling: Mapping[str, Any] = field(default_factory=dict)  # temperature, top_p, seed; greedy if empty

    def __post_init__(self) -> None:
        check_url(self.url)

    def complete(self, prompt: str | list[int], max_tokens: int, *, sleep: Sleep = time.sleep, **more: Any) -> str:
        body = {"prompt": prompt, "max_tokens": max_tokens, **more}
        return self.ask("completions", body, completion_text, sleep=sleep)

    def chat(self, text: str, max_tokens: int, *, sleep: Sleep = time.sleep, **more: Any) -> str:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, **more}
        return self.ask("chat/completions", body, chat_text, sleep=sleep)

    def address(self, path: str) -> str:
        return f"{self.url.rstrip('/')}/{path}"

    def body(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"model": self.model, "temperature": 0.0, "stream": False, **body, **self.sampling}

    def ask(
        self, path: str, body: dict[str, Any], read: Callable[[dict[str, Any]], Result], *, sleep: Sleep = time.sleep
    ) -> Result:
        """Return what `read` makes of the reply, with retries."""
        return request_json(
            self.address(path), self.body(body), key_env=self.key_env, retry=self.retry, parse=read, sleep=sleep
        )


def only_choice(reply: dict[str, Any]) -> dict[str, Any]:
    """The one choice of a reply; TransientError if it has none or several."""
    choices = reply.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        error = reply.get("error")
        said = f" ({printable_line(str(error))})" if error else "; is the server OpenAI-compatible?"
        raise TransientError("garbage", f"the server answered without `choices`{said}")
    if len(choices) > 1:
        raise TransientError("garbage", f"the server gave {len(choices)} answers to one prompt")
    return choices[0]


def completion_text(reply: dict[str, Any]) -> str:
    return _text(only_choice(reply), "text")


def chat_text(reply: dict[str, Any]) -> str:
    message = only_choice(reply).get("message")
    if not isinstance(message, dict):
        raise TransientError("garbage", "the answer has no `message`")
    return _text(message, "content")


def token_logprobs(reply: dict[str, Any], count: int) -> list[tuple[float, bool]]:
    """Log-probability of each of a prompt's `count` tokens but the first, and whether it was the likeliest.

    For replies to requests with `echo` and `logprobs`; TransientError if a number is missing.
    """
    found = only_choice(reply).get("logprobs")
    found = found if isinstance(found, dict) else {}
    numbers, tops = found.get("token_logprobs"), found.get("top_logprobs")
    numbers = numbers[1:count] if isinstance(numbers, list) else []
    tops = tops[1:count] if isinstance(tops, list) else []
    if len(numbers) != count - 1 or not all(_is_logprob(number) for number in numbers):
        raise TransientError("garbage", f"the server gave no log-probabilities for a prompt of {count} tokens")
    best = [max(filter(_is_logprob, top.values()), default=None) if isinstance(top, dict) else None for top in tops]
    if len(best) != count - 1 or None in best:
        raise TransientError("garbage", "the server gave no log-probabilities of the likeliest tokens")
    return [(float(number), number >= most) for number, most in zip(numbers, best, strict=True)]


def _is_logprob(value: Any) -> bool:
    # Rounding may give a little above 0.
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e6 < value < 1e-3


def _text(holder: dict[str, Any], name: str) -> str:
    text = holder.get(name, 0)
    # Some servers give null for an answer of no tokens.
    if text is not None and not isinstance(text, str):
        raise TransientError("garbage", f"the answer has no text in `{name}`")
    return text or ""


class OpenAiBackend(Backend):
    def __init__(self, server: Server, tokenizer: Any, *, has_losses: bool = False) -> None:
        self.server, self.tokenizer, self.has_losses = server, tokenizer, has_losses
        self.endpoint = server.endpoint
        self.width = server.width
        # Several prompts may be in progress, each with several questions.
        self._slots = BoundedSemaphore(server.width)
        self._stopped = Event()

    def answers(self, prompt: Prompt) -> list[str]:
        def answer(question: PromptQuestion) -> str:
            with self._slots:
                return self._answer(prompt, question)

        if len(prompt.questions) == 1:
            return [answer(prompt.questions[0])]
        with ThreadPoolExecutor(self.width) as pool:
            return list(pool.map(answer, prompt.questions))

    def logprobs(self, ids: list[int]) -> list[tuple[float, bool]]:
        """Log-probability of every token but the first, and whether it was the likeliest."""
        body = {"prompt": ids, "max_tokens": 1, "echo": True, "logprobs": 1}
        with self._slots:
            return self.server.ask("completions", body, lambda reply: token_logprobs(reply, len(ids)))

    def window_losses(self, ids: np.ndarray) -> np.ndarray:
        return -np.array([number for number, _ in self.logprobs(ids.tolist())])

    def stop(self) -> None:
        """End the pauses between attempts of requests in progress, which then fail."""
        self._stopped.set()
        self._stopped = Event()

    def _answer(self, prompt: Prompt, question: PromptQuestion) -> str:
        stopped = self._stopped

        def sleep(seconds: float) -> None:
            if stopped.wait(seconds):
                raise UnspoolError("the run has ended.")

        ids = np.concatenate([prompt.context_ids, question.ids]).tolist()
        if self.server.endpoint == "completions":
            return self.server.complete(ids, prompt.answer_tokens, sleep=sleep)
        if question.text is None:
            text = str(self.tokenizer.decode(ids, skip_special_tokens=True))
        else:
            text = question.text.prompt + question.text.question.prefix
        ask = self.server.complete if self.server.endpoint == "text" else self.server.chat
        return ask(text, prompt.answer_tokens, sleep=sleep)


def build(options: BackendOptions) -> OpenAiBackend:
    """Probe the server, and build the backend that asks it as it can be asked."""
    from unspool.evals.backends.probe import probe
    from unspool.models.tokenizer import load_tokenizer

    if options.url is None:
        raise ConfigError("--backend openai needs the server's address, such as --url http://localhost:8000/v1.")
    server = Server(
        url=options.url,
        model=options.model_name or options.model,
        width=options.requests,
        retry=RetryPolicy(seconds=options.timeout),
    )
    tokenizer = load_tokenizer(options.model)
    found = probe(server, tokenizer, None if options.endpoint == "auto" else options.endpoint)
    backend = OpenAiBackend(replace(server, endpoint=found.endpoint), tokenizer, has_losses=found.logprobs)
    listed = ContextLimit(found.context, "as the server lists it") if found.context else None
    backend.context_limit = listed or claimed_context(options.model)
    return backend
