"""LV-Eval from a user's clone: its instructions, word lists and released files.

Questions come in file order. A length uses the level of the same name (32K uses 32k). Prompts are cut to 500 tokens
less, as in LV-Eval's runs. Solved questions (`shots`) are an addition: LV-Eval's code has none.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from unspool.core.errors import ConfigError
from unspool.core.sizes import format_size
from unspool.evals.benchmark_copy import PromptFile, Reference, cut_prompt, differing, hash_files, python_literals
from unspool.evals.prompt_encoder import PromptEncoder
from unspool.evals.suite import Question
from unspool.evals.suites.lveval import FORMS, LEVELS, SET_ASIDE, SUITE, LvEval, language_of, read_blacklists
from unspool.evals.wording import PREFIX, TEMPLATE, Wording

REPO, VERSION = "infinigence/LVEval", "63e7ae9"
KNOWN = {"config.py": ("7c278132c6cd744e",), "metrics.py": ("74156ade81b98846",)}


def read(path: Path, config: LvEval) -> Reference:
    files = hash_files(path, KNOWN)
    words = python_literals(path / "config.py").get("DATASET_PROMPT", [{}])[0]
    tasks = [task.name for task in SUITE.chosen_tasks(config)]
    unknown = [task for task in tasks if task not in words]
    if unknown:
        raise ConfigError(f"reference {path}: config.py has no prompt for {unknown[0]}; pass a clone of {REPO}.")
    wording = Wording(forms=FORMS, given={task: _split(words[task]) for task in tasks}, source=f"{REPO} {VERSION}")
    data = {(task, length): _file(task, length, config.paths) for task in tasks for length in config.lengths}
    copy = Reference(
        repo=REPO,
        version=VERSION,
        files=files | {found.name: hash_files(found.parent, [found.name])[found.name] for found in data.values()},
        differs=differing(files, KNOWN),
        unchecked=tuple(dict.fromkeys(found.name for found in data.values())),
        wording=wording,
        paths={"blacklist": str(path / "metrics.py")},
    )
    if config.shots:
        return replace(copy, differs=(*copy.differs, f"shots: {config.shots}"))
    blacklists, segmenter = read_blacklists(copy.paths), Path(config.paths.get("segmenter", "jieba")).name
    if segmenter != "jieba":
        copy = replace(copy, differs=(*copy.differs, f"segmenter: {segmenter}"))
    asked = {}
    for (task, length), found in data.items():
        scored = {"blacklist": sorted(blacklists[language_of(task)][0]), "own_blacklist": False, "segmenter": segmenter}
        meta = {"mode": "reference", "most": length - SET_ASIDE, **scored}
        asked[task, length] = PromptFile(found, partial(_question, wording, task, meta))
    return replace(copy, prompts=asked, fit=fit)


def _split(prompt: str) -> dict[str, str]:
    """Split a prompt. Its last line is the start of the answer."""
    template, newline, prefix = prompt.rpartition("\n")
    return {TEMPLATE: template + newline, PREFIX: prefix}


def _file(task: str, length: int, paths: Mapping[str, str]) -> Path:
    if task in paths:
        return Path(paths[task])
    level = f"{length // 1024}k"
    if level not in LEVELS or length % 1024:
        known = ", ".join(map(format_size, LEVELS.values()))
        raise ConfigError(f"reference: LV-Eval has no level of {format_size(length)}; use {known}.")
    if "data" not in paths:
        raise ConfigError(
            "reference: LV-Eval's questions are not in its repository; unpack its files and set the folder as data "
            "under `paths`."
        )
    found = Path(paths["data"]) / f"{task}_{level}.jsonl"
    if not found.is_file():
        raise ConfigError(
            f"reference: {found} is missing; unpack LV-Eval's files there, or remove {task} from `tasks`."
        )
    return found


def _question(wording: Wording, task: str, meta: Mapping[str, Any], row: Mapping[str, Any]) -> Question:
    before, after = wording.around(task, input=row["input"])
    answers = row["answers"]
    return Question(
        context=before + row["context"],
        question=after,
        prefix=wording.fill(task, PREFIX),
        references=tuple(answers),
        meta={**meta, "oracle": answers[0], "keywords": row.get("answer_keywords")},
    )


def fit(asked: Question, encoder: PromptEncoder, *, chat: bool, limit: int) -> Question:
    return cut_prompt(asked, encoder.tokenizer, asked.meta["most"], apart=True)
