"""RULER from a clone of NVIDIA/RULER with its downloads, or from prompt files of its scripts.

A clone provides templates, needles, noise and data. As in RULER, words come from the Python package wonderwords, and
NLTK splits sentences. `mode: reference` (suites/ruler/published.py) does the rest, so that prompts equal those of
RULER's scripts with the same tokenizer and seed.
"""

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from unspool.core.artifacts import digest_once
from unspool.core.errors import ConfigError, DataError
from unspool.core.sizes import format_size
from unspool.evals.benchmark_copy import PromptFile, Reference, differing, hash_files, hash_text, python_literals
from unspool.evals.config import TaskEval
from unspool.evals.suite import Question
from unspool.evals.suites.ruler import needles, qa, tracing, word_counts
from unspool.evals.suites.ruler.haystacks import WORD_LISTS, nltk_sentences
from unspool.evals.wording import PREFIX, TEMPLATE, TOKENS, Form, checked_wording

REPO, VERSION = "NVIDIA/RULER", "c3f5e3b"
FORMS: dict[str, Form] = {**needles.FORMS, **tracing.FORMS, **word_counts.FORMS, **qa.FORMS}
SYNTHETIC = "scripts/data/synthetic"
CONSTANTS, TASK_LIST, METRICS = (
    f"{SYNTHETIC}/constants.py",
    "scripts/synthetic.yaml",
    "scripts/eval/synthetic/constants.py",
)
ESSAYS, WORDS = f"{SYNTHETIC}/json/PaulGrahamEssays.json", f"{SYNTHETIC}/json/english_words.json"
SQUAD, HOTPOTQA = f"{SYNTHETIC}/json/squad.json", f"{SYNTHETIC}/json/hotpotqa.json"
_NEEDLES = {task.name: task for task in needles.TASKS}
_SCRIPTS = {
    **dict.fromkeys(_NEEDLES, "niah"),
    "vt": "variable_tracking",
    "cwe": "common_words_extraction",
    "fwe": "freq_words_extraction",
    "qa_1": "qa",
    "qa_2": "qa",
}
# Files that users must download: (path in the clone, how to get it).
_DOWNLOADS = {
    "essays": (ESSAYS, "run download_paulgraham_essay.py there"),
    "english_words": (WORDS, "run `git lfs pull` there"),
    "squad": (SQUAD, "run download_qa_dataset.sh there"),
    "hotpotqa": (HOTPOTQA, "run download_qa_dataset.sh there"),
}
# First 16 digits of each file's SHA-256.
KNOWN: dict[str, tuple[str, ...]] = {
    CONSTANTS: ("6296e901d495ec62",),
    TASK_LIST: ("34bc71dcacdc41a8",),
    METRICS: ("6740467c17b8dc06",),
    f"{SYNTHETIC}/niah.py": ("e9cada0a7660d274",),
    f"{SYNTHETIC}/variable_tracking.py": ("9aac483420e158d1",),
    f"{SYNTHETIC}/common_words_extraction.py": ("2671d4a84a383ace",),
    f"{SYNTHETIC}/freq_words_extraction.py": ("29b7af97ffdd2122",),
    f"{SYNTHETIC}/qa.py": ("f00c0b59cf8698e9",),
    WORDS: ("affcd6d45fdf3cc8",),
    SQUAD: ("80a5225e94905956",),
    HOTPOTQA: ("e3da074df24e8369",),
    # Versions of wonderwords: 2.1, 2.2 and 3.0.
    "nounlist.txt": ("dacf3ad36fb59ff3", "0778f51872f2aa89", "8d88b3ebc2e2969e"),
    "adjectivelist.txt": ("66814d46b7e292c8",),
    "verblist.txt": ("9fbf5e4e69b8869a",),
}
# A sketch of the essays: CRC-32 hashes of 5 consecutive words, of which one in 8192 is kept, independent of position.
# Each download of the essays has another order and small differences.
_SHINGLE, _EVERY = 5, 8192
_ESSAY_MARKS = (
    "6194 10072 10772 13000 27929 30105 36612 48336 54144 57509 63152 63761 69692 73182 76683 88459 100696 "
    "111364 121353 144954 151090 167486 176419 183997 184576 189752 191476 198981 199339 205487 209446 222111 "
    "230858 236332 244863 266212 266671 277981 283412 286560 286814 291368 295270 305523 306449 309433 329957 "
    "333753 334926 344359 346826 352973 356649 362397 369298 370367 428285 431943 433154 443012 443244 447323 "
    "460037 480413 492493 493019 496118 496709 513434 518832"
)
KNOWN_ESSAYS = frozenset(map(int, _ESSAY_MARKS.split()))
_LEAST_SHARED = 0.9
# By task: number of characters of the instruction before the context, and of the answer prefix before its first and
# after its last placeholder, and the hash of these three. They do not depend on tokenizer and seed.
KNOWN_PROMPTS: dict[str, tuple[int, int, int, str]] = {
    "niah_single_1": (131, 30, 34, "785e3553afac8b62"),
    "niah_single_2": (131, 30, 34, "785e3553afac8b62"),
    "niah_single_3": (127, 28, 34, "a06fd60d1358c6c1"),
    "niah_multikey_1": (131, 30, 34, "785e3553afac8b62"),
    "niah_multikey_2": (131, 30, 34, "785e3553afac8b62"),
    "niah_multikey_3": (127, 28, 34, "a06fd60d1358c6c1"),
    "niah_multivalue": (137, 31, 35, "6cc3172c7d931f74"),
    "niah_multiquery": (137, 31, 35, "6cc3172c7d931f74"),
    "vt": (86, 112, 12, "93c53c4165fae8f4"),
    "cwe": (129, 65, 65, "872497c3f51ba009"),
    "fwe": (127, 89, 89, "934b985329425456"),
    "qa_1": (146, 8, 8, "20beb3587b493e62"),
    "qa_2": (146, 8, 8, "20beb3587b493e62"),
}
_LFS = b"version https://git-lfs"
_SUBSETS = ("validation.jsonl", "test.jsonl")


