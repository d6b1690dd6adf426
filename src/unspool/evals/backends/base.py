"""Interface and registry of backends, which answer prompts."""

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

# Prompts without a common context are answered together in a row of at most this many tokens. The row is small, because
# a killed run loses one row. Backends on a GPU read longer rows in seconds and set a larger `row_tokens`.
ROW_TOKENS = 8192


Endpoint = Literal["completions", "chat", "text"]


@dataclass(frozen=True, kw_only=True)
class PromptForm:
    """Format in which a backend takes prompts: token ids (local models), text or chat messages."""

    endpoint: Endpoint = "completions"
    adds_opening: bool = True  # text: the server adds BOS, like the tokenizer
    template_tokens: int = 0  # chat: tokens that the server's template adds to a message
    prefill: Mapping[str, Any] | None = None
    """Chat: request fields that make the server continue an assistant message. None: it cannot."""


TOKEN_IDS = PromptForm()


class ContextLimit(NamedTuple):
    """Context length that a model claims, and the source of that number."""

    tokens: int
    source: str


class Backend:
    """Answers prompts. A backend implements `answers` and overrides defaults that do not apply."""

    tokenizer: Any
    width: int = 1
    """Number of prompts answered concurrently, by as many threads."""
    block_size: int = 1
    """Number of prompts per call of `answers_all`. Used if above 1."""
    row_tokens: int = ROW_TOKENS
    """Maximum tokens per row of prompts without a common context."""
    packs_contexts: bool = False
    """Whether contexts of suites such as niah are also packed into rows."""
    has_losses: bool = False
    """Whether the backend implements `window_losses`."""
    kind: str = "transformers"
    form: PromptForm = TOKEN_IDS
    options: "BackendOptions | None" = None
    """Options for suites that load the model themselves. None if they cannot."""
    context_limit: ContextLimit | None = None
    """None if unknown."""
    planned_tokens: int = 0
    """Prompt tokens of the whole run, set before the first prompt. The count includes prompts answered before a resume,
    so that the same kernels answer all prompts."""

    def answers(self, prompt: "Prompt") -> list[str]:
        """Return one greedily decoded text per question."""
        raise NotImplementedError

    def answers_all(self, prompts: list["Prompt"]) -> list[list[str]]:
        return [self.answers(prompt) for prompt in prompts]

    def window_losses(self, ids: np.ndarray) -> np.ndarray:
        """−log p of every token except the first, in nats."""
        raise NotImplementedError

    @property
    def record(self) -> dict[str, Any]:
        """Backend record in results. Two results are compared in pairs only if their records are equal."""
        return {"kind": self.kind}

    def connect(self, record: Mapping[str, Any] | None = None) -> None:
        """Probe the abilities of a server.

        With the record of an earlier result from the same server, no requests are sent.
        """

    @contextmanager
    def keeping_replies(self, path: Path) -> Iterator[None]:
        """Write server replies to a file as they arrive. Requests with a stored reply are not sent."""
        yield

    def stop(self) -> None:
        """Stop work in progress, because the run failed or is complete."""


@dataclass(frozen=True, kw_only=True)
class RopeOverride:
    """Replace a model's RoPE method, to measure its effect without training."""

    rope: RopeMethod
    context_length: int  # target context length in tokens

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
    """Options of a backend."""

    kind: str = "transformers"
    model: str
    """Folder or Hub id. For a server: folder or Hub id of its tokenizer."""
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
    """Digest of the weights of a model in memory. None: weights come from the model's files."""

    @cached_property
    def identity(self) -> str:
        """What scores depend on, other than prompts. For transformers: only weights and RoPE."""
        from unspool.models.weight_files import model_digest

        weights = self.weights or model_digest(self.model)
        weights = weights if self.rope is None else self.rope.digest(weights)
        if self.kind == "transformers":
            return weights
        # A server's endpoint is already part of the backend's record.
        endpoint = None if self.kind == "openai" else self.endpoint
        return digest([weights, self.kind, self.url, self.model_name, endpoint])


def claimed_context(ref: str, rope: RopeOverride | None = None) -> ContextLimit | None:
    """Read a model's context length from its config. None if the config has none."""
    from unspool.models.config import check_values, config_values, read_config_file

    if rope is not None:
        return ContextLimit(rope.context_length, "context given for the RoPE method")
    # Read the raw file: Unspool's own model_type may be unknown to transformers.
    values = read_config_file(ref)
    check_values(ref, values)
    try:
        found = values.get("max_position_embeddings") or config_values(ref).get("max_position_embeddings")
    except ConfigError:
        return None
    return ContextLimit(int(found), "max_position_embeddings of its config") if found else None


BuildBackend = Callable[[BackendOptions], Backend]
# Import paths, so that commands can list names without importing torch.
BACKENDS: dict[str, str | BuildBackend] = {
    "transformers": "unspool.evals.backends.transformers:build",
    "vllm": "unspool.evals.backends.vllm:build",
    "openai": "unspool.evals.backends.openai:build",
    "oracle": "unspool.evals.backends.mock:build",
    "empty": "unspool.evals.backends.mock:build",
    "adversarial": "unspool.evals.backends.mock:build",
}


def register_backend(name: str, build: BuildBackend) -> None:
    """Register a backend under a name. Replaces a backend of the same name."""
    register(BACKENDS, name, build, kind="backend", replace=True)


def check_options(options: BackendOptions) -> None:
    """Refuse options that the backend does not use, instead of ignoring them."""
    if options.rope is not None and options.kind != "transformers":
        raise ConfigError(
            f"`rope` works only with `backend='transformers'`, not with {options.kind}. For other "
            "engines, copy the model and write the method's rope_parameters into its config."
        )
    if options.processes > 1 and options.kind != "transformers":
        raise ConfigError(
            f"`processes` works only with `backend='transformers'`, not with {options.kind}. For several "
            "concurrent requests to a server, use `requests`."
        )
    endpoint = options.endpoint if options.endpoint in ("text", "chat") else None
    for name, value in (("url", options.url), ("model_name", options.model_name), ("endpoint", endpoint)):
        if value is not None and options.kind != "openai":
            raise ConfigError(f"`{name}` works only with `backend='openai'`, not with {options.kind}.")


def build_backend(options: BackendOptions) -> Backend:
    """Build the backend `options.kind`. Raises ConfigError if other options do not fit it."""
    build = lookup(BACKENDS, options.kind, kind="`backend`")
    if not isinstance(build, str):
        return build(options)
    check_options(options)
    module, _, name = build.partition(":")
    backend: Backend = getattr(import_module(module), name)(options)
    return backend
