"""JSON-KV: a JSON object of UUIDs, two examples, and one key to look up.

`fixed` fills the length and spreads the key's depth evenly over indices. `reference` uses HELMET's number of keys for
the length and a random key.
"""

import uuid

import numpy as np

from unspool.core.rng import rng_for
from unspool.evals.fill import fill, room, spread
from unspool.evals.suite import Ask, Question
from unspool.evals.suites.helmet.data import DEMO, Sources, demo_form, template_form
from unspool.evals.suites.helmet.rag import table_count
from unspool.evals.wording import PREFIX, Form

_INSTRUCTION = "Look up the key that is asked for in the JSON object and give the value that belongs to it."
FORMS: dict[str, Form] = {
    "json_kv": {
        **template_form(
            f"JSON data:\n{{context}}\n\n{_INSTRUCTION}\n\n{{demos}}Key: {{question}}\n",
            "Corresponding value:",
            "question",
        ),
        **demo_form("Key: {question}\nCorresponding value: {answer}\n\n", "question", "answer"),
    }
}
TASK = "json_kv"
ANSWER_TOKENS = 100
SHOTS, FEWEST = 2, 4
COUNTS = {4096: 50, 8192: 105, 16384: 220, 32768: 440, 65536: 900, 131072: 1800}


def uuids(rng: np.random.Generator, count: int) -> list[str]:
    raw = rng.bytes(16 * count)
    return [str(uuid.UUID(bytes=raw[at : at + 16], version=4)) for at in range(0, len(raw), 16)]


def uuid_pairs(rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
    drawn = uuids(rng, 2 * count)
    return list(zip(drawn[::2], drawn[1::2], strict=True))


def entry(key: str, value: str) -> str:
    return f'"{key}": "{value}"'


def lengthen(value: str, chars: int) -> str:
    """Append `chars` characters to a value by repeating it."""
    return value + (value * (1 + chars // len(value)))[:chars]


def build(sources: Sources, ask: Ask) -> Question:
    meter, wording, limit = sources.meter, sources.wording, room(ask, ANSWER_TOKENS)
    tokens_per_pair = sum(meter.count(f" {entry(*uuids(rng_for(0, 'helmet size', at), 2))},\n") for at in range(8)) / 8
    sample = "-".join(uuids(rng_for(0, "helmet size"), 8))
    chars_per_token = len(sample) / meter.count(sample)
    fixed = meter.count(wording.after_context(TASK)) + (SHOTS + 1) * tokens_per_pair
    start = float(rng_for(ask.seed, "helmet depth", "json_kv").random())

    def build_within(budget: int) -> Question:
        count = table_count(COUNTS, ask.length)
        extra_chars = 0
        if ask.mode == "fixed":
            # Use one pair less than fits. A longer value fills the rest, because characters are finer steps.
            free = budget - fixed
            count = max(FEWEST, min(int((limit - fixed) / tokens_per_pair) - 1, int(free / tokens_per_pair)))
            extra_chars = max(0, int((free - count * tokens_per_pair) * chars_per_token))
        known = uuid_pairs(rng_for(ask.seed, "helmet json_kv", ask.length, ask.index), count)
        rng = rng_for(ask.seed, "helmet json_kv asked", ask.length, ask.index)
        depth = spread(ask.index, start) if ask.mode == "fixed" else float(rng.random())
        at = min(count - 1, int(depth * count))
        others = [number for number in range(count) if number != at]
        shown = [known[number] for number in rng.permutation(others)[: SHOTS + 1]]
        # Lengthen a value that neither the question nor an example uses.
        longer = lengthen(shown[-1][1], extra_chars)
        text = ",\n ".join(entry(key, longer if key == shown[-1][0] else value) for key, value in known)
        examples = "".join(wording.fill(TASK, DEMO, question=key, answer=value) for key, value in shown[:SHOTS])
        before, after = wording.around(TASK, demos=examples, question=known[at][0])
        return Question(
            context=f"{before}{{{text}}}",
            question=after,
            prefix=wording.fill(TASK, PREFIX),
            references=(f" {known[at][1]}",),
            depth=at / (count - 1),
            meta={"mode": ask.mode, "generated": True, "keys": count},
        )

    return fill(build_within, meter, limit, what="helmet json_kv", length=ask.length)