def read(path: Path, config: TaskEval) -> Reference:
    """Read the parts of a clone or of prompt files that the entry's tasks and lengths need."""
    if (path / CONSTANTS).is_file():
        return _read_clone(path, config.tasks, config.paths)
    return _read_prompts(path, config.tasks, config.lengths)


def _read_clone(root: Path, tasks: Sequence[str], given: Mapping[str, str]) -> Reference:
    scripts = {f"{SYNTHETIC}/{_SCRIPTS[task]}.py": None for task in tasks}
    files = hash_files(root, [CONSTANTS, TASK_LIST, METRICS, *scripts])
    differs = list(differing(files, KNOWN))
    paths = {}
    for name in _needed_data(tasks):
        known, remedy = _DOWNLOADS[name]
        path = Path(given.get(name) or root / known)
        _check_download(root, path, name, tasks, remedy)
        paths[name] = str(path)
        files[known] = digest_once(path)[:16]
        is_known = _has_known_essays(path, files[known]) if name == "essays" else files[known] in KNOWN[known]
        differs += [] if is_known else [known]
    if any(_needs_words(task) for task in tasks):
        folder = Path(given.get("wonderwords") or _wonderwords())
        lists = hash_files(folder, WORD_LISTS)
        files |= lists
        differs += differing(lists, KNOWN)
        paths["wonderwords"] = str(folder)
    if "essays" in paths:
        nltk_sentences("One. Two.")
    return Reference(
        repo=REPO,
        version=VERSION,
        files=files,
        differs=tuple(differs),
        wording=checked_wording(
            {"suite": "ruler", "tasks": {task: _texts(root, task) for task in tasks}},
            "ruler",
            FORMS,
            label=f"reference {root}",
            source=f"{REPO} {VERSION}",
        ),
        paths=paths,
        counts_opening=False,
    )


def _texts(root: Path, task: str) -> dict[str, Any]:
    """A task's texts, named as in a wording file."""
    script = f"{SYNTHETIC}/{_SCRIPTS[task]}.py"
    own = python_literals(root / script)

    def literal(name: str) -> str:
        found = [text for text in own.get(name, []) if isinstance(text, str)]
        if not found:
            raise ConfigError(f"reference {root}: {script} assigns no text to {name}; use version {VERSION} of {REPO}.")
        return found[0]

    try:
        base = python_literals(root / CONSTANTS)["TASKS"][0][_SCRIPTS[task]]
        texts = {TEMPLATE: base["template"], PREFIX: base["answer_prefix"], TOKENS: base["tokens_to_generate"]}
    except (KeyError, IndexError, TypeError) as error:
        raise ConfigError(
            f"reference {root}: {CONSTANTS} has no texts of {_SCRIPTS[task]}; use version {VERSION} of {REPO}."
        ) from error
    if task in _NEEDLES:
        if _NEEDLES[task].num_queries * _NEEDLES[task].num_values == 1:
            # RULER's own replacements for a single answer.
            for plural, single in {"Some": "A", "are all": "is", "are": "is", "answers": "answer"}.items():
                texts |= {name: texts[name].replace(plural, single) for name in (TEMPLATE, PREFIX)}
        texts["needle"] = literal("needle")
    if "noise" in FORMS[task]:
        texts["noise"] = literal("haystack")
    if "document" in FORMS[task]:
        texts["document"] = literal("DOCUMENT_PROMPT")
    return texts


