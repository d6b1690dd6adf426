"""The suite HELMET: its tasks, and how they are built and scored.

A category is the mean of its tasks. The overall score is the mean of the seven categories.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from unspool.core.config import lookup
from unspool.core.errors import ConfigError
from unspool.evals.benchmark_copy import Reference
from unspool.evals.config import Lengths, TaskEval, WordedEval
from unspool.evals.suite import Ask, Cell, Question, Sample, Task
from unspool.evals.suites import generated_world, ruler
from unspool.evals.suites.helmet import alce, books, icl, json_kv, rag, rerank
from unspool.evals.suites.helmet.data import BOOKS, CITE, LABELS, PATHS, RAG, Sources
from unspool.evals.summary import average_over
from unspool.evals.task_suite import TaskSuite
from unspool.evals.wording import Form, Wording

# HELMET's needle tasks are RULER's, with fewer answer tokens and no chat template.
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
# The tasks of ProLong's evaluation (Table 13). A category is the mean of its scored tasks.
PROLONG = ("json_kv", "nq", "hotpotqa", "popqa", "msmarco", *LABELS, "narrativeqa", "multi_lexsum")
PROLONG_MARKED = ("json_kv", "narrativeqa", "multi_lexsum")
HOTPOT_DEPTHS, DEPTHS = 3, 6
# Depths of consecutive indices repeat every eight (`spread`), in reference mode every six or three.
STRATA = 24
Build = Callable[[Sources, Ask], Question]
Score = Callable[[str, Question], float]


def load(tokenizer: Any, paths: Mapping[str, str], wording: Wording = OWN) -> Sources:
    for name in paths:
        lookup(dict.fromkeys(sorted(PATHS)), name, kind="path of helmet")
    return Sources(tokenizer=tokenizer, meter=generated_world.meter(tokenizer), paths=dict(paths), wording=wording)


def _build_needle(name: str, sources: Sources, ask: Ask) -> Question:
    task = ruler.SUITE.tasks[name]
    paths = {key: path for key, path in sources.paths.items() if key == "haystack"}
    wording = sources.wording.of(ruler.SUITE.wording)
    ruler_sources = sources.cached("ruler", lambda: ruler.SUITE.load(sources.tokenizer, paths, wording))
    # RULER reserves more answer tokens than HELMET.
    overhead = ask.overhead + NEEDLE_ANSWER_TOKENS[name] - task.answer_tokens
    question = task.build(ruler_sources, replace(ask, overhead=overhead))
    return replace(question, meta={**question.meta, "mode": ask.mode, "generated": "haystack" not in paths})


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


def _with_passages(
    name: str, metric: str, answer_tokens: int, build: Build, score: Score, *, chat: bool = False
) -> Task:
    return Task(
        name=name,
        metric=metric,
        answer_tokens=answer_tokens,
        build=build,
        score=score,
        chat=chat,
        size=lambda sources: len(sources.qa(name).items),
        stratum=_depth_stratum,
    )


def _rag(name: str) -> Task:
    depths = HOTPOT_DEPTHS if name == "hotpotqa" else DEPTHS
    return _with_passages(name, "SubEM", rag.ANSWER_TOKENS, partial(rag.build, name, depths), rag.score)


def _cite(name: str) -> Task:
    metric, score = ("str_em", alce.score_asqa) if name == "asqa" else ("recall@5", alce.score_qampari)
    return _with_passages(name, metric, alce.ANSWER_TOKENS, partial(alce.build, name), score, chat=True)


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
MSMARCO = _with_passages("msmarco", "nDCG@10", rerank.ANSWER_TOKENS, partial(rerank.build, "msmarco"), rerank.score)
TASKS: dict[str, Task] = {
    "json_kv": JSON_KV,
    **{name: _needle(name) for name in NEEDLE_ANSWER_TOKENS},
    **{name: _rag(name) for name in RAG},
    "msmarco": MSMARCO,
    **{name: _cite(name) for name in CITE},
    **{name: _book(name) for name in BOOKS},
    **{name: _icl(name) for name in LABELS},
}


class HelmetEval(WordedEval):
    """HELMET: recall, RAG, re-ranking, citations, long-document QA, summaries, many-shot classification."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        # ProLong, Table 13: six categories, averaged over 32K and 64K in the ablations (Tables 4 to 8 and 18 to 22).
        "prolong": {"tasks": list(PROLONG), "lengths": ["32K", "64K"]},
        # The final model: Table 10 adds 128K.
        "prolong-128k": {"tasks": list(PROLONG), "lengths": ["32K", "64K", "128K"]},
        # Tables 8, 22 and 24: the tasks with a dagger. The average also covers the other tasks at 32K and 64K, which
        # an entry with the preset prolong or prolong-128k scores.
        "prolong-512k": {
            "tasks": list(PROLONG_MARKED),
            "lengths": ["512K"],
            "average_of": {task: ["512K"] if task in PROLONG_MARKED else ["32K", "64K"] for task in PROLONG},
        },
    }
    suite: Literal["helmet"]
    average_of: dict[str, Lengths] = Field(
        {},
        description="Lengths that each task's average covers, by task; they may belong to other entries. Default: all "
        "lengths of this entry.",
    )

    @field_validator("average_of")
    @classmethod
    def _check_average(cls, average_of: dict[str, list[int]]) -> dict[str, list[int]]:
        for name in average_of:
            try:
                lookup(TASKS, name, kind="average_of: task of helmet")
            except ConfigError as error:
                raise ValueError(str(error).rstrip(".")) from error
        return average_of


def _read_reference(path: Path, config: WordedEval) -> Reference:
    from unspool.evals.suites.helmet import helmet_clone  # import late: it imports this module

    return helmet_clone.read(path, config)


class HelmetSuite(TaskSuite):
    def summary(self, config: TaskEval, cells: Sequence[Cell], samples: Sequence[Sample]) -> dict[str, Any]:
        found = super().summary(config, cells, samples)
        if not isinstance(config, HelmetEval) or not config.average_of:
            return found
        return {**found, "average": average_over(self.name, self.categories, config.average_of, cells)}


SUITE = HelmetSuite(
    name="helmet",
    title="HELMET",
    config=HelmetEval,
    version=3,
    tasks=TASKS,
    load=load,
    categories=CATEGORIES,
    wording=FORMS,
    reference=_read_reference,
)
