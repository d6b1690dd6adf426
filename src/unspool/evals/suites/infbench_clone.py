"""∞Bench's retrieval tasks from a user's clone: its prompts for base models and its released files.

Questions come in file order, and prompts are cut in the middle. ∞Bench fills the model's whole context with the prompt
and generates beyond it. Here the answer is part of the length.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from unspool.core.errors import ConfigError
from unspool.evals.benchmark_copy import PromptFile, Reference, cut_prompt, differing, hash_files, python_literals
from unspool.evals.prompt_encoder import PromptEncoder
from unspool.evals.suite import Question
from unspool.evals.suites.infbench import SUITE, InfbenchEval

REPO, VERSION = "OpenBMB/InfiniteBench", "88b3daa"
WORDS = "src/prompt.py"
KNOWN = {WORDS: ("d49a6891d6bc6152",)}


def read(path: Path, config: InfbenchEval) -> Reference:
    files = hash_files(path, KNOWN)
    words = python_literals(path / WORDS).get("yarn_mistral_templates", [{}])[0]
    data = {}
    for task in SUITE.chosen_tasks(config):
        if task.name not in words:
            raise ConfigError(f"reference {path}: {WORDS} has no prompt for {task.name}; pass a clone of {REPO}.")
        data[task.name] = path / "data" / f"{task.name}.jsonl"
        if not data[task.name].is_file():
            raise ConfigError(
                f"reference {path}: data/{task.name}.jsonl is missing; run the clone's scripts/download_dataset.sh, or "
                f"remove {task.name} from `tasks`."
            )
    names = [f"data/{name}.jsonl" for name in data]
    return Reference(
        repo=REPO,
        version=VERSION,
        files=files | hash_files(path, names),
        differs=differing(files, KNOWN),
        unchecked=tuple(names),
        prompts={
            (task, length): PromptFile(found, partial(_question, words[task]))
            for task, found in data.items()
            for length in config.lengths
        },
        fit=fit,
    )


def _question(template: str, row: Mapping[str, Any]) -> Question:
    before, _, after = template.partition("{context}")
    answer = row["answer"]
    tail = after.format(input=row["input"])
    question, newline, prefix = tail.rpartition("\n")
    return Question(
        context=before.format() + row["context"],
        question=question + newline,
        prefix=prefix,
        references=(answer if isinstance(answer, str) else answer[0],),
        meta={"mode": "reference"},
    )


def fit(asked: Question, encoder: PromptEncoder, *, chat: bool, limit: int) -> Question:
    return cut_prompt(asked, encoder.tokenizer, limit, apart=False)
