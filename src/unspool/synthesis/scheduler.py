"""Schedule conversations: estimate of the work, choice of the next job, and final balance of kinds.

The next job depends only on the seed and on the jobs finished before it, in the order of their numbers. It never
depends on speed, so a killed run continues exactly like an uninterrupted one.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil
from statistics import fmean
from typing import Any

from unspool.core.sizes import format_count
from unspool.synthesis.config import Kind, MockGenerator, ServerGenerator, SynthConfig
from unspool.synthesis.documents import Documents, Purpose, Visit
from unspool.synthesis.requests import GeneratorReplies
from unspool.synthesis.templates import Pair, TemplateChoice, Templates, TemplateUsage

# Tokens of the built-in prompts without document text, and of typical replies.
PROMPT_TOKENS, PAIR_TOKENS, SUMMARY_TOKENS = 300, 150, 220
TOKENS_PER_SECOND = 50.0  # speed of one request, before any measurement
MAX_DROPPED = 0.05  # share of tokens that balancing may drop
JournalEntry = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class KeptPair:
    """A pair of a kept `qa` conversation that a `rag` conversation can use."""

    pair: Pair
    visit: Visit
    requests: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Job:
    number: int
    kind: Kind
    visit: Visit
    choice: TemplateChoice
    max_tokens: int
    reused: KeptPair | None = None


class Scheduler:
    """Chooses the next conversation: the kind that is furthest below its share of tokens.

    With a target number of tokens, the last conversation of each kind is no longer than the missing tokens. RAG first
    uses pairs that were kept for questions, then requests new ones.
    """

    def __init__(self, config: SynthConfig, documents: Documents, templates: Templates, *, seed: int) -> None:
        self._config, self._documents = config, documents
        self._shares = config.token_shares
        self._usage = TemplateUsage(templates, seed)
        self._number = 0
        self._visited: dict[Purpose, int] = {"pairs": 0, "summaries": 0}
        self._pool: deque[KeptPair] = deque()
        self._in_flight: dict[int, tuple[Kind, float]] = {}  # job number: kind and expected tokens
        self._closed: set[Kind] = set()
        self.tokens: dict[Kind, int] = dict.fromkeys(self._shares, 0)
        self.kept: dict[Kind, int] = dict.fromkeys(self._shares, 0)
        self._first_guess = fmean(min(config.length, int(length)) for length in documents.lens)

    def next_job(self) -> Job | None:
        """The next job. None if jobs in flight must finish first, or if all work is done."""
        for kind in sorted(self._shares, key=self._progress):
            job = self._job_of(kind)
            if job is not None:
                self._in_flight[job.number] = (kind, min(self._expected_tokens(kind), job.max_tokens))
                return job
            if self._config.tokens is None and not self._waits_for_pairs(kind):
                # Without a target, no kind may continue after another kind is exhausted.
                return None
        return None

    def finish(self, job: Job, tokens: int | None, kept_pair: KeptPair | None = None) -> None:
        """Record a finished job. `tokens` is None if it was not kept. Call this in the order of job numbers."""
        del self._in_flight[job.number]
        if tokens is None:
            self._usage.release(job.kind, job.choice)
            return
        self.tokens[job.kind] += tokens
        self.kept[job.kind] += 1
        if kept_pair is not None and job.kind == "qa" and "rag" in self._shares:
            self._pool.append(kept_pair)

    def accepts(self, kind: Kind, tokens: int) -> bool:
        """True if a conversation of this length brings its kind closer to its target."""
        target = self._target(kind)
        return target is None or tokens - (target - self.tokens[kind]) <= target - self.tokens[kind]

    def close(self, kind: Kind) -> None:
        """Start no more conversations of a kind."""
        self._closed.add(kind)

    def _job_of(self, kind: Kind) -> Job | None:
        max_tokens = self._max_tokens(kind)
        if kind in self._closed or max_tokens is None:
            return None
        reused = self._pool[0] if kind == "rag" and self._pool else None
        purpose: Purpose = "summaries" if kind == "summary" else "pairs"
        visited = self._visited[purpose]
        if reused is None and (self._waits_for_pairs(kind) or visited >= self._documents.num_visits(purpose)):
            return None
        if reused is not None:
            self._pool.popleft()
            visit = reused.visit
        else:
            visit = self._documents.visit(purpose, visited)
            self._visited[purpose] += 1
        number = self._number
        self._number += 1
        choice = self._usage.choose(kind, number)
        return Job(number=number, kind=kind, visit=visit, choice=choice, max_tokens=max_tokens, reused=reused)

    def _waits_for_pairs(self, kind: Kind) -> bool:
        """True if RAG has no pair, but enough questions are in flight to provide some."""
        if kind != "rag" or self._pool or "qa" not in self._shares:
            return False
        coming = sum(other == "qa" for other, _ in self._in_flight.values())
        behind = self._progress("qa") * self._shares["rag"] - self.tokens["rag"] - self._in_flight_tokens("rag")
        return 0 < coming >= behind / self._expected_tokens("rag")

    def _max_tokens(self, kind: Kind) -> int | None:
        """Maximum tokens of the next conversation. None if others must finish first, or if enough were started."""
        target = self._target(kind)
        if target is None:
            return self._config.length
        missing = target - self.tokens[kind] - self._in_flight_tokens(kind)
        is_in_flight = any(other == kind for other, _ in self._in_flight.values())
        if missing < 2 * self._expected_tokens(kind) and is_in_flight:
            return None  # near the end, the number of missing tokens must be exact
        if missing < self._config.min_length / 2:
            return None
        return min(self._config.length, max(self._config.min_length, int(missing)))

    def _target(self, kind: Kind) -> float | None:
        return None if self._config.tokens is None else self._config.tokens * self._shares[kind]

    def _progress(self, kind: Kind) -> float:
        return (self.tokens[kind] + self._in_flight_tokens(kind)) / self._shares[kind]

    def _in_flight_tokens(self, kind: Kind) -> float:
        return sum(tokens for other, tokens in self._in_flight.values() if other == kind)

    def _expected_tokens(self, kind: Kind) -> float:
        """Mean tokens of the kept conversations of a kind."""
        return self.tokens[kind] / self.kept[kind] if self.kept[kind] else self._first_guess


def surplus(entries: Sequence[JournalEntry], config: SynthConfig) -> set[int]:
    """Numbers of conversations to drop to balance the shares, if documents ran out before the target."""
    kept = [entry for entry in entries if entry["kept"]]
    shares = config.token_shares
    tokens = {kind: sum(entry["tokens"] for entry in kept if entry["kind"] == kind) for kind in shares}
    total = min(tokens[kind] / share for kind, share in shares.items())
    dropped: set[int] = set()
    dropped_tokens = 0
    for entry in reversed(kept):
        kind = entry["kind"]
        if tokens[kind] - entry["tokens"] >= total * shares[kind]:
            tokens[kind] -= entry["tokens"]
            dropped_tokens += entry["tokens"]
            dropped.add(entry["n"])
    return dropped if dropped_tokens <= MAX_DROPPED * sum(entry["tokens"] for entry in kept) else set()


# The estimate


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Requests, cost and time of a set if everything is kept. Rejections increase them."""

    examples: dict[str, int]
    tokens: int  # tokens of all conversations
    requests: int
    prompt_tokens: int
    reply_tokens: int
    cost: float  # in the currency of the prices
    seconds: float
    measured: bool  # True if the speed was measured on earlier replies
    kept_replies: int

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.examples.items())
        cost = f", cost about {self.cost:.2f} at your prices" if self.cost else ""
        basis = "at the measured speed" if self.measured else f"at {TOKENS_PER_SECOND:.0f} tokens/s per request"
        cached = f"; {self.kept_replies} replies are cached" if self.kept_replies else ""
        return (
            f"about {sum(self.examples.values())} conversations ({kinds}), {format_count(self.tokens)} tokens: "
            f"{self.requests} requests with {format_count(self.prompt_tokens)} prompt and "
            f"{format_count(self.reply_tokens)} reply tokens{cost}, {_format_time(self.seconds)} {basis}{cached}"
        )


