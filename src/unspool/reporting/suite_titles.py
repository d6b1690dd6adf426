"""What the report calls suites and groups of their tasks, keyed by the recipe's names.

These tables go when the suite objects answer for themselves.
"""

SUITE_TITLES = {
    "niah": "Needle recall",
    "key_value": "Key-value recall",
    "perplexity": "Loss",
    "ruler": "RULER",
    "helmet": "HELMET",
    "lveval": "LV-Eval",
    "infbench": "∞Bench",
    "nocha": "Claims about books",
    "short": "Short tasks",
}
RIGHT_OR_WRONG_SUITES = ("niah", "key_value")
FIRST_SUITES = ("niah", "key_value")
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
    return SUITE_TITLES.get(name, name) + colon + task
