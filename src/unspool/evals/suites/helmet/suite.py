"""HELMET as a `Suite`: which tasks there are, how each is built and scored.

A category is the mean of its tasks, the whole the mean of the seven (`category_means`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Literal

from unspool.evals.config import WordedEval
from unspool.evals.suite import Ask, Question, Task
from unspool.evals.suites import ruler
from unspool.evals.suites.helmet import alce, books, icl, json_kv, rag, rerank
from unspool.evals.suites.helmet.datasets import BOOKS, CITE, LABELS, RAG, Sources, load
from unspool.evals.suites.helmet.instructions import FORMS
from unspool.evals.task_suite import TaskSuite


class HelmetEval(WordedEval):
    """HELMET: recall, RAG, re-ranking, citations, long questions, summaries, many-shot labels."""

    suite: Literal["helmet"]


# HELMET's three needle tasks: RULER's, with less room for the answer and never through the chat template.


ANSWER_TOKENS = {"niah_multikey_2": 50, "niah_multikey_3": 100, "niah_multivalue": 50}


def build(name: str, sources: Sources, ask: Ask) -> Question:
    task = ruler.SUITE.tasks[name]
    paths = {key: path for key, path in sources.paths.items() if key == "haystack"}
    wording = sources.wording.of(ruler.SUITE.wording)
    theirs = sources.once("ruler", lambda: ruler.SUITE.load(sources.tokenizer, paths, wording))
    # RULER keeps more room for an answer than HELMET lets it have.
    asked = task.build(theirs, replace(ask, overhead=ask.overhead + ANSWER_TOKENS[name] - task.answer_tokens))
    return replace(asked, meta={**asked.meta, "mode": ask.mode, "generated": "haystack" not in paths})


VERSION = 1
CATEGORIES: dict[str, tuple[str, ...]] = {
    "recall": ("json_kv", *ANSWER_TOKENS),
    "rag": RAG,
    "rerank": ("msmarco",),
    "cite": CITE,
    "longqa": ("narrativeqa", "infbench_qa", "infbench_mc"),
    "summ": ("infbench_sum", "multi_lexsum"),
    "icl": tuple(LABELS),
}
HOTPOT_DEPTHS, DEPTHS = 3, 6


def category_means(means: Mapping[str, float | None]) -> dict[str, float | None]:
    """From means by task to those of the categories and `overall`; what lacks a task is None."""
    found = {name: _mean([means.get(task) for task in tasks]) for name, tasks in CATEGORIES.items()}
    return {**found, "overall": _mean(list(found.values()))}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None


# Depths of consecutive indices go round in eighths (`spread`), in reference mode in sixths or thirds.
STRATA = 24


def _by_depth(sources: Sources, index: int) -> int:
    return index % STRATA


def _num_questions(task: str) -> Callable[[Sources], int]:
    return lambda sources: len(sources.qa(task).items)


def _rag(name: str) -> Task:
    depths = HOTPOT_DEPTHS if name == "hotpotqa" else DEPTHS
    return Task(
        name=name,
        metric="SubEM",
        answer_tokens=rag.ANSWER_TOKENS,
        build=partial(rag.build, name, depths),
        score=rag.score,
        size=_num_questions(name),
        stratum=_by_depth,
    )


def _needle(name: str) -> Task:
    return Task(
        name=name,
        metric="recall",
        answer_tokens=ANSWER_TOKENS[name],
        build=partial(build, name),
        score=ruler.SUITE.tasks[name].score,
    )


def _cite(name: str) -> Task:
    return Task(
        name=name,
        metric="str_em" if name == "asqa" else "recall@5",
        answer_tokens=alce.ANSWER_TOKENS,
        build=partial(alce.build, name),
        score=alce.score_asqa if name == "asqa" else alce.score_qampari,
        chat=True,
        size=_num_questions(name),
        stratum=_by_depth,
    )


def _book(name: str) -> Task:
    scorers = {"infbench_qa": books.score_qa, "infbench_mc": books.score_choice}
    metrics = {"infbench_qa": "ROUGE-L", "infbench_mc": "accuracy"}
    summary = name in books.SUMMARIES
    return Task(
        name=name,
        metric=metrics.get(name, "judge"),
        answer_tokens=books.ANSWER_TOKENS[name],
        build=partial(books.build, name),
        score=scorers.get(name, books.judged),
        chat=True,
        size=lambda sources: len(books.books(name, sources)),
        stratum=_by_depth,
        judge=None if name in scorers else "summary" if summary else "qa",
    )


def _icl(name: str) -> Task:
    return Task(
        name=name,
        metric="accuracy",
        answer_tokens=icl.ANSWER_TOKENS,
        build=partial(icl.build, name),
        score=icl.score,
        size=lambda sources: len(icl.sentences(name, sources)[1]),
        stratum=lambda sources, index: icl.sentences(name, sources)[1][index][1],
    )


JSON_KV = Task(
    name="json_kv", metric="SubEM", answer_tokens=json_kv.ANSWER_TOKENS, build=json_kv.build, score=json_kv.score
)
MSMARCO = Task(
    name="msmarco",
    metric="nDCG@10",
    answer_tokens=rerank.ANSWER_TOKENS,
    build=partial(rerank.build, "msmarco"),
    score=rerank.score,
    size=_num_questions("msmarco"),
    stratum=_by_depth,
)
TASKS: dict[str, Task] = {
    "json_kv": JSON_KV,
    **{name: _needle(name) for name in ANSWER_TOKENS},
    **{name: _rag(name) for name in RAG},
    "msmarco": MSMARCO,
    **{name: _cite(name) for name in CITE},
    **{name: _book(name) for name in BOOKS},
    **{name: _icl(name) for name in LABELS},
}
SUITE = TaskSuite(
    name="helmet",
    title="HELMET",
    config=HelmetEval,
    version=VERSION,
    tasks=TASKS,
    load=load,
    categories=CATEGORIES,
    wording=FORMS,
)
