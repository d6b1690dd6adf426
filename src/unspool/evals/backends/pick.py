"""Which backend answers, by what a command says."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from unspool.core.artifacts import digest
from unspool.core.errors import ConfigError
from unspool.evals.backends.base import Backend, ModelBackend, Stretch
from unspool.evals.backends.mock import MOCKS
from unspool.evals.backends.openai import OpenAiBackend, Patience, Server
from unspool.evals.backends.processes import ProcessesBackend
from unspool.evals.backends.vllm import VllmBackend
from unspool.evals.config import PerplexityEval
from unspool.evals.contexts import Plan
from unspool.models.load import model_digest
from unspool.models.tokenizer import load_tokenizer


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
            f"--rope is for --backend transformers; the backend here is {choice.kind}. For other engines, write "
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


# Do two backends give the same answers? Asked on a few prompts, compared letter by letter.


PROMPTS = 20
_AROUND = 24


@dataclass(frozen=True, kw_only=True)
class Difference:
    name: str
    """Suite, task and length."""
    index: int
    at: int
    """The first character that differs."""
    first: str
    second: str


@dataclass(frozen=True, kw_only=True)
class Parity:
    n: int
    differences: list[Difference]

    @property
    def equal(self) -> int:
        return self.n - len(self.differences)

    def as_json(self) -> dict[str, Any]:
        return {"n": self.n, "equal": self.equal, "differences": [vars(one) for one in self.differences]}


def compare(plan: Plan, first: Backend, second: Backend, *, count: int = PROMPTS) -> Parity:
    """Answers of both to the same prompts, spread over everything that is planned."""
    units = [unit for unit in plan.units if not isinstance(unit.config, PerplexityEval)]
    step = max(1, len(units) // count)
    differences: list[Difference] = []
    n = 0
    for unit in units[::step][:count]:
        prompt = plan.prompt(unit)
        for at, (one, other) in enumerate(zip(first.answers(prompt), second.answers(prompt), strict=True)):
            n += 1
            if one != other:
                differences.append(_difference(unit.name, unit.index + at, one, other))
            if n == count:
                return Parity(n=n, differences=differences)
    return Parity(n=n, differences=differences)


def _difference(name: str, index: int, one: str, other: str) -> Difference:
    same = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    part = slice(max(0, same - _AROUND), same + _AROUND)
    return Difference(name=name, index=index, at=same, first=one[part], second=other[part])
