"""RULER's thirteen tasks at any length.

In: a tokenizer, and what users bring by path. Out: `SUITE`.
Elsewhere: what the modes do and how they compare with RULER's own code (docs/ruler.md).
"""

from typing import Literal

from unspool.evals.config import WordedEval
from unspool.evals.suite import Task
from unspool.evals.suites.ruler import needles, qa, tracing, word_counts
from unspool.evals.suites.ruler.haystacks import load
from unspool.evals.suites.ruler.task_texts import FORMS, match_all, match_any
from unspool.evals.task_suite import TaskSuite


class RulerEval(WordedEval):
    """RULER: needles, variable tracing, word counting and questions at any length."""

    suite: Literal["ruler"]


_TASKS = (
    *(
        Task(
            name=task.name,
            metric="recall",
            answer_tokens=needles.ANSWER_TOKENS,
            build=task.build,
            score=match_all,
            chat=True,
        )
        for task in needles.TASKS
    ),
    Task(
        name="vt",
        metric="recall",
        answer_tokens=tracing.PLACE.answer_tokens,
        build=tracing.build,
        score=match_all,
        chat=True,
    ),
    Task(
        name="cwe",
        metric="recall",
        answer_tokens=word_counts.CWE.answer_tokens,
        build=word_counts.build_cwe,
        score=match_all,
        chat=True,
    ),
    Task(
        name="fwe",
        metric="recall",
        answer_tokens=word_counts.FWE.answer_tokens,
        build=word_counts.build_fwe,
        score=match_all,
        chat=True,
    ),
    *(
        Task(
            name=task.name,
            metric="SubEM",
            answer_tokens=qa.ANSWER_TOKENS,
            build=task.build,
            score=match_any,
            chat=True,
        )
        for task in qa.TASKS
    ),
)

SUITE = TaskSuite(
    name="ruler",
    title="RULER",
    config=RulerEval,
    version=1,
    tasks={task.name: task for task in _TASKS},
    load=load,
    wording=FORMS,
)
