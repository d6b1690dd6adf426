"""Handle questions longer than the context that a model claims."""

from collections.abc import Mapping, Sequence
from typing import Any

from unspool.core.errors import ConfigError
from unspool.core.formatting import join_words
from unspool.core.sizes import format_size
from unspool.evals.backends.base import Backend, ContextLimit
from unspool.evals.config import BeyondContext, EvalConfig
from unspool.evals.suite import Cell
from unspool.evals.suites import suite_of

DONE: dict[str, str] = {
    "ask": "run anyway",
    "skip": "skipped",
    "truncate": "run with the middle of the text cut out",
}
_OTHERS: dict[str, str] = {
    "ask": "skip omits them, truncate cuts the middle of the text",
    "skip": "truncate cuts the middle of the text, ask runs them in full",
    "truncate": "skip omits them, ask runs them in full",
}


def resolve(evals: Sequence[EvalConfig], backend: Backend) -> list[EvalConfig]:
    """Set the policy of every entry with such questions, and None for the other entries.

    By default, local models run them, to measure extrapolation. Servers refuse them, so they are skipped there.
    """
    default: BeyondContext = "skip" if backend.kind == "openai" else "ask"
    context = backend.context_limit
    found = []
    for config in evals:
        is_beyond = context is not None and max(suite_of(config).lengths(config)) > context.tokens
        policy = (config.beyond_context or default) if is_beyond else None
        found.append(config.model_copy(update={"beyond_context": policy}))
    if context is not None and all(
        config.beyond_context == "skip" and min(suite_of(config).lengths(config)) > context.tokens for config in found
    ):
        raise ConfigError(
            f"every question is longer than the model's context of {context.tokens} tokens ({context.source}), and "
            "such questions are skipped; use shorter lengths, or `beyond_context` with truncate or ask."
        )
    return found


def facts(evals: Sequence[EvalConfig], context: ContextLimit | None) -> dict[str, Any] | None:
    """Entry of summary.json about such questions; None if there are none. `evals` come from `resolve`."""
    policies = {config.suite: config.beyond_context for config in evals if config.beyond_context is not None}
    if context is None or not policies:
        return None
    return {"context": context.tokens, "source": context.source, "policies": policies}


def notice(found: Mapping[str, Any], questions: Mapping[int, int], total: int) -> str:
    """Notice printed before the first prompt. `questions` counts questions beyond the context by length."""
    lengths = join_words([format_size(length) for length in questions])
    policies = list(dict.fromkeys(found["policies"].values()))
    done = join_words(
        [
            DONE[policy] if len(policies) == 1 else f"{DONE[policy]} ({', '.join(_suites(found, policy))})"
            for policy in policies
        ]
    )
    return (
        f"{sum(questions.values())} of {total} questions are longer than the model's context of {found['context']} "
        f"tokens ({found['source']}), at lengths {lengths}. They are {done} and marked in the results. "
        f"Other settings of `beyond_context`: {_OTHERS[policies[0]]}"
    )


def _suites(found: Mapping[str, Any], policy: str) -> list[str]:
    return [suite for suite, chosen in found["policies"].items() if chosen == policy]


def mark_cells(cells: Sequence[Cell], found: Mapping[str, Any] | None) -> list[Cell]:
    """Add `beyond_context` to cells of lengths or positions beyond the context."""
    if found is None:
        return list(cells)

    def is_beyond(cell: Cell) -> bool:
        # Losses are measured by position. Losses inside the context do not depend on later tokens.
        return cell["suite"] in found["policies"] and int(cell.get("to") or cell["length"]) > found["context"]

    return [{**cell, "beyond_context": found["policies"][cell["suite"]]} if is_beyond(cell) else cell for cell in cells]


def footnote(found: Mapping[str, Any], policy: str) -> str:
    return f"longer than the model's context of {found['context']} tokens ({found['source']}): {DONE[policy]}"
