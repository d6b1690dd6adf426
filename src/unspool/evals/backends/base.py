"""The interface of backends, which answer prompts, and the registry that finds one by name."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from unspool.core.artifacts import digest
from unspool.core.config import lookup, register
from unspool.core.errors import ConfigError
from unspool.rope.tables import RopeMethod

if TYPE_CHECKING:
    import torch

    from unspool.evals.prompts import Prompt

# Prompts without a common context are answered together, up to this many tokens in all: a row. Small, since a killed
# run loses a row; backends on a GPU, which reads longer rows in seconds, set a greater `row_tokens`.
ROW_TOKENS = 8192


Endpoint = Literal["completions", "chat", "text"]


@dataclass(frozen=True, kw_only=True)
class PromptForm:
    """How a backend takes prompts: as token ids, which models in this process do, as text or as chat messages."""

    endpoint: Endpoint = "completions"
    adds_opening: bool = True  # text: the server puts BOS before it, as the tokenizer does
    template_tokens: int = 0  # chat: tokens that the server's template adds to a message
    prefill: Mapping[str, Any] | None = None
    """Chat: fields of a request with which the server continues a last message of the assistant; None: it cannot."""


TOKEN_IDS = PromptForm()


class ContextLimit(NamedTuple):
    """Tokens that a model claims to read and write, and where that is written."""

    tokens: int
    source: str


class Backend:
    """Answers prompts. A backend implements `answers` and overrides what differs from the defaults."""

    tokenizer: Any
    width: int = 1
    """Prompts that it answers at the same time, asked by as many threads."""
    block_size: int = 1
    """Prompts that it wants in one call of `answers_all`; used where it is above 1."""
    row_tokens: int = ROW_TOKENS
    """Most tokens of prompts without a common context that are answered together."""
    packs_contexts: bool = False
    """Whether contexts of suites such as niah go into rows as well."""
    has_losses: bool = False
    """Whether it implements `window_losses`."""
    kind: str = "transformers"
    form: PromptForm = TOKEN_IDS
    options: "BackendOptions | None" = None
    """How the model can be loaded again, by suites that run it themselves; None: not in this process."""
    context_limit: ContextLimit | None = None
    """None if it is not known."""
    planned_tokens: int = 0
    """Prompt tokens of the whole run, set before the first prompt. What was answered before a resume counts too, so
    that the same kernels answer all prompts."""

    def answers(self, prompt: "Prompt") -> list[str]:
        """Return one text per question, decoded greedily."""
        raise NotImplementedError

    def answers_all(self, prompts: list["Prompt"]) -> list[list[str]]:
        return [self.answers(prompt) for prompt in prompts]

    def window_losses(self, ids: np.ndarray) -> np.ndarray:
        """−log p of every token but the first, in nats."""
        raise NotImplementedError

    @property
    def record(self) -> dict[str, Any]:
        """What results say about the backend, and what decides whether two results are compared in pairs."""
        return {"kind": self.kind}

    def connect(self, record: Mapping[str, Any] | None = None) -> None:
        """Find out what a server can do.

        The record of an earlier result of the same server spares the requests until `connect` is called without one.
        """

    @contextmanager
    def keeping_replies(self, path: Path) -> Iterator[None]:
        """Write the replies of a server into a file as they arrive, and ask for none that is in it."""
        yield

    def stop(self) -> None:
        """End work in progress, because the run failed or is complete."""


@dataclass(frozen=True, kw_only=True)
class RopeOverride:
    """Another RoPE method than the model was trained with, to measure its effect without training."""

    rope: RopeMethod
    context_length: int  # tokens that the method shall reach

    def apply(self, model: Any) -> None:
        from unspool.models.rotary import apply_rope

        apply_rope(model, self.rope, self.context_length)

    def digest(self, model_hash: str) -> str:
        """Digest of the model with this override."""
        return digest([model_hash, self.rope.model_dump(mode="json"), self.context_length])

    def name_of(self, model: str) -> str:
        return f"{model}+{self.rope.method}"


@dataclass(frozen=True, kw_only=True)
class BackendOptions:
    """Which backend a command asks for."""

    kind: str = "transformers"
    model: str
    """Folder or Hub id; for a server, where the tokenizer is found."""
    url: str | None = None
    model_name: str | None = None
    endpoint: Any = "completions"
    requests: int = 8
    timeout: float = 600.0
    rope: RopeOverride | None = None
    processes: int = 1
    device: "torch.device | None" = None
    dtype: "torch.dtype | None" = None
    weights: str | None = None
    """Digest of the weights of a model in memory; None: they are read from the model's files."""

    @cached_property
    def identity(self) -> str:
        """What scores depend on besides prompts; for transformers only weights and RoPE."""
        from unspool.models.weight_files import model_digest

        weights = self.weights or model_digest(self.model)
        weights = weights if self.rope is None else self.rope.digest(weights)
        if self.kind == "transformers":
            return weights
        # The endpoint of a server is part of the backend's record.
        endpoint = None if self.kind == "openai" else self.endpoint
        return digest([weights, self.kind, self.url, self.model_name, endpoint])


