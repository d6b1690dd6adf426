"""Probe the abilities of a server with a few one-token requests, before the first question."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
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
from unspool.evals.backends.base import Endpoint, PromptForm
from unspool.evals.backends.openai import Server, ServerAbilities, chat_text, completion_text, token_logprobs
from unspool.evals.prompt_encoder import PromptEncoder
from unspool.evals.prompts import encode, opening_ids

logger = logging.getLogger(__name__)

ENDPOINTS: tuple[Endpoint, ...] = ("completions", "text", "chat")  # best first
SENDS: dict[Endpoint, str] = {"completions": "token ids", "text": "text", "chat": "chat messages"}
TEXT = "The quick brown fox jumps over the lazy dog."
# Errors of the server itself, not of the request format.
UNAVAILABLE = {"connection", "timeout", "http_408", "http_429", "http_502", "http_503", "http_504"}
ATTEMPTS = 3
# Fields in which servers report a model's context length.
CONTEXT_KEYS = ("max_model_len", "context_length", "context_window", "max_context_length", "n_ctx", "max_input_tokens")


# Assumed size of a server's chat template, if neither tokenizer nor token counts give it.
TEMPLATE_TOKENS = 64
# Fields that make servers continue an assistant message: vLLM and SGLang need them, llama.cpp does not.
PREFILLS: tuple[dict[str, Any], ...] = ({"continue_final_message": True, "add_generation_prompt": False}, {})
# Names of the repetition penalty in vLLM and SGLang, and in llama.cpp. Some servers apply a penalty by default
# (llama-cpp-python 1.1; vLLM follows the model's generation config). It corrupts values that a model must copy.
NO_PENALTY = {"repetition_penalty": 1.0, "repeat_penalty": 1.0}
BEGUN = "The lazy dog sleeps and"


def probe(server: Server, tokenizer: Any, endpoint: Endpoint | None) -> ServerAbilities:
    """Find the server's best endpoint: token ids, else text, else chat. With `endpoint`, probe only that one.

    Raises UnspoolError if the server does not answer, or supports none of them.
    """
    ids = encode(tokenizer, TEXT).tolist()
    failed: dict[Endpoint, str] = {}
    for tried in (endpoint,) if endpoint else ENDPOINTS:
        try:
            count = _count(server, tried, ids)
        except _UnusableError as error:
            failed[tried] = str(error)
            continue
        found = ServerAbilities(
            form=_form(server, tokenizer, tried, count),
            context=_context(server),
            logprobs=tried == "completions" and _has_logprobs(server, ids),
            no_penalty=_no_penalty(server, tried, ids),
        )
        _warn(found, tokenizer, count, ids)
        logger.info(_describe(found, server, failed))
        return found
    listed = [name for name in _models(server) if name != server.model]
    names = f" Models that the server offers for `model_name`: {', '.join(listed[:5])}." if listed else ""
    raise ConfigError(
        f"{server.url} answers on no endpoint for the model {server.model!r}: "
        + "; ".join(f"{SENDS[tried]}: {problem}" for tried, problem in failed.items())
        + f". Check `url`, which usually ends in /v1, and `model_name`.{names}"
        if endpoint is None
        else f"{server.url} does not answer {SENDS[endpoint]} for the model {server.model!r} ({failed[endpoint]}). "
        f"Remove `endpoint` to try all endpoints, or check `url` and `model_name`.{names}"
    )


def _describe(found: ServerAbilities, server: Server, refused: Mapping[Endpoint, str]) -> str:
    endpoint = found.form.endpoint
    others = "".join(f", not {SENDS[tried]} ({problem})" for tried, problem in refused.items())
    chat = ""
    if endpoint == "chat":
        prefill = "answers can be prefilled" if found.form.prefill is not None else "answers cannot be prefilled"
        chat = f"; its template adds {found.form.template_tokens} tokens; {prefill}"
    return (
        f"{server.url}: {server.model} accepts {SENDS[endpoint]}{others}; context "
        f"{f'{found.context} tokens' if found.context else 'not listed'}; "
        f"{'with' if found.logprobs else 'without'} prompt log-probabilities{chat}. "
        f"Using `endpoint={endpoint!r}`; pass `endpoint` ({', '.join(ENDPOINTS)}) to override"
    )


def _warn(found: ServerAbilities, tokenizer: Any, count: int | None, ids: list[int]) -> None:
    if found.form.endpoint == "chat":
        if not PromptEncoder(tokenizer).has_template:
            logger.warning(
                "this tokenizer has no chat template. The server applies an unknown template, perhaps not "
                "the model's own. Use `endpoint='text'` for base models."
            )
    elif count is not None and count - len(ids) not in (0, len(opening_ids(tokenizer))):
        logger.warning(
            f"the server counts {count} tokens, but this tokenizer counts {len(ids)}. Check that it belongs to the "
            "server's model. All lengths are counted with this tokenizer."
        )


def _no_penalty(server: Server, endpoint: Endpoint, ids: list[int]) -> dict[str, Any]:
    """`NO_PENALTY`, or no fields if the server refuses unknown fields."""
    try:
        _count(server, endpoint, ids, **NO_PENALTY)
    except (UnspoolError, _UnusableError):
        return {}
    return dict(NO_PENALTY)


def _count(server: Server, endpoint: Endpoint, ids: list[int], **more: Any) -> int | None:
    """Token count of a prompt on the server; None if not reported. _UnusableError if the server refuses it."""
    if endpoint == "chat":
        return _ask(server, "chat/completions", {"messages": _messages(TEXT), "max_tokens": 1, **more}, chat_text)
    prompt = ids if endpoint == "completions" else TEXT
    count = _ask(server, "completions", {"prompt": prompt, "max_tokens": 1, **more}, completion_text)
    # A server that reads the list of ids as text counts several tokens per id.
    if endpoint == "completions" and count is not None and count > len(ids) + 4:
        raise _UnusableError(f"the server counted {count} tokens for {len(ids)} ids")
    return count


def _form(server: Server, tokenizer: Any, endpoint: Endpoint, count: int | None) -> PromptForm:
    size = len(encode(tokenizer, TEXT))
    if endpoint != "chat":
        # Without a token count, assume that the server tokenizes like the tokenizer.
        return PromptForm(endpoint=endpoint, adds_opening=count is None or count > size)
    encoder = PromptEncoder(tokenizer)
    own = encoder.overhead(chat=True) if encoder.has_template else TEMPLATE_TOKENS
    if count is None or count < size:
        return PromptForm(endpoint=endpoint, template_tokens=own)
    return PromptForm(
        endpoint=endpoint, template_tokens=count - size, prefill=_prefill(server, count + len(encode(tokenizer, BEGUN)))
    )


def _prefill(server: Server, expected: int) -> dict[str, Any] | None:
    """Fields that make the server continue a message. Its token count then lacks the end of the message."""
    messages = [*_messages(TEXT), {"role": "assistant", "content": BEGUN}]
    for fields in PREFILLS:
        body = {"messages": messages, "max_tokens": 1, **fields}
        try:
            if _ask(server, "chat/completions", body, chat_text) == expected:
                return fields
        except (UnspoolError, _UnusableError):
            continue
    return None


def _messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


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
    """Models that the server lists, by printable name. Empty if it has no list."""
    once = replace(server.retry, attempts=1, seconds=min(server.retry.seconds, 10.0))
    try:
        reply = request_once(server.address("models"), None, key_env=server.key_env, retry=once)
    except (UnspoolError, TransientError):
        return {}
    data = reply.get("data")
    entries = [entry for entry in data if isinstance(entry, dict)] if isinstance(data, list) else []
    return {printable_line(entry["id"]): entry for entry in entries if isinstance(entry.get("id"), str)}


class _UnusableError(Exception):
    """The reply cannot be used, and a retry would not help."""


def _ask(server: Server, path: str, body: dict[str, Any], read: Callable[[dict[str, Any]], Any]) -> int | None:
    """Send a request and return the server's token count of the prompt; None if not reported."""
    retry: RetryPolicy = replace(server.retry, attempts=min(ATTEMPTS, server.retry.attempts))
    url = server.address(path)

    def attempt() -> int | None:
        try:
            reply = request_once(url, server.body(body), key_env=server.key_env, retry=retry)
            read(reply)
        except TransientError as error:
            if error.kind in UNAVAILABLE:
                raise
            raise _UnusableError(printable_line(error.problem)) from None
        usage = reply.get("usage")
        count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        return count if isinstance(count, int) and not isinstance(count, bool) and 0 < count < 10**6 else None

    try:
        return with_retries(attempt, retry)
    except TransientError as error:
        raise no_answer(url, error) from None
    except RefusedError as error:
        if error.status in (401, 403) or error.status < 400:
            raise
        raise _UnusableError(error.problem) from None