def estimate(config: SynthConfig, documents: Documents, replies: GeneratorReplies) -> Estimate:
    lens = [min(config.length, int(length)) for length in documents.lens]
    mean = sum(lens) / len(lens)
    sizes: dict[Kind, float] = dict.fromkeys(config.token_shares, mean)
    if "rag" in sizes:
        sizes["rag"] = min(mean, config.passages * config.chunk)
    total = min(float(config.tokens or "inf"), _available_tokens(config, documents, sizes))
    examples: dict[Kind, int] = {kind: ceil(total * share / sizes[kind]) for kind, share in config.token_shares.items()}
    pairs = max(examples.get("qa", 0), examples.get("rag", 0))
    summaries = examples.get("summary", 0)
    read = [min(length, config.length - config.generator.reply_tokens) for length in lens]
    parts = [max(1, round(length / config.summary_chunk)) for length in read]
    # Mean per summary. Every reply except the last is part of another prompt.
    per_summary = sum(num_summary_requests(count, config.summary_group) for count in parts) / len(parts)
    summary_requests = round(summaries * per_summary)
    requests = pairs + summary_requests
    prompt = pairs * (config.chunk + PROMPT_TOKENS) + summary_requests * PROMPT_TOKENS
    prompt += int(summaries * (sum(read) / len(read) + (per_summary - 1) * SUMMARY_TOKENS))
    reply = pairs * PAIR_TOKENS + summary_requests * SUMMARY_TOKENS
    generator = config.generator
    # For a local model, each reply counts only its share of the batch time.
    seconds = reply / (replies.reply_tokens / replies.seconds if replies.seconds else TOKENS_PER_SECOND)
    cost = 0.0
    if isinstance(generator, MockGenerator):
        seconds = requests * generator.seconds / generator.concurrency
    elif isinstance(generator, ServerGenerator):
        cost = (prompt * generator.price_in + reply * generator.price_out) / 1e6
        seconds /= generator.concurrency
        if generator.requests_per_minute:
            seconds = max(seconds, 60 * requests / generator.requests_per_minute)
        if generator.tokens_per_minute:
            seconds = max(seconds, 60 * (prompt + reply) / generator.tokens_per_minute)
    return Estimate(
        examples={str(kind): count for kind, count in examples.items()},
        tokens=int(total),
        requests=requests,
        prompt_tokens=prompt,
        reply_tokens=reply,
        cost=round(cost, 4),
        seconds=round(seconds, 1),
        measured=replies.reply_tokens > 0,
        kept_replies=len(replies),
    )


def num_summary_requests(parts: int, group: int) -> int:
    """Number of requests to summarize `parts` parts, joining `group` summaries at a time."""
    total = level = parts
    while level > 1:
        level = -(-level // group)
        total += level
    return total


def _available_tokens(config: SynthConfig, documents: Documents, sizes: dict[Kind, float]) -> float:
    """Tokens if all visits for questions or for summaries are used up. RAG shares the visits of questions."""
    shares = config.token_shares
    pairs: Kind = "qa" if "qa" in shares else "rag"
    ends = []
    if pairs in shares:
        ends.append(documents.num_visits("pairs") * sizes[pairs] / shares[pairs])
    if "summary" in shares:
        ends.append(documents.num_visits("summaries") * sizes["summary"] / shares["summary"])
    return min(ends)


def _format_time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
