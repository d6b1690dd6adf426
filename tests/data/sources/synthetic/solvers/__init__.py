"""One solver per task: it reads a document's text alone and computes every answer in its own way."""

from unspool.core.config import lookup

from . import attributes, hops, similarity, sorting, states
from .reading import UnsolvableError, read_parts

SOLVERS = {
    "sorting": sorting.solve,
    "hops": hops.solve,
    "states": states.solve,
    "similar": similarity.solve,
    "attributes": attributes.solve,
}


def check(task: str, text: str) -> str | None:
    """Compare the answers that a document states with the solver's, letter by letter; returns the first difference."""
    try:
        solved = lookup(SOLVERS, task, kind="task")(text)
        _, questions, stated = read_parts(text)
    except UnsolvableError as problem:
        return f"it cannot be solved: {problem}"
    for question, said, solution in zip(questions, stated, solved, strict=True):
        if said != solution.answer:
            return f"{question!r} is answered {said!r}, and {solution.answer!r} is right"
    return None
