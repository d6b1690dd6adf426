"""HELMET as a `Suite`: which tasks there are, how each is built and scored.

A category is the mean of its tasks, the overall score the mean of the seven categories.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from unspool.evals.suite import Ask, Question, Suite, Task
from unspool.evals.suites import ruler
from unspool.evals.suites.helmet import alce, books, data, icl, json_kv, rag, rerank
from unspool.evals.suites.helmet.data import BOOKS, CITE, LABELS, RAG, Sources
from unspool.evals.wording import Form, Wording

# HELMET's needle tasks are RULER's, with fewer tokens for the answer and never through the chat template.
NEEDLE_ANSWER_TOKENS = {"niah_multikey_2": 50, "niah_multikey_3": 100, "niah_multivalue": 50}
FORMS: dict[str, Form] = {
    **json_kv.FORMS,
    **{name: ruler.SUITE.wording[name] for name in NEEDLE_ANSWER_TOKENS},
    **rag.FORMS,
    **rerank.FORMS,
    **alce.FORMS,
    **books.FORMS,
    **icl.FORMS,
}
OWN = Wording(forms=FORMS)
CATEGORIES: dict[str, tuple[str, ...]] = {
    "recall": ("json_kv", *NEEDLE_ANSWER_TOKENS),
    "rag": RAG,
    "rerank": ("msmarco",),
    "cite": CITE,
    "longqa": ("narrativeqa", "infbench_qa", "infbench_mc"),
    "summ": ("infbench_sum", "multi_lexsum"),
    "icl": tuple(LABELS),
}
HOTPOT_DEPTHS, DEPTHS = 3, 6
# Depths of consecutive indices repeat after eight (`spread`), in reference mode after six or three.
STRATA = 24


def load(tokenizer: Any, paths: Mapping[str, str], wording: Wording = OWN) -> Sources:
    return data.load(tokenizer, paths, wording)


def _build_needle(name: str, sources: Sources, ask: Ask) -> Question:
    task = ruler.SUITE.tasks[name]
    paths = {key: path for key, path in sources.paths.items() if key == "haystack"}
    wording = sources.wording.of(ruler.SUITE.wording)
    ruler_sources = sources.cached("ruler", lambda: ruler.SUITE.load(sources.tokenizer, paths, wording))
    # RULER reserves more tokens for the answer than HELMET does.
    overhead = ask.overhead + NEEDLE_ANSWER_TOKENS[name] - task.answer_tokens
    asked = task.build(ruler_sources, replace(ask, overhead=overhead))
    return replace(asked, meta={**asked.meta, "mode": ask.mode, "generated": "haystack" not in paths})


def _needle(name: str) -> Task:
    return Task(
        name=name,
        metric="recall",
        answer_tokens=NEEDLE_ANSWER_TOKENS[name],
        build=partial(_build_needle, name),
        score=ruler.SUITE.tasks[name].score,
    )


def _depth_stratum(sources: Sources, index: int) -> int:
    return index % STRATA


def _rag(name: str) -> Task:
    return Task(
        name=name,
        metric="SubEM",
        answer_tokens=rag.ANSWER_TOKENS,
        build=partial(rag.build, name, HOTPOT_DEPTHS if name == "hotpotqa" else DEPTHS),
        score=rag.score,
        size=lambda sources: len(sources.qa(name).items),
        stratum=_depth_stratum,
    )


def _cite(name: str) -> Task:
    return Task(
        name=name,
        metric="str_em" if name == "asqa" else "recall@5",
        answer_tokens=alce.ANSWER_TOKENS,
        build=partial(alce.build, name),
        score=alce.score_asqa if name == "asqa" else alce.score_qampari,
        chat=True,
        size=lambda sources: len(sources.qa(name).items),
        stratum=_depth_stratum,
    )


def _book(name: str) -> Task:
    scorers = {"infbench_qa": books.score_qa, "infbench_mc": books.score_choice}
    metrics = {"infbench_qa": "ROUGE-L", "infbench_mc": "accuracy"}
    return Task(
        name=name,
        metric=metrics.get(name, "judge"),
        answer_tokens=books.ANSWER_TOKENS[name],
        build=partial(books.build, name),
        score=scorers.get(name, books.left_to_judge),
        chat=True,
        size=lambda sources: len(books.books(name, sources)),
        stratum=_depth_stratum,
        judge=None if name in scorers else "summary" if name in books.SUMMARIES else "qa",
    )


def _icl(name: str) -> Task:
    return Task(
        name=name,
        metric="accuracy",
        answer_tokens=icl.ANSWER_TOKENS,
        build=partial(icl.build, name),
        score=icl.score,
        size=lambda sources: len(icl.load_sentences(name, sources)[1]),
        stratum=lambda sources, index: icl.load_sentences(name, sources)[1][index][1],
    )


JSON_KV = Task(
    name="json_kv", metric="SubEM", answer_tokens=json_kv.ANSWER_TOKENS, build=json_kv.build, score=rag.score
)
MSMARCO = Task(
    name="msmarco",
    metric="nDCG@10",
    answer_tokens=rerank.ANSWER_TOKENS,
    build=partial(rerank.build, "msmarco"),
    score=rerank.score,
    size=lambda sources: len(sources.qa("msmarco").items),
    stratum=_depth_stratum,
)
TASKS: dict[str, Task] = {
    "json_kv": JSON_KV,
    **{name: _needle(name) for name in NEEDLE_ANSWER_TOKENS},
    **{name: _rag(name) for name in RAG},
    "msmarco": MSMARCO,
    **{name: _cite(name) for name in CITE},
    **{name: _book(name) for name in BOOKS},
    **{name: _icl(name) for name in LABELS},
}
SUITE = Suite(name="helmet", version=1, tasks=TASKS, load=load, categories=CATEGORIES, wording=FORMS)
