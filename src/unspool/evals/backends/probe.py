"""What a server can do: asked once, in a few requests of one token, before the first question."""

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
# What is wrong with the server, not with the form of a request.
UNAVAILABLE = {"connection", "timeout", "http_408", "http_429", "http_502", "http_503", "http_504"}
ATTEMPTS = 3
# Where servers list a model's context length.
CONTEXT_KEYS = ("max_model_len", "context_length", "context_window", "max_context_length", "n_ctx", "max_input_tokens")


# Assumed for a server's chat template that is known neither from the tokenizer nor from token counts.
TEMPLATE_TOKENS = 64
# How servers are told to continue a last message of the assistant: vLLM and SGLang by fields, llama.cpp unasked.
PREFILLS: tuple[dict[str, Any], ...] = ({"continue_final_message": True, "add_generation_prompt": False}, {})
# The names that vLLM and SGLang, and that llama.cpp have for a penalty on repeated tokens, which some servers apply
# unasked (llama-cpp-python 1.1, vLLM what the model's generation config says): it spoils values that are to be copied.
NO_PENALTY = {"repetition_penalty": 1.0, "repeat_penalty": 1.0}
BEGUN = "The lazy dog sleeps and"


def probe(server: Server, tokenizer: Any, endpoint: Endpoint | None) -> ServerAbilities:
    """Find out how the server can be asked: with token ids, else text, else chat; only as `endpoint` if one is given.

    Raises UnspoolError if the server does not answer, or answers none of these.
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
    names = f" The server lists these models for `model_name`: {', '.join(listed[:5])}." if listed else ""
    raise ConfigError(
        f"{server.url} answers neither way of asking the model {server.model!r}: "
        + "; ".join(f"{SENDS[tried]}: {problem}" for tried, problem in failed.items())
        + f". Check `url`, which usually ends in /v1, and `model_name`.{names}"
        if endpoint is None
        else f"{server.url} does not answer {SENDS[endpoint]} for the model {server.model!r} ({failed[endpoint]}). "
        f"Leave `endpoint` out to try all endpoints, or check `url` and `model_name`.{names}"
    )


def _describe(found: ServerAbilities, server: Server, refused: Mapping[Endpoint, str]) -> str:
    endpoint = found.form.endpoint
    others = "".join(f", not {SENDS[tried]} ({problem})" for tried, problem in refused.items())
    chat = ""
    if endpoint == "chat":
        prefill = "answers can be prefilled" if found.form.prefill is not None else "answers cannot be prefilled"
        chat = f"; its template takes {found.form.template_tokens} tokens, and {prefill}"
    return (
        f"{server.url}: {server.model} takes {SENDS[endpoint]}{others}; context "
        f"{f'{found.context} tokens' if found.context else 'not listed'}; "
        f"{'with' if found.logprobs else 'without'} log-probabilities of prompts{chat}. "
        f"Using `endpoint={endpoint!r}`; give `endpoint` ({', '.join(ENDPOINTS)}) to choose another"
    )


def _warn(found: ServerAbilities, tokenizer: Any, count: int | None, ids: list[int]) -> None:
    if found.form.endpoint == "chat":
        if not PromptEncoder(tokenizer).has_template:
            logger.warning(
                "this tokenizer has no chat template: the server asks through one that is unknown here, perhaps not "
                "the model's own. Use `endpoint='text'` for base models."
            )
    elif count is not None and count - len(ids) not in (0, len(opening_ids(tokenizer))):
        logger.warning(
            f"the server counts {count} tokens where this tokenizer counts {len(ids)}: is it the tokenizer of the "
            "model that the server runs? Lengths count this tokenizer's tokens."
        )


def _no_penalty(server: Server, endpoint: Endpoint, ids: list[int]) -> dict[str, Any]:
    """`NO_PENALTY`, unless the server refuses fields that it does not know."""
    try:
        _count(server, endpoint, ids, **NO_PENALTY)
    except (UnspoolError, _UnusableError):
        return {}
    return dict(NO_PENALTY)


def _count(server: Server, endpoint: Endpoint, ids: list[int], **more: Any) -> int | None:
    """The tokens that the server counts in a prompt, None if it does not say; _UnusableError if it takes none such."""
    if endpoint == "chat":
        return _ask(server, "chat/completions", {"messages": _messages(TEXT), "max_tokens": 1, **more}, chat_text)
    prompt = ids if endpoint == "completions" else TEXT
    count = _ask(server, "completions", {"prompt": prompt, "max_tokens": 1, **more}, completion_text)
    # A server that reads the list of ids as text counts several tokens per id.
    if endpoint == "completions" and count is not None and count > len(ids) + 4:
        raise _UnusableError(f"{count} tokens were counted in {len(ids)} ids")
    return count


def _form(server: Server, tokenizer: Any, endpoint: Endpoint, count: int | None) -> PromptForm:
    size = len(encode(tokenizer, TEXT))
    if endpoint != "chat":
        # A server that gives no count is assumed to tokenize as the tokenizer does.
        return PromptForm(endpoint=endpoint, adds_opening=count is None or count > size)
    encoder = PromptEncoder(tokenizer)
    own = encoder.overhead(chat=True) if encoder.has_template else TEMPLATE_TOKENS
    if count is None or count < size:
        return PromptForm(endpoint=endpoint, template_tokens=own)
    return PromptForm(
        endpoint=endpoint, template_tokens=count - size, prefill=_prefill(server, count + len(encode(tokenizer, BEGUN)))
    )


def _prefill(server: Server, expected: int) -> dict[str, Any] | None:
    """The fields with which the server continues a message; it counts nothing that ends one then."""
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


def _ask(server: Server, path: str, body: dict[str, Any], read: Callable[[dict[str, Any]], Any]) -> int | None:
    """Ask, and return how many tokens the server counted in the prompt, None if it does not say."""
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
