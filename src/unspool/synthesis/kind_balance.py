"""Which conversation is begun next, so that the kinds have their shares of tokens in the end.

In: what was finished so far, and what is under way. Out: a `Job`, or None where one has to wait or all is done.
Promise: the next job follows from the seed and the jobs that were finished, in the order of their numbers, alone: not
from how fast anything was, so that a run that was killed goes on as it would have. The kind that is furthest behind
its share comes next. With a number of tokens, the last of each kind is made no longer than what is missing.
RAG takes pairs that were kept for questions before it asks for pairs of its own.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from unspool.synthesis.config import Kind, SynthConfig
from unspool.synthesis.documents import Documents, Purpose, Turn
from unspool.synthesis.generator_prompts import Pair
from unspool.synthesis.journal import Line
from unspool.synthesis.templates import Chosen, Templates, Uses


@dataclass(frozen=True, kw_only=True)
class Known:
    """A pair that was kept, and what it is about."""

    pair: Pair
    turn: Turn
    requests: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Job:
    number: int
    kind: Kind
    turn: Turn
    chosen: Chosen
    room: int  # most tokens
    known: Known | None = None  # the pair, where it need not be asked for


class Schedule:
    def __init__(self, config: SynthConfig, documents: Documents, templates: Templates, *, seed: int) -> None:
        self._config, self._documents = config, documents
        self._parts = config.parts
        self._uses = Uses(templates, seed)
        self._least_room = config.least_length
        self._number = 0
        self._cursors: dict[Purpose, int] = {"pairs": 0, "summaries": 0}
        self._pool: deque[Known] = deque()
        self._flying: dict[int, tuple[Kind, float]] = {}
        self._closed: set[Kind] = set()
        self.tokens: dict[Kind, int] = dict.fromkeys(self._parts, 0)
        self.kept: dict[Kind, int] = dict.fromkeys(self._parts, 0)
        self._first_guess = fmean(min(config.length, int(length)) for length in documents.lens)

    def _turns_left(self, kind: Kind) -> int:
        purpose = _purpose(kind)
        return self._documents.num_turns(purpose) - self._cursors[purpose]

    def next_job(self) -> Job | None:
        for kind in sorted(self._parts, key=self._progress):
            job = self._job_of(kind)
            if job is not None:
                self._flying[job.number] = (kind, min(self._guess(kind), job.room))
                return job
            if self._config.tokens is None and not self._waits_for_pairs(kind):
                # Without a number to reach, others must not run ahead of one that cannot go on.
                return None
        return None

    def settle(self, job: Job, tokens: int | None, known: Known | None = None) -> None:
        """A job is finished; `tokens` are None where it was not kept. Must be told in the order of numbers."""
        del self._flying[job.number]
        if tokens is None:
            self._uses.give_back(job.kind, job.chosen)
            return
        self.tokens[job.kind] += tokens
        self.kept[job.kind] += 1
        if known is not None and job.kind == "qa" and "rag" in self._parts:
            self._pool.append(known)

    def accepts(self, kind: Kind, tokens: int) -> bool:
        """Whether a finished conversation brings its kind nearer to its tokens."""
        target = self._target(kind)
        return target is None or tokens - (target - self.tokens[kind]) <= target - self.tokens[kind]

    def close(self, kind: Kind) -> None:
        """Begin no more of a kind."""
        self._closed.add(kind)

    def _job_of(self, kind: Kind) -> Job | None:
        room = self._room(kind)
        if kind in self._closed or room is None:
            return None
        known = self._pool[0] if kind == "rag" and self._pool else None
        if known is None and (self._waits_for_pairs(kind) or not self._turns_left(kind)):
            return None
        number = self._number
        self._number += 1
        if known is not None:
            self._pool.popleft()
            turn = known.turn
        else:
            purpose = _purpose(kind)
            turn = self._documents.turn(purpose, self._cursors[purpose])
            self._cursors[purpose] += 1
        chosen = self._uses.choose(kind, number)
        return Job(number=number, kind=kind, turn=turn, chosen=chosen, room=room, known=known)

    def _waits_for_pairs(self, kind: Kind) -> bool:
        """RAG has no pair, and questions are under way that may give as many as it needs to catch up with them."""
        if kind != "rag" or self._pool or "qa" not in self._parts:
            return False
        coming = sum(flying == "qa" for flying, _ in self._flying.values())
        behind = self._progress("qa") * self._parts["rag"] - self.tokens["rag"] - self._flying_tokens("rag")
        return 0 < coming >= behind / self._guess("rag")

    def _room(self, kind: Kind) -> int | None:
        """Most tokens of the next one; None if it has to wait for others under way, or enough are."""
        target = self._target(kind)
        if target is None:
            return self._config.length
        missing = target - self.tokens[kind] - self._flying_tokens(kind)
        is_flying = any(flying == kind for flying, _ in self._flying.values())
        if missing < 2 * self._guess(kind) and is_flying:
            return None  # near the end it must be known what is missing
        if missing < self._least_room / 2:
            return None
        return min(self._config.length, max(self._least_room, int(missing)))

    def _target(self, kind: Kind) -> float | None:
        return None if self._config.tokens is None else self._config.tokens * self._parts[kind]

    def _progress(self, kind: Kind) -> float:
        return (self.tokens[kind] + self._flying_tokens(kind)) / self._parts[kind]

    def _flying_tokens(self, kind: Kind) -> float:
        return sum(tokens for flying, tokens in self._flying.values() if flying == kind)

    def _guess(self, kind: Kind) -> float:
        """Tokens of one of a kind, by those that were kept."""
        return self.tokens[kind] / self.kept[kind] if self.kept[kind] else self._first_guess


def _purpose(kind: Kind) -> Purpose:
    return "summaries" if kind == "summary" else "pairs"


# Bring the shares of kinds right where documents ended before the tokens did.


MOST = 0.05


def balanced(lines: Sequence[Line], config: SynthConfig) -> set[int]:
    kept = [line for line in lines if line["kept"]]
    tokens = {kind: sum(line["tokens"] for line in kept if line["kind"] == kind) for kind in config.parts}
    whole = min(tokens[kind] / part for kind, part in config.parts.items())
    dropped: set[int] = set()
    given_up = 0
    for line in reversed(kept):
        kind = line["kind"]
        if tokens[kind] - line["tokens"] >= whole * config.parts[kind]:
            tokens[kind] -= line["tokens"]
            given_up += line["tokens"]
            dropped.add(line["n"])
    return dropped if given_up <= MOST * sum(line["tokens"] for line in kept) else set()
