"""What a server can do: asked once, in a few requests of one token, before the first question."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from unspool.core.errors import ConfigError, UnspoolError
from unspool.core.http_client import (
    RefusedError,
    RetryPolicy,
    TransientError,
    no_answer,
    printable_line,
    request_once,
    with_retries,
)
from unspool.evals.backends.openai import Endpoint, Server, chat_text, completion_text, token_logprobs
from unspool.evals.prompts import encode

logger = logging.getLogger(__name__)

ENDPOINTS: tuple[Endpoint, ...] = ("completions", "text", "chat")  # best first
SENDS: dict[Endpoint, str] = {"completions": "token ids", "text": "text", "chat": "chat messages"}
TEXT = "The quick brown fox jumps over the lazy dog."
# What is wrong with the server, not with the form of a request.
UNAVAILABLE = {"connection", "timeout", "http_408", "http_429", "http_502", "http_503", "http_504"}
ATTEMPTS = 3
# Where servers list a model's context length.
CONTEXT_KEYS = ("max_model_len", "context_length", "context_window", "max_context_length", "n_ctx", "max_input_tokens")


@dataclass(frozen=True, kw_only=True)
class ServerAbilities:
    endpoint: Endpoint
    context: int | None  # tokens; None if the server does not list it
    logprobs: bool  # of the tokens of a prompt of ids

    def describe(self, server: Server, refused: Mapping[Endpoint, str]) -> str:
        others = "".join(f", not {SENDS[tried]} ({problem})" for tried, problem in refused.items())
        return (
            f"{server.url}: {server.model} takes {SENDS[self.endpoint]}{others}; context "
            f"{f'{self.context} tokens' if self.context else 'not listed'}; "
            f"{'with' if self.logprobs else 'without'} log-probabilities of prompts. "
            f"Using --endpoint {self.endpoint}; give --endpoint {'|'.join(ENDPOINTS)} to override"
        )


def probe(server: Server, tokenizer: Any, endpoint: Endpoint | None) -> ServerAbilities:
    """Find out how the server can be asked: with token ids, else text, else chat; only as `endpoint` if one is given.

    Raises UnspoolError if the server does not answer, or answers none of these.
    """
    ids = encode(tokenizer, TEXT).tolist()
    failed: dict[Endpoint, str] = {}
    for tried in (endpoint,) if endpoint else ENDPOINTS:
        problem = _problem(server, tried, ids)
        if problem is None:
            logprobs = tried == "completions" and _has_logprobs(server, ids)
            found = ServerAbilities(endpoint=tried, context=_context(server), logprobs=logprobs)
            logger.info(found.describe(server, failed))
            return found
        failed[tried] = problem
    listed = [name for name in _models(server) if name != server.model]
    names = f" The server lists these models for --model-name: {', '.join(listed[:5])}." if listed else ""
    raise ConfigError(
        f"{server.url} answers neither way of asking the model {server.model!r}: "
        + "; ".join(f"{SENDS[tried]}: {problem}" for tried, problem in failed.items())
        + f". Check --url, which usually ends in /v1, and --model-name.{names}"
        if endpoint is None
        else f"{server.url} does not answer {SENDS[endpoint]} for the model {server.model!r} ({failed[endpoint]}). "
        f"Leave --endpoint out to try all ways of asking, or check --url and --model-name.{names}"
    )


def _problem(server: Server, endpoint: Endpoint, ids: list[int]) -> str | None:
    """Why the server cannot be asked in this way; None if it can."""

    def read_ids(reply: dict[str, Any]) -> str:
        usage = reply.get("usage")
        count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        # A server that reads the list of ids as text counts several tokens per id.
        if isinstance(count, int) and count > len(ids) + 4:
            raise TransientError("garbage", f"{count} tokens were counted in {len(ids)} ids")
        return completion_text(reply)

    try:
        if endpoint == "chat":
            messages = [{"role": "user", "content": TEXT}]
            _ask(server, "chat/completions", {"messages": messages, "max_tokens": 1}, chat_text)
        else:
            prompt = ids if endpoint == "completions" else TEXT
            read = read_ids if endpoint == "completions" else completion_text
            _ask(server, "completions", {"prompt": prompt, "max_tokens": 1}, read)
    except RefusedError as error:
        if error.status in (401, 403) or error.status < 400:
            raise
        return error.problem
    except _UnusableError as error:
        return str(error)
    return None


def _has_logprobs(server: Server, ids: list[int]) -> bool:
    body = {"prompt": ids, "max_tokens": 1, "echo": True, "logprobs": 1}
    try:
        _ask(server, "completions", body, lambda reply: token_logprobs(reply, len(ids)))
    except (UnspoolError, _UnusableError):
        return False
    return True


def _context(server: Server) -> int | None:
    entries = _models(server)
    entry = entries.get(server.model) or (next(iter(entries.values())) if len(entries) == 1 else {})
    meta = entry.get("meta")
    for place in (entry, meta if isinstance(meta, dict) else {}):
        for key in CONTEXT_KEYS:
            if isinstance(place.get(key), int) and not isinstance(place[key], bool) and 0 < place[key] < 10**9:
                return int(place[key])
    return None


def _models(server: Server) -> dict[str, dict[str, Any]]:
    """What the server lists, by printable name; empty if it does not."""
    once = replace(server.retry, attempts=1, seconds=min(server.retry.seconds, 10.0))
    try:
        reply = request_once(server.address("models"), None, key_env=server.key_env, retry=once)
    except (UnspoolError, TransientError):
        return {}
    data = reply.get("data")
    entries = [entry for entry in data if isinstance(entry, dict)] if isinstance(data, list) else []
    return {printable_line(entry["id"]): entry for entry in entries if isinstance(entry.get("id"), str)}


class _UnusableError(Exception):
    """A reply that another attempt will not change."""


def _ask(server: Server, path: str, body: dict[str, Any], read: Callable[[dict[str, Any]], Any]) -> None:
    retry: RetryPolicy = replace(server.retry, attempts=min(ATTEMPTS, server.retry.attempts))
    url = server.address(path)

    def attempt() -> None:
        try:
            read(request_once(url, server.body(body), key_env=server.key_env, retry=retry))
        except TransientError as error:
            if error.kind in UNAVAILABLE:
                raise
            raise _UnusableError(printable_line(error.problem)) from None

    try:
        with_retries(attempt, retry)
    except TransientError as error:
        raise no_answer(url, error) from None
