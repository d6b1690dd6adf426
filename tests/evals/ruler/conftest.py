"""RULER's sources on the tokenizer that ships with the package, and a way to build a question of any task."""

from collections.abc import Callable
from importlib.resources import files
from typing import Any

import pytest
from transformers import AutoTokenizer

from unspool.evals.suite import Ask, Question
from unspool.evals.suites.ruler import SUITE
from unspool.evals.suites.ruler.haystacks import Sources

Build = Callable[..., Question]


@pytest.fixture(scope="session")
def shipped_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(str(files("unspool") / "assets" / "tiny-base"))


@pytest.fixture(scope="session")
def sources(shipped_tokenizer: Any) -> Sources:
    loaded: Sources = SUITE.load(shipped_tokenizer, {})
    return loaded


@pytest.fixture(scope="session")
def build(sources: Sources) -> Build:
    def build(task: str, *, length: int = 4096, index: int = 0, seed: int = 42, **options: Any) -> Question:
        return SUITE.tasks[task].build(sources, Ask(length=length, seed=seed, index=index, **options))

    return build
