"""The questions of `next_word`, from the shipped held-out books; lm-eval loads this file by its path."""

import io
import json
import random
import re
from pathlib import Path
from typing import Any

import zstandard

BOOKS = Path(__file__).parents[1] / "demo" / "heldout.jsonl.zst"
WORDS = 24  # before the word to predict
QUESTIONS = {"train": 20, "test": 100}


def load(**_: Any) -> Any:
    """The splits of the task: passages, four words each, and the index of the right one."""
    from datasets import Dataset  # type: ignore[import-not-found, unused-ignore]

    with BOOKS.open("rb") as file:
        lines = io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(file), encoding="utf-8")
        text = " ".join(json.loads(line)["text"] for line in lines)
    words = text.split()
    rng = random.Random(0)
    asked = [at for at in range(WORDS, len(words), WORDS + 1) if re.fullmatch(r"[a-z]{4,8}", words[at])]
    chosen = rng.sample(asked, sum(QUESTIONS.values()))
    known = sorted({words[at] for at in asked})
    questions = [_question(words, at, known, rng) for at in chosen]
    first = QUESTIONS["train"]
    return {"train": Dataset.from_list(questions[:first]), "test": Dataset.from_list(questions[first:])}


def _question(words: list[str], at: int, known: list[str], rng: random.Random) -> dict[str, Any]:
    choices = [words[at], *rng.sample([word for word in known if word != words[at]], 3)]
    rng.shuffle(choices)
    return {"text": " ".join(words[at - WORDS : at]), "choices": choices, "answer": choices.index(words[at])}
