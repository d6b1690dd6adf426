"""HELMET from a user's clone of its repository: wording, files and random draws.

The wording comes from the clone's `data.py` and `prompts/`, which are parsed and never run. Questions come from its
`data/`, where its download script puts them. For Hub datasets, the user names the files. If JSON-KV's or RULER's files
are missing, their questions are generated with the clone's wording.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

from unspool.core.errors import ConfigError, DataError
from unspool.core.sizes import format_size
from unspool.evals.benchmark_copy import Reference, differing, hash_files
from unspool.evals.config import TaskEval
from unspool.evals.prompt_encoder import PromptEncoder
from unspool.evals.suite import Question
from unspool.evals.suites.helmet import alce, json_kv, rag, rerank
from unspool.evals.suites.helmet.data import CITE, DEMO, LABELS, RAG
from unspool.evals.suites.helmet.python_texts import PythonTexts
from unspool.evals.suites.helmet.suite import FORMS, SUITE
from unspool.evals.wording import PREFIX, TEMPLATE, Wording

REPO, VERSION = "princeton-nlp/HELMET", "4526dfb"
KNOWN = {
    "data.py": ("a47c53d5f42d6746", "5a6051ff7596ee43"),  # versions of April and February 2025, with equal wording
    "prompts/asqa_revised.json": ("99ebb9d7371895dc",),
    "prompts/qampari_revised.json": ("d73e184ec6d9fd6b",),
}
SHOTS = 2
# The clone's loader function of a task, and the dataset name passed to it.
_LOADERS = {
    "json_kv": ("load_json_kv", "json_kv"),
    "niah_multikey_2": ("load_ruler", "ruler_niah_mk_2"),
    "niah_multikey_3": ("load_ruler", "ruler_niah_mk_3"),
    "niah_multivalue": ("load_ruler", "ruler_niah_mv"),
    **{task: ("load_qa", f"kilt_{task}") for task in RAG},
    "msmarco": ("load_msmarco_rerank", "msmarco_rerank_psg"),
    **{task: ("load_alce", f"alce_{task}") for task in CITE},
    "narrativeqa": ("load_narrativeqa", "narrativeqa"),
    "infbench_qa": ("load_infbench", "infbench_qa_eng"),
    "infbench_mc": ("load_infbench", "infbench_choice_eng"),
    "infbench_sum": ("load_infbench", "infbench_sum_eng"),
    "multi_lexsum": ("load_multi_lexsum", "multi_lexsum"),
    **{task: ("load_icl", f"icl_{task}") for task in LABELS},
}
NEEDLES = ("niah_multikey_2", "niah_multikey_3", "niah_multivalue")
GENERATED = ("json_kv", *NEEDLES)
_KILT = "data/kilt/{}_1000_k{{}}_dep{}.jsonl"
_SPLITS = {task: (f"{task}-dev-multikilt", f"{task}-train-multikilt") for task in RAG}
_SPLITS["popqa"] = ("popqa_test", "popqa_test")
_DEPTHS = dict.fromkeys(RAG, 6) | {"hotpotqa": 3}
# The clone's files of questions (named by number of passages, number of keys or length) and examples.
_FILES = {
    "json_kv": "data/json_kv/test_k{}_dep6.jsonl",
    **{task: f"data/ruler/{task}/validation_{{}}.jsonl" for task in NEEDLES},
    **{task: _KILT.format(_SPLITS[task][0], _DEPTHS[task]) for task in RAG},
    "msmarco": "data/msmarco/test_reranking_data_k{}_dep3.jsonl",
    **{task: f"data/alce/{task}_eval_gtr_top2000.json" for task in CITE},
}
_DEMO_FILES = {
    **{task: _KILT.format(_SPLITS[task][1], _DEPTHS[task]).format(3) for task in RAG},
    "msmarco": "data/msmarco/test_reranking_data_k10_dep3.jsonl",
    **{task: f"prompts/{task}_revised.json" for task in CITE},
}
_COUNTS: dict[str, Mapping[int, int]] = {
    "json_kv": json_kv.COUNTS,
    **{task: {length: length for length in rag.COUNTS} for task in NEEDLES},
    **dict.fromkeys(RAG, rag.COUNTS),
    "msmarco": rerank.COUNTS,
    **dict.fromkeys(CITE, alce.COUNTS),
}
LENGTHS = tuple(rag.COUNTS)


@dataclass(frozen=True, kw_only=True)
class Filled:
    """Values that HELMET fills into a template, and the references of the answer."""

    values: Mapping[str, Any]
    references: tuple[str, ...]
    depth: float | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Words:
    """The texts of one task."""

    task: str
    texts: Mapping[str, str]

    def __getitem__(self, name: str) -> str:
        if name not in self.texts:
            raise DataError(f"reference: data.py has no {name} for helmet {self.task}; pass a clone of {REPO}.")
        return self.texts[name]

    @property
    def gap(self) -> str:
        """Text between the message and the answer's cue without a chat template."""
        return self["prompt_template"].removeprefix(self["user_template"]).removesuffix(self["system_template"])

    def question(self, filled: Filled) -> Question:
        before, _, after = self["user_template"].partition("{context}")
        head, tail = before.format(**filled.values), after.format(**filled.values)
        cue = self["system_template"].format(**filled.values)
        return Question(
            context=head + filled.values["context"],
            question=tail + self.gap,
            prefix=cue,
            references=filled.references,
            depth=filled.depth,
            meta={
                "mode": "reference",
                "cue": cue,
                "gap": self.gap,
                "head": len(head),
                **filled.meta,
            },
        )


