"""The suite LV-Eval: instruction, article, second instruction, question. Long articles are cut in the middle.

`fixed` cuts the article to fill the length. `reference` leaves 500 more tokens free, like LV-Eval. Only the first
reference answer counts, as in LV-Eval. The scores are in `scoring/keywords.py`.
"""

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from pydantic import Field

from unspool.core.config import lookup
from unspool.core.errors import ConfigError, DataError
from unspool.core.rng import rng_for
from unspool.evals.benchmark_copy import Reference
from unspool.evals.config import WordedEval
from unspool.evals.fill import Meter, Remembered, fill, room, spread
from unspool.evals.scoring.keywords import Language, Words, filtered_rouge_l, gated_f1, plain_f1
from unspool.evals.suite import Ask, Question, Task
from unspool.evals.suites import generated_world
from unspool.evals.suites.records import first_field, flatten, read_records
from unspool.evals.task_suite import TaskSuite
from unspool.evals.wording import PREFIX, TEMPLATE, Form, Text, Wording, literal

# Built-in instructions: (before the article, between article and question, answer prefix).
_ONE = "Only one of the passages matters for it."
_SOME = "Only some of the passages matter for it."
_ONLY = "Give just the answer, without reasons or quotations."
_ZH_ONE = "只有一篇文章与问题相关。"
_ZH_ONLY = "请直接写出答案，不必说明理由或引用原文。"


def _english(before: str, after: str) -> tuple[str, str, str]:
    return f"{before}\n\nArticle: ", f"\n\n{after}\n\nQuestion: ", "Answer:"


def _chinese(before: str, after: str) -> tuple[str, str, str]:
    return f"{before}\n\n文章：", f"\n\n{after}\n\n问题：", "回答："


_LOOGLE = _english(
    f"The passages below answer a question. {_ONE} {_ONLY}",
    f"Answer the question from the passages above. {_ONE} {_ONLY}",
)
_ARTICLES = "下面的文章可以回答一个问题，" + _ZH_ONE
PROMPTS: dict[str, tuple[str, str, str]] = {
    "hotpotwikiqa_mixup": _english(
        f"The passages below answer a question. {_SOME} {_ONLY}",
        f"Answer the question from the passages above. {_SOME} {_ONLY}",
    ),
    "loogle_SD_mixup": _LOOGLE,
    "loogle_CR_mixup": _LOOGLE,
    "loogle_MIR_mixup": _LOOGLE,
    "multifieldqa_en_mixup": _LOOGLE,
    "multifieldqa_zh_mixup": _chinese(
        f"下面的文章可以回答一个问题，请用中文作答。{_ZH_ONE}{_ZH_ONLY}",
        f"请从上面的文章中找出答案。{_ZH_ONE}{_ZH_ONLY}",
    ),
    "factrecall_en": _english(
        "The article below answers a question.",
        "Answer the question from the article above.",
    ),
    "factrecall_zh": _chinese("下面的文章可以回答一个问题。", "请从上面的文章中找出答案。"),
    "cmrc_mixup": _chinese(_ARTICLES, f"请从上面的文章中找出答案，{_ZH_ONE}"),
    "lic_mixup": _chinese(_ARTICLES, f"请从上面的文章中找出答案，{_ZH_ONE}"),
    "dureader_mixup": _chinese(_ARTICLES, f"请从上面的文章中找出答案，{_ZH_ONE}"),
}
FORMS: dict[str, Form] = {
    task: {
        TEMPLATE: Text(own=f"{literal(before)}{{context}}{literal(between)}{{input}}\n", needs=("context", "input")),
        PREFIX: Text(own=cue),
    }
    for task, (before, between, cue) in PROMPTS.items()
}
OWN = Wording(forms=FORMS)
Segmenter = Literal["jieba", "characters"]
_BLACKLIST_VARIABLES: dict[Language, str] = {"en": "ABANDON_WORDS_EN", "zh": "ABANDON_WORDS_ZH"}
# Words that never count as keywords: articles, prepositions, conjunctions, pronouns and auxiliary verbs.
_ENGLISH = (
    "about after all also and are as at be been before being both but by can could did do does during each for from "
    "had has have he her hers him his how if in into is it its may might more most not of on or our she should so "
    "some such than that their them then there these they this those to under was we were what when where which "
    "while who whom whose why will with would you your"
)
_CHINESE = "的了和与及或是在有为以于对从到由被把将也都就而但并等这那其之他她它我你们个不中上下"
OWN_BLACKLISTS: dict[Language, frozenset[str]] = {"en": frozenset(_ENGLISH.split()), "zh": frozenset(_CHINESE)}


