"""Titles of suites, HELMET's categories and groups of RULER's tasks in reports."""

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
# RULER's task name prefixes, grouped as in Figure 5 of Untie the Knots.
RULER_TASK_GROUPS = {"niah": "Needles", "vt": "Tracing", "cwe": "Counting", "fwe": "Counting", "qa": "Questions"}


def suite_title(suite: str) -> str:
    """Title of a suite or of `suite: task`; the name itself if the suite is not registered."""
    name, colon, task = suite.partition(":")
    title = SUITES[name].title if name in SUITES else name
    return title + colon + task


def measure_of(suite: str) -> str:
    """What a suite measures: accuracy, score or loss. Tasks and unregistered suites have a score."""
    return SUITES[suite].measure if suite in SUITES else "score"
