"""Compare the answers that a document states with those that the task's solver works out.

In: a task's name and a document's text. Out: the first disagreement in words, or None.
Promise: answers are compared letter by letter, and a text that cannot be solved is a disagreement too.
"""

from unspool.core.config import lookup
from unspool.data.sources.synthetic import TASKS
from unspool.data.sources.synthetic.solvers.reading import UnsolvableError, read_parts


def check(task: str, text: str) -> str | None:
    try:
        solved = lookup(TASKS, task, kind="task").solve(text)
        _, questions, stated = read_parts(text)
    except UnsolvableError as problem:
        return f"it cannot be solved: {problem}"
    for question, said, solution in zip(questions, stated, solved, strict=True):
        if said != solution.answer:
            return f"{question!r} is answered {said!r}, and {solution.answer!r} is right"
    return None


def verify(task: str, text: str, name: str) -> None:
    """Stop at a wrong document: it would be our mistake, never the user's."""
    problem = check(task, text)
    if problem is not None:
        raise AssertionError(f"document {name}: {problem}")
