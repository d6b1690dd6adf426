"""Five short tasks of lm-eval from local files: SHORT_DATA names their folder. lm-eval loads this file by its path.

Prompts, choices and metrics are those of lm-eval's tasks with these names. Questions that the files lack are not asked.
"""

import io
import json
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import zstandard


def load(name: str, **_: Any) -> Any:
    """The test split of a task: query, choices, and the index of the right one."""
    from datasets import Dataset  # type: ignore[import-not-found, unused-ignore]

    path = Path(os.environ["SHORT_DATA"]) / f"{name}.jsonl.zst"
    with path.open("rb") as packed:
        lines = io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(packed), encoding="utf-8")
        return {"test": Dataset.from_list([QUESTIONS[name.partition(".")[0]](json.loads(line)) for line in lines])}


def _hellaswag(doc: dict[str, Any]) -> dict[str, Any]:
    query = _without_brackets(f"{doc['activity_label']}: {doc['ctx_a']} {doc['ctx_b'].capitalize()}")
    return {"query": query, "choices": [*map(_without_brackets, doc["endings"])], "answer": int(doc["label"])}


def _without_brackets(text: str) -> str:
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _arc(doc: dict[str, Any]) -> dict[str, Any]:
    return {"query": f"{doc['query']}\nAnswer:", "choices": doc["choices"], "answer": doc["gold"]}


def _piqa(doc: dict[str, Any]) -> dict[str, Any]:
    query = f"Question: {doc['goal']}\nAnswer:"
    return {"query": query, "choices": [doc["sol1"], doc["sol2"]], "answer": doc["label"]}


def _winogrande(doc: dict[str, Any]) -> dict[str, Any]:
    before, _, after = doc["sentence"].partition("_")
    choices = [before + doc["option1"], before + doc["option2"]]
    # The end of the sentence is scored, after either option.
    return {"query": int(doc["answer"]) - 1, "choices": choices, "answer": after.strip()}


QUESTIONS = {
    "hellaswag": _hellaswag,
    "arc_challenge": _arc,
    "arc_easy": _arc,
    "piqa": _piqa,
    "winogrande": _winogrande,
}
hellaswag = partial(load, "hellaswag")
arc_challenge = partial(load, "arc_challenge.test")
arc_easy = partial(load, "arc_easy.test")
piqa = partial(load, "piqa")
winogrande = partial(load, "winogrande")
