"""The suite RULER: its tasks, wording, scoring and sources."""

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from unspool.evals.config import WordedEval
from unspool.evals.suite import Ask, Question, Task
from unspool.evals.suites.ruler import needles, qa, ruler_clone, tracing, word_counts
from unspool.evals.suites.ruler.fitting import TaskSpec
from unspool.evals.suites.ruler.haystacks import Sources
from unspool.evals.task_suite import TaskSuite
from unspool.evals.wording import Wording

FORMS = ruler_clone.FORMS
OWN = Wording(forms=FORMS)
_CONTROL = re.compile(r"[\x00-\x1f]")


def load(tokenizer: Any, paths: Mapping[str, str], wording: Wording = OWN) -> Sources:
    """Read the user's files immediately, so that a bad file is reported before any work."""
    sources = Sources(tokenizer, paths, wording)
    for name, attribute in (("haystack", "essay"), ("words", "words"), ("squad", "squad"), ("hotpotqa", "hotpotqa")):
        if name in paths:
            getattr(sources, attribute)
    return sources


def match_all(output: str, question: Question) -> float:
    """Return the share of references that the output contains."""
    found = _matches(output, question)
    return sum(found) / len(found)


def match_any(output: str, question: Question) -> float:
    """Return 1 if the output contains at least one reference."""
    return float(max(_matches(output, question)))


def _matches(output: str, question: Question) -> list[bool]:
    """Find each reference in the output: `reference` mode accepts substrings, `fixed` mode whole words."""
    text = _CONTROL.sub("\n", output.strip()).strip().lower()
    references = [reference.lower() for reference in question.references]
    if question.meta["mode"] == "reference":
        return [reference in text for reference in references]
    return [_contains_word(text, reference) for reference in references]


def _contains_word(text: str, word: str) -> bool:
    # Only adjacent Latin letters and digits extend a word, because other scripts may have no spaces.
    before = r"(?<![a-z0-9])" if _is_latin(word[0]) else ""
    after = r"(?![a-z0-9])" if _is_latin(word[-1]) else ""
    return re.search(before + re.escape(word) + after, text) is not None


def _is_latin(char: str) -> bool:
    return char.isascii() and char.isalnum()


def _task(spec: TaskSpec, build: Callable[[Sources, Ask], Question]) -> Task:
    return Task(
        name=spec.task,
        metric="SubEM" if spec.task in qa.FORMS else "recall",
        answer_tokens=spec.answer_tokens,
        build=build,
        score=match_any if spec.task in qa.FORMS else match_all,
        chat=True,
    )


TASKS = (
    *(_task(task.spec, task.build) for task in needles.TASKS),
    _task(tracing.VT, tracing.build),
    _task(word_counts.CWE, word_counts.build_cwe),
    _task(word_counts.FWE, word_counts.build_fwe),
    *(_task(task.spec, task.build) for task in qa.TASKS),
)


class RulerEval(WordedEval):
    """RULER: needles, variable tracing, word counting and questions at any length."""

    suite: Literal["ruler"]


SUITE = TaskSuite(
    name="ruler",
    title="RULER",
    config=RulerEval,
    version=3,
    tasks={task.name: task for task in TASKS},
    load=load,
    wording=FORMS,
    reference=ruler_clone.read,
)
