"""What generating a set will ask, cost and take, before anything is asked.

In: the config, the documents' lengths. Out: an `Estimate`.
Price: it assumes that everything is kept and that replies have the usual lengths below; refusals add to it.
"""

from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from unspool.core.sizes import format_count
from unspool.synthesis.config import Kind, LocalGenerator, MockGenerator, ServerGenerator, SynthConfig
from unspool.synthesis.conversation import num_requests
from unspool.synthesis.documents import Documents
from unspool.synthesis.requests import Replies

# Tokens of our prompts without the text in them, and of replies as models usually give them.
PROMPT_TOKENS, PAIR_TOKENS, SUMMARY_TOKENS = 300, 150, 220
# Of one request, where nothing was measured yet.
TOKENS_PER_SECOND = 50.0


@dataclass(frozen=True, kw_only=True)
class Estimate:
    examples: dict[str, int]
    tokens: int  # of conversations
    requests: int
    prompt_tokens: int
    reply_tokens: int
    cost: float  # in the currency of the prices
    seconds: float
    measured: bool  # by replies of earlier runs
    kept_replies: int

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.examples.items())
        cost = f", about {self.cost:.2f} at your prices" if self.cost else ""
        basis = "as fast as earlier replies" if self.measured else f"at {TOKENS_PER_SECOND:.0f} tokens/s per request"
        kept = f"; {self.kept_replies} replies are there already" if self.kept_replies else ""
        return (
            f"about {sum(self.examples.values())} conversations ({kinds}), {format_count(self.tokens)} tokens: "
            f"{self.requests} requests with {format_count(self.prompt_tokens)} prompt and "
            f"{format_count(self.reply_tokens)} reply tokens{cost}, {_time(self.seconds)} {basis}{kept}"
        )


def estimate(config: SynthConfig, documents: Documents, replies: Replies) -> Estimate:
    lens = [min(config.length, int(length)) for length in documents.lens]
    mean = sum(lens) / len(lens)
    sizes: dict[Kind, float] = dict.fromkeys(config.parts, mean)
    if "rag" in sizes:
        sizes["rag"] = min(mean, config.passages * config.chunk)
    total = min(float(config.tokens or "inf"), _all_tokens(config, documents, sizes))
    examples: dict[Kind, int] = {kind: ceil(total * part / sizes[kind]) for kind, part in config.parts.items()}
    pairs = max(examples.get("qa", 0), examples.get("rag", 0))
    summaries = examples.get("summary", 0)
    read = [min(length, config.length - config.generator.reply_tokens) for length in lens]
    parts = [max(1, round(length / config.summary_chunk)) for length in read]
    # Of one summary on average; every reply but the last is read once more.
    per_summary = sum(num_requests(count, config.summary_group) for count in parts) / len(parts)
    asked = round(summaries * per_summary)
    requests = pairs + asked
    prompt = pairs * (config.chunk + PROMPT_TOKENS) + asked * PROMPT_TOKENS
    prompt += int(summaries * (sum(read) / len(read) + (per_summary - 1) * SUMMARY_TOKENS))
    reply = pairs * PAIR_TOKENS + asked * SUMMARY_TOKENS
    generator = config.generator
    cost = 0.0
    if isinstance(generator, ServerGenerator):
        cost = (prompt * generator.price_in + reply * generator.price_out) / 1e6
    return Estimate(
        examples={str(kind): count for kind, count in examples.items()},
        tokens=int(total),
        requests=requests,
        prompt_tokens=prompt,
        reply_tokens=reply,
        cost=round(cost, 4),
        seconds=round(_seconds(generator, requests, prompt, reply, replies), 1),
        measured=replies.reply_tokens > 0,
        kept_replies=len(replies),
    )


def _all_tokens(config: SynthConfig, documents: Documents, sizes: dict[Kind, float]) -> float:
    """Tokens when documents for questions, or for summaries, have all come up; RAG takes none beside questions."""
    pairs: Kind = "qa" if "qa" in config.parts else "rag"
    ends = []
    if pairs in config.parts:
        ends.append(documents.num_turns("pairs") * sizes[pairs] / config.parts[pairs])
    if "summary" in config.parts:
        ends.append(documents.num_turns("summaries") * sizes["summary"] / config.parts["summary"])
    return min(ends)


def _seconds(
    generator: ServerGenerator | LocalGenerator | MockGenerator, requests: int, prompt: int, reply: int, known: Replies
) -> float:
    rate = known.reply_tokens / known.seconds if known.seconds else TOKENS_PER_SECOND
    if isinstance(generator, MockGenerator):
        return requests * generator.seconds / generator.concurrency
    seconds = reply / rate
    # A model here counts for each reply its part of the time that several take side by side.
    if isinstance(generator, ServerGenerator):
        seconds /= generator.concurrency
        if generator.requests_per_minute:
            seconds = max(seconds, 60 * requests / generator.requests_per_minute)
        if generator.tokens_per_minute:
            seconds = max(seconds, 60 * (prompt + reply) / generator.tokens_per_minute)
    return seconds


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
