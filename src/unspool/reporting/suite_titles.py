"""Titles of suites in reports. A suite brings its own; groups of tasks follow the papers' tables."""

from unspool.evals.suites import SUITES

# Titles of HELMET's categories, in the order of its tables.
HELMET_CATEGORY_TITLES = {
    "recall": "Recall",
    "rag": "RAG",
    "rerank": "Re-rank",
    "cite": "Cite",
    "longqa": "Long QA",
    "summ": "Summaries",
    "icl": "ICL",
}
# How RULER's tasks begin, grouped as in Figure 5 of Untie the Knots.
RULER_TASK_GROUPS = {"niah": "Needles", "vt": "Tracing", "cwe": "Counting", "fwe": "Counting", "qa": "Questions"}


def suite_title(suite: str) -> str:
    """The title of a suite or of `suite: task`."""
    name, colon, task = suite.partition(":")
    title = SUITES[name].title if name in SUITES else {"short": "Short tasks"}.get(name, name)
    return title + colon + task


def counts_right_answers(suite: str) -> bool:
    """Whether the scores of a suite are shares of right answers; such suites come first on the page."""
    return suite in SUITES and SUITES[suite].measure == "accuracy"