def read_blacklists(paths: Mapping[str, str]) -> dict[Language, tuple[frozenset[str], bool]]:
    """Return the blacklist of each language, and True if it is the user's."""
    found: dict[Language, tuple[frozenset[str], bool]] = {}
    for language, variable in _BLACKLIST_VARIABLES.items():
        if f"blacklist_{language}" in paths:
            found[language] = frozenset(_read_text(paths[f"blacklist_{language}"]).split()), True
        elif "blacklist" in paths:
            found[language] = frozenset(_read_variable(paths["blacklist"], variable)), True
        else:
            found[language] = OWN_BLACKLISTS[language], False
    return found


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"blacklist {path}: cannot be read ({error}); pass a text file with one word per line."
        ) from error


def _read_variable(path: str, name: str) -> list[str]:
    """Return the list of words that a Python file assigns to a name. The file is parsed, never run."""
    try:
        tree = ast.parse(_read_text(path))
    except SyntaxError as error:
        raise DataError(f"blacklist {path}: not Python ({error.msg}); pass LV-Eval's metrics.py.") from error
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(to, ast.Name) and to.id == name for to in node.targets):
            return [str(word) for word in ast.literal_eval(node.value)]
    raise DataError(
        f"blacklist {path}: {name} is not assigned; pass LV-Eval's metrics.py, or blacklist_en and blacklist_zh."
    )


@cache
def build_segmenter(segmenter: Segmenter) -> Callable[[str], Sequence[str]]:
    """Return a function that splits Chinese text into words."""
    if segmenter == "characters":
        return list
    try:
        import jieba  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        raise ConfigError(
            "lveval: jieba, which splits Chinese answers into words, is not installed; run `pip install jieba`, or set "
            "`segmenter: characters` under `paths` for scores that differ from LV-Eval's."
        ) from error
    jieba.setLogLevel(60)  # silence its log of loading the dictionary
    return lambda text: list(jieba.cut(text, cut_all=False))


def words_for(language: Language, blacklist: frozenset[str], segmenter: Segmenter) -> Words:
    return Words(language=language, blacklist=blacklist, cut=build_segmenter(segmenter) if language == "zh" else list)


# LV-Eval's levels count words. Words have at least 4/3 as many tokens, so a level fills the length of its name.
LEVELS = {f"{size}k": size * 1024 for size in (16, 32, 64, 128, 256)}
PATHS = {"data", "blacklist", "blacklist_en", "blacklist_zh", "segmenter", *PROMPTS}
GENERATED_QUESTIONS = 60


@dataclass(frozen=True, kw_only=True)
class ArticleQuestion:
    text: str
    answers: tuple[str, ...]
    keywords: str | None
    article: str | None  # None: generate an article as long as needed
    fact: str = ""  # sentence with the answer, for a generated article


@dataclass
class Sources:
    meter: Meter
    paths: Mapping[str, str]
    words: dict[Language, Words]
    own_blacklist: dict[Language, bool]
    segmenter: Segmenter
    wording: Wording = OWN
    _cache: dict[str, list[ArticleQuestion]] = field(default_factory=dict)

    def questions(self, task: str, length: int) -> list[ArticleQuestion]:
        path = self._file(task, length)
        name = path or f"generated {language_of(task)}"
        if name not in self._cache:
            self._cache[name] = _read_questions(path) if path else _generate_questions(language_of(task))
        return self._cache[name]

    def _file(self, task: str, length: int) -> str | None:
        """Return the file of the first level that fills the length, else of the longest. None without user files."""
        if task in self.paths:
            return self.paths[task]
        if "data" not in self.paths:
            return None
        folder = Path(self.paths["data"])
        files = {level: folder / f"{task}_{level}.jsonl" for level in LEVELS}
        present = [level for level in LEVELS if files[level].is_file()]
        if not present:
            raise ConfigError(
                f"lveval: {folder} has no {task}_<level>.jsonl (levels {', '.join(LEVELS)}); unpack LV-Eval's files "
                f"there, remove {task} from `tasks`, or set its file as {task} under `paths`."
            )
        return str(files[next((level for level in present if LEVELS[level] >= length), present[-1])])


