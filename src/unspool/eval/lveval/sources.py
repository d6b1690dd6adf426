"""LV-Eval's files, or a small generated stand-in.

In: a tokenizer, paths: `data`, a folder with <data set>_<level>.jsonl as released, or a file for each data set by name;
blacklists and `segmenter` (words.py). Out: `Sources`; a file is read when it is first asked for.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from unspool.base.errors import ConfigError
from unspool.base.lookup import lookup
from unspool.eval.fill import Meter
from unspool.eval.helmet import generated
from unspool.eval.helmet.records import one_of, read_records, strings
from unspool.eval.lveval.wording import OWN, PROMPTS
from unspool.eval.lveval.words import Segmenter, read_blacklists, words_for
from unspool.eval.metrics.keywords import Language, Words
from unspool.eval.wording import Wording

# LV-Eval counts words; the number of tokens of a level depends on the tokenizer and is a third more at least.
LEVELS = {"16k": 16_000, "32k": 32_000, "64k": 64_000, "128k": 128_000, "256k": 256_000}
PATHS = {"data", "blacklist", "blacklist_en", "blacklist_zh", "segmenter", *PROMPTS}
GENERATED_QUESTIONS = 60


@dataclass(frozen=True, kw_only=True)
class Question:
    text: str
    answers: tuple[str, ...]
    keywords: str | None
    article: str | None  # None: generated, as long as wanted
    fact: str = ""  # of a generated one: the passage that answers


@dataclass
class Sources:
    meter: Meter
    paths: Mapping[str, str]
    words: dict[Language, Words]
    own_blacklist: dict[Language, bool]
    segmenter: Segmenter
    wording: Wording = OWN
    _read: dict[str, list[Question]] = field(default_factory=dict)

    def questions(self, task: str, length: int) -> list[Question]:
        path = self._file(task, length)
        name = path or f"generated {language_of(task)}"
        if name not in self._read:
            self._read[name] = _questions(path) if path else _generated(language_of(task))
        return self._read[name]

    def _file(self, task: str, length: int) -> str | None:
        """The file of the first level that fills the length, or of the longest; None where nothing was given."""
        if task in self.paths:
            return self.paths[task]
        if "data" not in self.paths:
            return None
        folder = Path(self.paths["data"])
        found = {level: folder / f"{task}_{level}.jsonl" for level in LEVELS}
        there = [level for level in LEVELS if found[level].is_file()]
        if not there:
            raise ConfigError(
                f"lveval: {folder} holds no {task}_<level>.jsonl (levels {', '.join(LEVELS)}); unpack LV-Eval's files "
                f"there, leave {task} out of `tasks`, or give its file as {task} under `paths`."
            )
        return str(found[next((level for level in there if LEVELS[level] >= length), there[-1])])


def language_of(task: str) -> Language:
    chinese = ("multifieldqa_zh_mixup", "factrecall_zh", "cmrc_mixup", "lic_mixup", "dureader_mixup")
    return "zh" if task in chinese else "en"


def load(tokenizer: Any, paths: Mapping[str, str], wording: Wording = OWN) -> Sources:
    for name in paths:
        lookup(dict.fromkeys(sorted(PATHS)), name, kind="path of lveval")
    # A name and no path, but it comes among paths, and so perhaps as one.
    given = Path(paths["segmenter"]).name if "segmenter" in paths else None
    lookup(dict.fromkeys(("characters", "jieba")), given or "jieba", kind="segmenter")
    # Released answers are split as LV-Eval splits them; the generated stand-in needs no dictionary.
    files = "data" in paths or any(language_of(task) == "zh" for task in PROMPTS if task in paths)
    segmenter = cast(Literal["jieba", "characters"], given or ("jieba" if files else "characters"))
    blacklists = read_blacklists(paths)
    return Sources(
        meter=Meter(tokenizer, [passage.text for passage in generated.pool()[:100]]),
        paths=dict(paths),
        words={language: words_for(language, words, segmenter) for language, (words, _) in blacklists.items()},
        own_blacklist={language: not theirs for language, (_, theirs) in blacklists.items()},
        segmenter=segmenter,
        wording=wording,
    )


def _questions(path: str) -> list[Question]:
    found = []
    for row in read_records(path):
        keywords = row.get("answer_keywords")
        found.append(
            Question(
                text=str(one_of(row, ("input", "question"), path)),
                answers=strings(one_of(row, ("answers", "answer"), path)),
                keywords=None if keywords is None else str(keywords),
                article=str(one_of(row, ("context", "article"), path)),
            )
        )
    return found


def _generated(language: Language) -> list[Question]:
    """Firms and founders again; in Chinese a sentence about each."""
    found = []
    for number in range(GENERATED_QUESTIONS):
        known = generated.facts(generated.POOL - 1 - number)
        answer = known["founder"]
        if language == "zh":
            asked, fact = f"谁创办了{known['firm']}？", f"{known['firm']}由{answer}创办。"
        else:
            asked, fact = f"Who founded {known['firm']}?", f"{known['firm']} was founded by {answer}."
        found.append(Question(text=asked, answers=(answer,), keywords=answer, article=None, fact=fact))
    return found
