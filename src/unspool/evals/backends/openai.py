"""Backend for servers with OpenAI's HTTP interface: vLLM, SGLang, llama.cpp, TGI and hosted servers.

The completions endpoint gets token ids, so the server reads exactly the prompts that the hashes identify. Servers that
take no ids get text, including the chat template. The chat endpoint gets messages and applies the server's template.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import BoundedSemaphore, Event
from typing import Any, TypeVar

import numpy as np

from unspool.core.artifacts import digest
from unspool.core.errors import ConfigError, UnspoolError
from unspool.core.http_client import KEY_ENV, RetryPolicy, TransientError, check_url, printable_line, request_json
from unspool.evals.backends.base import (
    TOKEN_IDS,
    Backend,
    BackendOptions,
    ContextLimit,
    Endpoint,
    PromptForm,
    claimed_context,
)
from unspool.evals.prompts import Payload, Prompt, PromptQuestion
from unspool.evals.reply_cache import ReplyCache

Result = TypeVar("Result")
Sleep = Callable[[float], Any]


@dataclass(frozen=True, kw_only=True)
class Server:
    """Address and settings of a server."""

    url: str  # such as http://localhost:8000/v1
    model: str
    key_env: str = KEY_ENV  # environment variable with the API key, if the server needs one
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    width: int = 8  # concurrent requests
    sampling: Mapping[str, Any] = field(default_factory=dict)  # temperature, top_p, seed; greedy decoding if empty

    def __post_init__(self) -> None:
        check_url(self.url)

    def complete(self, prompt: str | list[int], max_tokens: int, *, sleep: Sleep = time.sleep, **more: Any) -> str:
        body = {"prompt": prompt, "max_tokens": max_tokens, **more}
        return self.ask("completions", body, completion_text, sleep=sleep)

    def chat(self, messages: Payload, max_tokens: int, *, sleep: Sleep = time.sleep, **more: Any) -> str:
        """Send messages. A text is sent as a single message."""
        sent = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        body = {"messages": sent, "max_tokens": max_tokens, **more}
        return self.ask("chat/completions", body, chat_text, sleep=sleep)

    def address(self, path: str) -> str:
        return f"{self.url.rstrip('/')}/{path}"

    def body(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"model": self.model, "temperature": 0.0, "stream": False, **body, **self.sampling}

    def ask(
        self, path: str, body: dict[str, Any], read: Callable[[dict[str, Any]], Result], *, sleep: Sleep = time.sleep
    ) -> Result:
        """Send a request with retries, and return the reply parsed by `read`."""
        return request_json(
            self.address(path), self.body(body), key_env=self.key_env, retry=self.retry, parse=read, sleep=sleep
        )


def only_choice(reply: dict[str, Any]) -> dict[str, Any]:
    """The single choice of a reply. Raises TransientError if there is none or several."""
    choices = reply.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        error = reply.get("error")
        said = f" ({printable_line(str(error))})" if error else "; is the server OpenAI-compatible?"
        raise TransientError("garbage", f"the server answered without `choices`{said}")
    if len(choices) > 1:
        raise TransientError("garbage", f"the server returned {len(choices)} answers to one prompt")
    return choices[0]


def completion_text(reply: dict[str, Any]) -> str:
    return _text(only_choice(reply), "text")


def chat_text(reply: dict[str, Any]) -> str:
    message = only_choice(reply).get("message")
    if not isinstance(message, dict):
        raise TransientError("garbage", "the answer has no `message`")
    return _text(message, "content")


def token_logprobs(reply: dict[str, Any], count: int) -> list[tuple[float, bool]]:
    """(log-probability, is most likely) of each of a prompt's `count` tokens except the first.

    For replies to requests with `echo` and `logprobs`. Raises TransientError if a number is missing.
    """
    found = only_choice(reply).get("logprobs")
    found = found if isinstance(found, dict) else {}
    numbers, tops = found.get("token_logprobs"), found.get("top_logprobs")
    numbers = numbers[1:count] if isinstance(numbers, list) else []
    tops = tops[1:count] if isinstance(tops, list) else []
    if len(numbers) != count - 1 or not all(_is_logprob(number) for number in numbers):
        raise TransientError("garbage", f"the server returned no log-probabilities for a prompt of {count} tokens")
    best = [max(filter(_is_logprob, top.values()), default=None) if isinstance(top, dict) else None for top in tops]
    if len(best) != count - 1 or None in best:
        raise TransientError("garbage", "the server returned no log-probabilities of the most likely tokens")
    return [(float(number), number >= most) for number, most in zip(numbers, best, strict=True)]


def _is_logprob(value: Any) -> bool:
    # Rounding may give values slightly above 0.
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e6 < value < 1e-3


def _text(holder: dict[str, Any], name: str) -> str:
    text = holder.get(name, 0)
    # Some servers return null for an empty answer.
    if text is not None and not isinstance(text, str):
        raise TransientError("garbage", f"the answer has no text in `{name}`")
    return text or ""


@dataclass(frozen=True, kw_only=True)
class ServerAbilities:
    """Abilities of a server."""

    form: PromptForm = TOKEN_IDS
    context: int | None = None  # context length in tokens; None if the server does not report it
    logprobs: bool = False  # whether it returns log-probabilities of prompt tokens
    no_penalty: Mapping[str, Any] = field(default_factory=dict)
    """Request fields that turn off the server's repetition penalties."""

    @property
    def record(self) -> dict[str, Any]:
        form = self.form
        return {
            "endpoint": form.endpoint,
            "context": self.context,
            "log_probabilities": self.logprobs,
            "adds_bos": form.adds_opening,
            "template_tokens": form.template_tokens,
            "prefill": None if form.prefill is None else dict(form.prefill),
            "no_penalty": dict(self.no_penalty),
        }

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "ServerAbilities":
        form = PromptForm(
            endpoint=record["endpoint"],
            adds_opening=record["adds_bos"],
            template_tokens=record["template_tokens"],
            prefill=record["prefill"],
        )
        return cls(
            form=form,
            context=record["context"],
            logprobs=record["log_probabilities"],
            no_penalty=record["no_penalty"],
        )


