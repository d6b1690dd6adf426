"""Questions that are longer than the context a model claims: which they are, and what is done with them."""

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
    "ask": "asked anyway",
    "skip": "not asked",
    "truncate": "asked with the middle of the text cut out",
}
_OTHERS: dict[str, str] = {
    "ask": "skip leaves them out, truncate cuts the middle of the text",
    "skip": "truncate cuts the middle of the text, ask sends them as they are",
    "truncate": "skip leaves them out, ask sends them as they are",
}


def resolve(evals: Sequence[EvalConfig], backend: Backend) -> list[EvalConfig]:
    """Give every entry with such questions its policy, and None to the others.

    By default they are asked, since how a model extrapolates is worth knowing, but not on a server, which refuses them.
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
            "such questions are skipped; use shorter lengths, or `beyond_context='truncate'` or `beyond_context='ask'`."
        )
    return found


def facts(evals: Sequence[EvalConfig], context: ContextLimit | None) -> dict[str, Any] | None:
    """What summary.json says about such questions; None if there are none. `evals` come from `resolve`."""
    policies = {config.suite: config.beyond_context for config in evals if config.beyond_context is not None}
    if context is None or not policies:
        return None
    return {"context": context.tokens, "source": context.source, "policies": policies}


def notice(found: Mapping[str, Any], questions: Mapping[int, int], total: int) -> str:
    """The sentences printed before the first prompt; `questions` counts those beyond the context, by length."""
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
        f"tokens ({found['source']}): those at {lengths}. They are {done} and marked in the results; "
        f"`beyond_context`: {_OTHERS[policies[0]]}"
    )


def _suites(found: Mapping[str, Any], policy: str) -> list[str]:
    return [suite for suite, chosen in found["policies"].items() if chosen == policy]


def mark_cells(cells: Sequence[Cell], found: Mapping[str, Any] | None) -> list[Cell]:
    """Add `beyond_context` to cells of lengths, or of positions, beyond the context."""
    if found is None:
        return list(cells)

    def is_beyond(cell: Cell) -> bool:
        # Losses are measured by position, and those inside the context do not depend on what follows.
        return cell["suite"] in found["policies"] and int(cell.get("to") or cell["length"]) > found["context"]

    return [{**cell, "beyond_context": found["policies"][cell["suite"]]} if is_beyond(cell) else cell for cell in cells]


def footnote(found: Mapping[str, Any], policy: str) -> str:
    return f"longer than the model's context of {found['context']} tokens ({found['source']}): {DONE[policy]}"