def language_of(task: str) -> Language:
    chinese = ("multifieldqa_zh_mixup", "factrecall_zh", "cmrc_mixup", "lic_mixup", "dureader_mixup")
    return "zh" if task in chinese else "en"


def load(tokenizer: Any, paths: Mapping[str, str], wording: Wording = OWN) -> Sources:
    for name in paths:
        lookup(dict.fromkeys(sorted(PATHS)), name, kind="path of lveval")
    # The segmenter is a name, but recipes resolve all entries of `paths` to paths.
    given = Path(paths["segmenter"]).name if "segmenter" in paths else None
    lookup(dict.fromkeys(("characters", "jieba")), given or "jieba", kind="segmenter")
    # LV-Eval's files need jieba for scoring; generated questions do not.
    files = "data" in paths or any(language_of(task) == "zh" for task in PROMPTS if task in paths)
    segmenter = cast(Segmenter, given or ("jieba" if files else "characters"))
    blacklists = read_blacklists(paths)
    return Sources(
        meter=generated_world.meter(tokenizer),
        paths=dict(paths),
        words={language: words_for(language, words, segmenter) for language, (words, _) in blacklists.items()},
        own_blacklist={language: not theirs for language, (_, theirs) in blacklists.items()},
        segmenter=segmenter,
        wording=wording,
    )


def _read_questions(path: str) -> list[ArticleQuestion]:
    found = []
    for row in read_records(path):
        keywords = row.get("answer_keywords")
        found.append(
            ArticleQuestion(
                text=str(first_field(row, ("input", "question"), path)),
                answers=flatten(first_field(row, ("answers", "answer"), path)),
                keywords=None if keywords is None else str(keywords),
                article=str(first_field(row, ("context", "article"), path)),
            )
        )
    return found


def _generate_questions(language: Language) -> list[ArticleQuestion]:
    """Generate questions about founders of firms."""
    found = []
    for number in range(GENERATED_QUESTIONS):
        known = generated_world.facts(generated_world.POOL - 1 - number)
        answer = known["founder"]
        if language == "zh":
            question, fact = f"谁创办了{known['firm']}？", f"{known['firm']}由{answer}创办。"
        else:
            question, fact = f"Who founded {known['firm']}?", f"{known['firm']} was founded by {answer}."
        found.append(ArticleQuestion(text=question, answers=(answer,), keywords=answer, article=None, fact=fact))
    return found


ANSWER_TOKENS, FACT_TOKENS = 64, 16
SET_ASIDE = 500  # tokens of the context that LV-Eval leaves free
OMITTED: dict[Language, str] = {"en": "(left out)", "zh": "（略）"}  # replaces the article of a solved question


def build(task: str, answer_tokens: int, sources: Sources, ask: Ask) -> Question:
    meter, language = sources.meter, language_of(task)
    questions = sources.questions(task, ask.length)
    order = rng_for(ask.seed, "lveval order", task).permutation(len(questions))
    question = questions[int(order[ask.index % len(questions)])]
    before, after = sources.wording.around(task, input=question.text)
    prefix = sources.wording.fill(task, PREFIX)
    limit = room(ask, answer_tokens)
    if ask.mode == "reference":
        limit = min(limit, ask.length - SET_ASIDE)
    shots = _shots(task, sources, questions, question, ask, prefix) if ask.shots else ""
    before = shots + before
    used = meter.piece(before) + meter.piece(after + prefix)
    depth = spread(ask.index, float(rng_for(ask.seed, "lveval depth", task).random()))
    filling = Remembered(generated_world.filler(90_000 + 500 * ask.index + number).text + "\n" for number in count())
    blacklist = sorted(sources.words[language].blacklist)

    def build_within(budget: int) -> Question:
        return Question(
            context=before + _article(question, meter, budget - used, filling, depth),
            question=after,
            prefix=prefix,
            references=question.answers,
            depth=depth if question.article is None else None,
            meta={
                "mode": ask.mode,
                "generated": question.article is None,
                "oracle": question.answers[0],
                "keywords": question.keywords,
                "blacklist": blacklist,
                "own_blacklist": sources.own_blacklist[language],
                "segmenter": sources.segmenter,
            },
        )

    return fill(build_within, meter, limit, what=f"lveval {task}", length=ask.length)