class OpenAiBackend(Backend):
    """A server with known abilities, or with abilities that `connect` probes."""

    kind = "openai"

    def __init__(
        self,
        server: Server,
        tokenizer: Any,
        abilities: ServerAbilities = ServerAbilities(),  # noqa: B008
        *,
        endpoint: Endpoint | None = None,
        probe: Callable[[], ServerAbilities] | None = None,
        claimed: ContextLimit | None = None,
    ) -> None:
        self.server, self.tokenizer = server, tokenizer
        self._claimed = claimed  # for servers that do not report their context
        self._endpoint, self._probe = endpoint, probe
        self._use(abilities)
        self.width = server.width
        # Several prompts may run concurrently, each with several questions.
        self._slots = BoundedSemaphore(server.width)
        self._stopped = Event()
        self._replies: ReplyCache | None = None

    def _use(self, abilities: ServerAbilities) -> None:
        self._abilities = abilities
        self.form, self.has_losses = abilities.form, abilities.logprobs
        listed = ContextLimit(abilities.context, "as the server lists it") if abilities.context else None
        self.context_limit = listed or self._claimed

    def connect(self, record: Mapping[str, Any] | None = None) -> None:
        if self._probe is None:
            return
        if record is not None and self._is_mine(record):
            self._use(ServerAbilities.of(record))
            return
        self._use(self._probe())
        self._probe = None

    def _is_mine(self, record: Mapping[str, Any]) -> bool:
        mine = {"kind": self.kind, "url": self.server.url, "model": self.server.model}
        mine |= {"endpoint": self._endpoint} if self._endpoint else {}
        return {**record, **mine} == record and self.record.keys() == record.keys()

    @property
    def record(self) -> dict[str, Any]:
        template = "of the server"
        if self.form.endpoint != "chat":
            text = getattr(self.tokenizer, "chat_template", None)
            template = f"of the tokenizer, sha256 {digest(text)[:12]}" if text else "none"
        server = {"url": self.server.url, "model": self.server.model}
        return {"kind": self.kind, **server, "template": template, **self._abilities.record}

    @contextmanager
    def keeping_replies(self, path: Path) -> Iterator[None]:
        try:
            with ReplyCache(path) as self._replies:
                yield
        finally:
            self._replies = None

    def answers(self, prompt: Prompt) -> list[str]:
        def answer(question: PromptQuestion) -> str:
            return self._kept([prompt.hash(question), prompt.answer_tokens], lambda: self._answer(prompt, question))

        if len(prompt.questions) == 1:
            return [answer(prompt.questions[0])]
        with ThreadPoolExecutor(self.width) as pool:
            return list(pool.map(answer, prompt.questions))

    def logprobs(self, ids: list[int]) -> list[tuple[float, bool]]:
        """(log-probability, is most likely) of every token except the first."""
        body = {"prompt": ids, "max_tokens": 1, "echo": True, "logprobs": 1}
        with self._slots:
            return self.server.ask("completions", body, lambda reply: token_logprobs(reply, len(ids)))

    def window_losses(self, ids: np.ndarray) -> np.ndarray:
        losses = self._kept(["losses", ids.tolist()], lambda: [-number for number, _ in self.logprobs(ids.tolist())])
        return np.array(losses)

    def stop(self) -> None:
        """End the pauses before retries of requests in progress. These requests then fail."""
        self._stopped.set()
        self._stopped = Event()

    def _kept(self, asked: Any, ask: Callable[[], Result]) -> Result:
        """The stored reply, or the server's reply, which is stored when it arrives."""
        replies, key = self._replies, digest(asked)
        known: Result | None = None if replies is None else replies.read_reply(key)
        if known is None:
            known = ask()
            if replies is not None:
                replies.write_reply(key, known)
        return known

    def _answer(self, prompt: Prompt, question: PromptQuestion) -> str:
        stopped = self._stopped

        def sleep(seconds: float) -> None:
            if stopped.wait(seconds):
                raise UnspoolError("the run has ended.")

        with self._slots:
            payload, tokens, more = question.payload, prompt.answer_tokens, dict(self._abilities.no_penalty)
            if payload is None:
                ids = np.concatenate([prompt.context_ids, question.ids]).tolist()
                return self.server.complete(ids, tokens, sleep=sleep, **more)
            if isinstance(payload, str):
                return self.server.complete(payload, tokens, sleep=sleep, **more)
            more |= (self.form.prefill or {}) if len(payload) > 1 else {}
            return self.server.chat(payload, tokens, sleep=sleep, **more)


def build(options: BackendOptions) -> OpenAiBackend:
    """Build the backend of a server. `connect` probes how it takes prompts."""
    from unspool.evals.backends.probe import probe
    from unspool.models.tokenizer import load_tokenizer

    if options.url is None:
        raise ConfigError("`backend='openai'` needs the server's address, such as `url='http://localhost:8000/v1'`.")
    server = Server(
        url=options.url,
        model=options.model_name or options.model,
        width=options.requests,
        retry=RetryPolicy(seconds=options.timeout),
    )
    tokenizer, endpoint = load_tokenizer(options.model), None if options.endpoint == "auto" else options.endpoint
    return OpenAiBackend(
        server,
        tokenizer,
        endpoint=endpoint,
        probe=lambda: probe(server, tokenizer, endpoint),
        claimed=claimed_context(options.model),
    )
