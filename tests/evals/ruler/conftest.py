"""RULER's sources on the tokenizer that ships with the package, and a way to build a question of any task."""

import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
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


@pytest.fixture(scope="session")
def squad_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As released: 30 articles of 8 paragraphs with two questions each, one of which has no answer."""
    articles = []
    for article in range(30):
        paragraphs = []
        for paragraph in range(8):
            name = f"P{article}x{paragraph}"
            answer = {"text": f"value{name}", "answer_start": 0}
            asked = [
                {"question": f"What is {name}?", "is_impossible": False, "answers": [answer]},
                {"question": f"What is not {name}?", "is_impossible": True, "answers": []},
            ]
            text = f"About {name}: it is value{name}. " + f"Then follow words of {name}. " * 12
            paragraphs.append({"context": text, "qas": asked})
        articles.append({"title": f"article {article}", "paragraphs": paragraphs})
    path = tmp_path_factory.mktemp("squad") / "squad.json"
    path.write_text(json.dumps({"data": articles}))
    return path
