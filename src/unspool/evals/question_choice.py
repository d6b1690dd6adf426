"""Which questions of a data set are asked: evenly over strata, and by length for questions that are never cut."""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from unspool.core.errors import ConfigError
from unspool.core.progress import progress_bar
from unspool.core.rng import rng_for
from unspool.core.sizes import format_size
from unspool.evals.config import TaskEval
from unspool.evals.suite import Task


def belongs(tokens: int, length: int) -> bool:
    """Whether a question that is never cut is asked at a length: if it needs more than half of its tokens."""
    return length // 2 < tokens <= length


def strata_of(task: Task, sources: Any, indices: Iterable[int]) -> list[Hashable]:
    return [None if task.stratum is None else task.stratum(sources, at) for at in indices]


def choose_by_length(task: Task, sources: Any, config: TaskEval, *, seed: int, around: int) -> dict[int, list[int]]:
    """Choose questions for each length of an entry of `evals`.

    `around` is the number of tokens for template and answer. Raises ConfigError if a length has no question.
    """
    assert task.size is not None and task.tokens is not None, "only questions from files have a number and tokens"
    size, most = task.size(sources), max(config.lengths)
    needed = []
    with progress_bar(f"count tokens of {config.suite}", size) as advance:
        for at in range(size):
            needed.append(task.tokens(sources, at, most) + around)
            advance(1, "questions")
    found = {}
    for length in config.lengths:
        fitting = [at for at in range(size) if belongs(needed[at], length)]
        if not fitting:
            raise ConfigError(
                f"{config.suite}: none of the {size} questions needs {length // 2 + 1} to {length} tokens, answer "
                f"included; the shortest needs {min(needed)}. Remove length {format_size(length)}, or use another file."
            )
        chosen = stratified_subset(strata_of(task, sources, fitting), config.samples, seed)
        found[length] = [fitting[at] for at in chosen]
    return found


def stratified_subset(strata: Sequence[Hashable], count: int, seed: int, *, together: int = 1) -> list[int]:
    """Draw `count` indices in ascending order, as evenly over strata as their sizes allow.

    Each group of `together` consecutive indices is drawn whole or not at all, and at least one group is drawn. The
    stratum of its first index counts.
    """
    firsts = strata[::together]
    groups = _subset(firsts, max(1, count // together), seed)
    return [at for group in groups for at in range(group * together, min((group + 1) * together, len(strata)))]


def _subset(strata: Sequence[Hashable], count: int, seed: int) -> list[int]:
    if count >= len(strata):
        return list(range(len(strata)))
    order = rng_for(seed, "subset", len(strata)).permutation(len(strata)).tolist()
    seen: dict[Hashable, int] = {}
    ranked = []
    for at in order:
        # Rank within the stratum: all first elements come before all second ones.
        ranked.append((seen.setdefault(strata[at], 0), at))
        seen[strata[at]] += 1
    ranked.sort(key=lambda one: one[0])
    return sorted(at for _, at in ranked[:count])