def _needed_data(tasks: Sequence[str]) -> Iterator[str]:
    if any(task in _NEEDLES and _NEEDLES[task].haystack == "essay" for task in tasks):
        yield "essays"
    yield from (
        name for name, task in (("english_words", "cwe"), ("squad", "qa_1"), ("hotpotqa", "qa_2")) if task in tasks
    )


def _needs_words(task: str) -> bool:
    return task == "cwe" or (task in _NEEDLES and _NEEDLES[task].key == "words")


def _check_download(root: Path, path: Path, name: str, tasks: Sequence[str], remedy: str) -> None:
    users = [task for task in tasks if name in _needed_data([task])]
    if not path.is_file():
        problem = "is missing"
    else:
        with path.open("rb") as file:
            if file.read(len(_LFS)) != _LFS:
                return
        problem = "is a Git LFS pointer, not the file itself"
    shown = path.relative_to(root) if path.is_relative_to(root) else path
    raise ConfigError(
        f"reference {root}: {shown} {problem}; {remedy}, set it as paths.{name}, or remove {', '.join(users)}."
    )


def _wonderwords() -> Path:
    found = find_spec("wonderwords")
    if found is None or not found.submodule_search_locations:
        raise ConfigError(
            "RULER draws its words from the Python package wonderwords, which is not installed; run `pip install "
            "wonderwords`, or set the folder of its lists as paths.wonderwords."
        )
    return Path(found.submodule_search_locations[0]) / "assets"


@lru_cache(4)
def _has_known_essays(path: Path, content: str) -> bool:
    """True if the file has the essays of RULER's list, in any order. `content` is its hash."""
    try:
        words = json.loads(path.read_text(encoding="utf-8"))["text"].split()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"ruler: {path} is not RULER's file of essays ({type(error).__name__}: {error}).") from error
    found = essay_sketch(words)
    shared = len(found & KNOWN_ESSAYS)
    return shared >= _LEAST_SHARED * max(len(KNOWN_ESSAYS), len(found))


def essay_sketch(words: Sequence[str]) -> frozenset[int]:
    hashes = (zlib.crc32(" ".join(words[at : at + _SHINGLE]).encode()) for at in range(len(words) - _SHINGLE + 1))
    return frozenset(found // _EVERY for found in hashes if found % _EVERY == 0)


def _read_prompts(root: Path, tasks: Sequence[str], lengths: Sequence[int]) -> Reference:
    prompts: dict[tuple[str, int], PromptFile] = {}
    files, differs = {}, []
    for length in lengths:
        for task in tasks:
            is_one = root.is_file() and len(lengths) == len(tasks) == 1
            path = root if is_one else _prompt_file(root, task, length, alone=len(lengths) == 1)
            name = path.name if is_one else str(path.relative_to(root))
            prompts[task, length] = PromptFile(path, _question)
            files[name] = digest_once(path)[:16]
            if not len(prompts[task, length]):
                raise DataError(f"{path}: the file is empty; rewrite it with RULER's prepare.py.")
            if prompt_marks(task, prompts[task, length][0]) != KNOWN_PROMPTS[task][-1]:
                differs.append(name)
    return Reference(
        repo=REPO,
        version=VERSION,
        kind="prompts",
        files=files,
        differs=tuple(differs),
        prompts=prompts,
        counts_opening=False,
    )


def _prompt_file(root: Path, task: str, length: int, *, alone: bool) -> Path:
    folders = [root / str(length) / "data" / task, root / str(length) / task, *([root / task] if alone else [])]
    for folder in folders:
        for name in _SUBSETS:
            if (folder / name).is_file():
                return folder / name
    raise ConfigError(
        f"reference {root}: neither a clone of {REPO} ({CONSTANTS} is missing) nor a folder of its prompts: for {task} "
        f"at {format_size(length)} there is no {length}/data/{task}/{_SUBSETS[0]}. Run RULER's prepare.py with "
        "--model_template_type base, or remove the task or length."
    )


def _question(row: dict[str, Any]) -> Question:
    references = tuple(str(text) for text in row["outputs"])
    if not references:
        raise ValueError("outputs is empty")
    return Question(
        context=str(row["input"]),
        question="",
        prefix=str(row.get("answer_prefix", "")),
        references=references,
        meta={"mode": "reference", "data": "prompts"},
    )


def prompt_marks(task: str, asked: Question) -> str:
    """Hash of the prompt parts that are equal in all samples of a task."""
    head, start, end, _ = KNOWN_PROMPTS[task]
    prefix = asked.prefix
    return hash_text("\x1f".join([asked.context[:head], prefix[:start], prefix[len(prefix) - end :]]))
