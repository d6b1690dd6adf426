"""What pages call the kinds of things that recipes name: suites, strategies, packing modes.

One table per kind, keyed by the recipe's names. A table goes when the suite or strategy objects answer for themselves.
"""

from collections.abc import Callable, Mapping
from typing import Any

from unspool.core.sizes import format_size

# Suites: titles, those scored with right and wrong only, which come first, and groups of tasks.
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

# Strategies: how a model card names them, and how a summary describes their settings.
STRATEGY_TITLES = {
    "utk": "tangled (Untie the Knots)",
    "cip": "interleaved (CIP)",
    "nextlong": "with hard negatives (NExtLong)",
    "upsample": "long documents upsampled",
    "pose": "with position skips (PoSE)",
    "replace": "with synthetic tasks",
}
STRATEGY_SUMMARIES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "utk": lambda _: "tangled",
    "cip": lambda chosen: f"interleaved in {chosen.get('pieces')} pieces",
    "nextlong": lambda chosen: f"negatives after chunks of {_size(chosen.get('chunk'))}",
    "upsample": lambda chosen: f"documents from {_size(chosen.get('above'))} upsampled",
    "pose": lambda chosen: f"positions skipped up to {_size(chosen.get('target'))}",
    "replace": lambda chosen: f"a share of {chosen.get('with')}",
}
# Packing modes with a meaning for viewers: one continues documents in the next row, one pads rows at their end.
CONTINUING_MODE, PADDING_MODE = "concat", "best_fit"


def suite_title(suite: str) -> str:
    """The title of a suite or of `suite: task`."""
    name, colon, task = suite.partition(":")
    return SUITE_TITLES.get(name, name) + colon + task


def packing_mode(settings: Mapping[str, Any]) -> str:
    return str(settings.get("packing") or "")


def strategy_titles(settings: Mapping[str, Any]) -> list[str]:
    return [title for name, title in STRATEGY_TITLES.items() if settings.get(name)]


def summarize_packing(settings: Mapping[str, Any]) -> list[str]:
    """The packing mode of a dataset and its strategies, one phrase each."""
    chosen = {name: settings.get(name) for name in STRATEGY_SUMMARIES}
    phrases = [STRATEGY_SUMMARIES[name](part) for name, part in chosen.items() if isinstance(part, dict)]
    return [phrase for phrase in (packing_mode(settings), *phrases) if phrase]


def has_chunk_marks(settings: Mapping[str, Any]) -> bool:
    """Whether rows hold special tokens and labels around chunks (UTK)."""
    return bool(settings.get("utk"))


def keeps_chunk_order(settings: Mapping[str, Any]) -> bool:
    """Whether the chunks of a document keep their order within a row; NExtLong sorts them by similarity."""
    utk = settings.get("utk")
    return bool(settings.get("cip") or (isinstance(utk, dict) and utk.get("preserve_order")))


def _size(tokens: Any) -> str:
    return format_size(tokens) if isinstance(tokens, int) else str(tokens)
