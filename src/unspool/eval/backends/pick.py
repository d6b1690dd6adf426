"""Which backend answers, by what a command says."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from unspool.base.artefact import digest
from unspool.base.errors import ConfigError
from unspool.eval.backend import Backend, ModelBackend
from unspool.eval.backends.http import Patience
from unspool.eval.backends.mock import MOCKS
from unspool.eval.backends.openai import OpenAiBackend, Server
from unspool.eval.backends.processes import ProcessesBackend
from unspool.eval.backends.vllm import VllmBackend
from unspool.eval.stretch import Stretch
from unspool.model.load import model_digest
from unspool.model.tokenizer import load_tokenizer


@dataclass(frozen=True, kw_only=True)
class Choice:
    kind: str
    model: str
    """Folder or Hub id; of a server's model, where its tokenizer is found."""
    url: str | None = None
    model_name: str | None = None
    endpoint: Any = "completions"
    requests: int = 8
    timeout: float = 600.0
    stretch: Stretch | None = None
    processes: int = 1

    @cached_property
    def identity(self) -> str:
        """What scores depend on besides prompts; of transformers the weights and positions alone."""
        own = model_digest(self.model)
        own = own if self.stretch is None else self.stretch.of(own)
        if self.kind == "transformers":
            return own
        return digest([own, self.kind, self.url, self.model_name, self.endpoint])


def pick(choice: Choice, *, device: torch.device, dtype: torch.dtype) -> Backend:
    if choice.stretch is not None and choice.kind != "transformers":
        raise ConfigError(
            f"--position is for --backend transformers; the backend here is {choice.kind}. For other engines, write "
            "the method's rope_parameters into the config of a copy of the model."
        )
    if choice.processes > 1 and choice.kind != "transformers":
        raise ConfigError(
            f"--processes is for --backend transformers; the backend here is {choice.kind}. A server is asked for "
            "several answers at a time by --requests."
        )
    if choice.kind == "openai":
        if choice.url is None:
            raise ConfigError("--backend openai needs the server's address, such as --url http://localhost:8000/v1.")
        server = Server(
            url=choice.url,
            model=choice.model_name or choice.model,
            endpoint=choice.endpoint,
            width=choice.requests,
            patience=Patience(seconds=choice.timeout),
        )
        return OpenAiBackend(server, load_tokenizer(choice.model))
    if choice.url is not None:
        raise ConfigError(f"--url is for --backend openai; the backend here is {choice.kind}.")
    if choice.kind == "vllm":
        return VllmBackend(choice.model)
    if choice.kind in MOCKS:
        return MOCKS[choice.kind](load_tokenizer(choice.model))
    if choice.processes > 1:
        return ProcessesBackend(
            choice.model, device=device, dtype=dtype, width=choice.processes, stretch=choice.stretch
        )
    return ModelBackend(choice.model, device=device, dtype=dtype, stretch=choice.stretch)