def claimed_context(ref: str, rope: RopeOverride | None = None) -> ContextLimit | None:
    """Read a model's context from its config; None where it gives none, as of a tokenizer alone."""
    from unspool.models.config import check_values, config_values, read_config_file

    if rope is not None:
        return ContextLimit(rope.context_length, "context given for the RoPE method")
    # A folder of ours may have a model_type that only we know, so its file is read as it is.
    values = read_config_file(ref)
    check_values(ref, values)
    try:
        found = values.get("max_position_embeddings") or config_values(ref).get("max_position_embeddings")
    except ConfigError:
        return None
    return ContextLimit(int(found), "max_position_embeddings of its config") if found else None


BuildBackend = Callable[[BackendOptions], Backend]
# Import paths, so that commands can list the names without importing torch.
BACKENDS: dict[str, str | BuildBackend] = {
    "transformers": "unspool.evals.backends.transformers:build",
    "vllm": "unspool.evals.backends.vllm:build",
    "openai": "unspool.evals.backends.openai:build",
    "oracle": "unspool.evals.backends.mock:build",
    "empty": "unspool.evals.backends.mock:build",
    "adversarial": "unspool.evals.backends.mock:build",
}


def register_backend(name: str, build: BuildBackend) -> None:
    """Make a backend available by its name; an existing one of this name is replaced."""
    register(BACKENDS, name, build, kind="backend", replace=True)


def check_options(options: BackendOptions) -> None:
    """Refuse options that the backend does not use, rather than ignore them."""
    if options.rope is not None and options.kind != "transformers":
        raise ConfigError(
            f"`rope` works with `backend='transformers'` only; the backend here is {options.kind}. For other "
            "engines, write the method's rope_parameters into the config of a copy of the model."
        )
    if options.processes > 1 and options.kind != "transformers":
        raise ConfigError(
            f"`processes` works with `backend='transformers'` only; the backend here is {options.kind}. For several "
            "requests to a server at a time, use `requests`."
        )
    endpoint = options.endpoint if options.endpoint in ("text", "chat") else None
    for name, value in (("url", options.url), ("model_name", options.model_name), ("endpoint", endpoint)):
        if value is not None and options.kind != "openai":
            raise ConfigError(f"`{name}` works with `backend='openai'` only; the backend here is {options.kind}.")


def build_backend(options: BackendOptions) -> Backend:
    """Build the backend that `options.kind` names; ConfigError if the other options do not fit it."""
    build = lookup(BACKENDS, options.kind, kind="`backend`")
    if not isinstance(build, str):
        return build(options)
    check_options(options)
    module, _, name = build.partition(":")
    backend: Backend = getattr(import_module(module), name)(options)
    return backend