def _shots(
    task: str,
    sources: Sources,
    questions: Sequence[ArticleQuestion],
    asked: ArticleQuestion,
    ask: Ask,
    prefix: str,
) -> str:
    """Solved questions of the same set, without their articles, which would not fit."""
    others = [one for one in questions if one.text != asked.text]
    if len(others) < ask.shots:
        raise ConfigError(
            f"lveval: {task} has {len(others)} other questions, too few for shots: {ask.shots}; use fewer."
        )
    order = rng_for(ask.seed, "lveval shots", task, ask.index).permutation(len(others))
    solved = []
    for one in (others[at] for at in order[: ask.shots].tolist()):
        before, after = sources.wording.around(task, input=one.text)
        solved.append(f"{before}{OMITTED[language_of(task)]}{after}{prefix} {one.answers[0]}\n\n")
    return "".join(solved)


def _article(question: ArticleQuestion, meter: Meter, free: int, filling: Remembered, depth: float) -> str:
    if question.article is None:
        kept = meter.take(filling, free - meter.piece(question.fact) - 1)
        kept.insert(round(depth * len(kept)), question.fact + "\n")
        return "".join(kept).rstrip()
    return meter.cut_middle(question.article, free)


def score(task: str, output: str, question: Question) -> float:
    meta = question.meta
    words = words_for(language_of(task), frozenset(meta["blacklist"]), meta["segmenter"])
    answer = question.references[0]
    if task.startswith("factrecall"):
        return plain_f1(output, answer, words)
    if task == "dureader_mixup":
        return filtered_rouge_l(output, answer, words, meta["mode"])
    return gated_f1(output, answer, meta["keywords"], words, meta["mode"])


def _task(name: str) -> Task:
    answer_tokens = FACT_TOKENS if name.startswith("factrecall") else ANSWER_TOKENS
    metrics = {"dureader_mixup": "ROUGE-L", "factrecall_en": "F1", "factrecall_zh": "F1"}
    return Task(
        name=name,
        metric=metrics.get(name, "keyword F1"),
        answer_tokens=answer_tokens,
        build=partial(build, name, answer_tokens),
        score=partial(score, name),
        size=lambda sources: len(sources.questions(name, 0)),
        stratum=lambda sources, index: index % 8,  # depths of generated articles repeat every eight indices
    )


# As in Table 2 of Untie the Knots.
CATEGORIES = {
    "single_hop": (
        "loogle_SD_mixup",
        "cmrc_mixup",
        "multifieldqa_en_mixup",
        "multifieldqa_zh_mixup",
        "factrecall_en",
        "factrecall_zh",
    ),
    "multi_hop": ("hotpotwikiqa_mixup", "loogle_CR_mixup", "loogle_MIR_mixup", "lic_mixup", "dureader_mixup"),
}


class LvEval(WordedEval):
    """LV-Eval: questions about long articles, scored by keywords and F1."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        # Untie the Knots, section 5.1.1: nine sets, 3-shot, at 32K and 128K. Base models: no chat template.
        "utk": {
            "tasks": [name for name in PROMPTS if not name.startswith("factrecall")],
            "lengths": ["32K", "128K"],
            "shots": 3,
            "chat": "off",
            "target_length": "128K",
            "reference_length": "32K",
        },
    }
    suite: Literal["lveval"]
    shots: int = Field(
        0,
        ge=0,
        le=20,
        description="Number of solved questions of the same set that precede the question, without their articles.",
    )


def _read_reference(path: Path, config: LvEval) -> Reference:
    from unspool.evals.suites import lveval_clone  # import late: it imports this module

    return lveval_clone.read(path, config)


SUITE = TaskSuite(
    name="lveval",
    title="LV-Eval",
    config=LvEval,
    version=2,
    tasks={name: _task(name) for name in PROMPTS},
    load=load,
    categories=CATEGORIES,
    has_overall=False,  # papers average over sets
    wording=FORMS,
    reference=_read_reference,
)
