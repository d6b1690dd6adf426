"""RULER's thirteen tasks at any length.

In: a tokenizer, and what users bring by path. Out: `SUITE`.
Elsewhere: what the modes do and how they compare with RULER's own code (docs/ruler.md).
"""

from unspool.eval.ruler import counting_words, needles, questions, tracing
from unspool.eval.ruler.scoring import match_all, match_any
from unspool.eval.ruler.sources import load
from unspool.eval.ruler.wording import FORMS
from unspool.eval.task import Suite, Task

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
        answer_tokens=counting_words.CWE.answer_tokens,
        build=counting_words.build_cwe,
        score=match_all,
        chat=True,
    ),
    Task(
        name="fwe",
        metric="recall",
        answer_tokens=counting_words.FWE.answer_tokens,
        build=counting_words.build_fwe,
        score=match_all,
        chat=True,
    ),
    *(
        Task(
            name=task.name,
            metric="SubEM",
            answer_tokens=questions.ANSWER_TOKENS,
            build=task.build,
            score=match_any,
            chat=True,
        )
        for task in questions.TASKS
    ),
)

SUITE = Suite(name="ruler", version=1, tasks={task.name: task for task in _TASKS}, load=load, wording=FORMS)