@dataclass(frozen=True)
class Clone:
    root: Path
    paths: Mapping[str, str]  # the user's files by task name

    @cached_property
    def _texts(self) -> PythonTexts:
        return PythonTexts(self.root / "data.py", f"a clone of {REPO}")

    def words(self, task: str) -> Words:
        return Words(task, self._texts.function(*_LOADERS[task]))

    @cached_property
    def omitted(self) -> str:
        """Text that replaces the end of a long text."""
        return self._texts.function("truncate_llama2")["postfix_text"]

    def is_generated(self, task: str, length: int) -> bool:
        return task in GENERATED and task not in self.paths and not (self.root / self.name(task, length)).is_file()

    def name(self, task: str, length: int) -> str:
        return _FILES[task].format(_COUNTS[task][length])

    def file(self, task: str, length: int) -> Path:
        return Path(self.paths.get(task) or self.root / self.name(task, length))

    def demo_file(self, task: str) -> Path:
        return Path(self.paths.get(f"{task}_demos") or self.root / _DEMO_FILES[task])

    def wording(self, tasks: Iterable[str]) -> dict[str, dict[str, str]]:
        """Wording of tasks that are generated because their files are missing."""
        found = {}
        for task in tasks:
            words = self.words(task)
            found[task] = {TEMPLATE: words["user_template"] + words.gap, PREFIX: words["system_template"]}
        if "json_kv" in found:
            demo = self.words("json_kv")["demo_template"].format(key="{question}", value=" {answer}")
            found["json_kv"][DEMO] = demo + "\n\n"
        return found

    def needed(self, tasks: Sequence[str], lengths: Sequence[int]) -> list[str]:
        """Names of the clone's files with the questions. Raises ConfigError if one is missing."""
        found = []
        for task in tasks:
            if task in _FILES and task not in self.paths:
                found += [self.name(task, length) for length in lengths if not self.is_generated(task, length)]
            if task in _DEMO_FILES and f"{task}_demos" not in self.paths:
                found.append(_DEMO_FILES[task])
            for name in found:
                if not (self.root / name).is_file():
                    raise ConfigError(
                        f"reference {self.root}: {name} is missing, and helmet {task} needs it; get HELMET's data with "
                        f"its scripts/download_data.sh, set a file as {task} under `paths`, or remove {task}."
                    )
        return list(dict.fromkeys(found))


Prompts = Sequence[Callable[[], Filled]]
"""The questions of a task and length, in HELMET's order."""


class PromptList(Sequence[Question]):
    """Questions that are read and built on access, because files have up to 4 GB."""

    def __init__(self, words: Words, load: Callable[[], Prompts]) -> None:
        self._words, self._load = words, load

    @cached_property
    def _prompts(self) -> Prompts:
        with self._readable("a file"):
            return self._load()

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: Any) -> Any:
        with self._readable(f"question {index}"):
            return self._words.question(self._prompts[index]())

    @contextmanager
    def _readable(self, what: str) -> Iterator[None]:
        try:
            yield
        except (ValueError, KeyError, TypeError, IndexError) as error:
            task = self._words.task
            raise DataError(
                f"reference: {what} of helmet {task} has an unexpected format ({type(error).__name__}: {error}); "
                f"download its data again, or remove {task}."
            ) from error


def read(path: Path, config: TaskEval) -> Reference:
    from unspool.evals.suites.helmet.clone_prompts import load

    clone, tasks = Clone(path, config.paths), [task.name for task in SUITE.chosen_tasks(config)]
    unknown = [length for length in config.lengths if length not in LENGTHS]
    if unknown:
        known = ", ".join(map(format_size, LENGTHS))
        raise ConfigError(f"reference: HELMET has no length {format_size(unknown[0])}; use {known}.")
    files = hash_files(path, ["data.py", *clone.needed(tasks, config.lengths)])
    prompts = {
        (task, length): PromptList(clone.words(task), partial(load, task, clone, length))
        for task in tasks
        for length in config.lengths
        if not clone.is_generated(task, length)
    }
    made = [one for one in product(tasks, config.lengths) if clone.is_generated(*one)]
    words = clone.wording(dict.fromkeys(task for task, _ in made))
    missing = [f"{clone.name(*one)} (missing, so generated)" for one in made]
    given = [name for name in config.paths if name.removesuffix("_demos") in tasks]
    return Reference(
        repo=REPO,
        version=VERSION,
        files=files,
        differs=(*differing({name: one for name, one in files.items() if name in KNOWN}, KNOWN), *missing),
        unchecked=(*(name for name in files if name not in KNOWN), *given),
        wording=Wording(forms=FORMS, given=words, source=f"{REPO} {VERSION}"),
        prompts=prompts,
        fit=fit,
    )


def fit(asked: Question, encoder: PromptEncoder, *, chat: bool, limit: int) -> Question:
    """Omit the cue for a chat model, and cut the end of a context that is too long, like HELMET.

    The number of excess tokens is cut from the context's own tokens, so one extra token may remain.
    """
    if "cue" not in asked.meta:
        return asked
    if chat:
        asked = replace(asked, question=asked.question.removesuffix(asked.meta["gap"]), prefix="")
    excess = len(encoder.ids(asked, chat=chat)) - limit
    if excess <= 0:
        return asked
    start = asked.meta["head"]
    found = encoder.tokenizer(asked.context[start:], return_offsets_mapping=True, verbose=False)
    if excess >= len(found["offset_mapping"]):
        raise ConfigError("helmet: a question does not fit its length even without a context; use a larger length.")
    return replace(asked, context=asked.context[: start + found["offset_mapping"][-excess][0]])
