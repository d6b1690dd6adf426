"""JSON-KV: an object of UUIDs, two examples, one key to look up.

In: sources, an `Ask`. Out: `Question`. `fixed` fills the length and spreads the key's depth evenly over indices;
`reference` takes HELMET's number of keys for the length and a random one of them.
"""

import uuid

import numpy as np

from unspool.core.rng import rng_for
from unspool.evals.fill import fill, room, spread
from unspool.evals.scoring.answers import raw_or_parsed, sub_em, sub_em_reference
from unspool.evals.suite import Ask, Question
from unspool.evals.suites.helmet.datasets import Sources
from unspool.evals.suites.helmet.instructions import DEMO
from unspool.evals.suites.helmet.rag import first_line, table_count
from unspool.evals.wording import PREFIX

TASK = "json_kv"
ANSWER_TOKENS = 100
SHOTS, FEWEST = 2, 4
COUNTS = {4096: 50, 8192: 105, 16384: 220, 32768: 440, 65536: 900, 131072: 1800}


def uuids(rng: np.random.Generator, count: int) -> list[str]:
    raw = rng.bytes(16 * count)
    return [str(uuid.UUID(bytes=raw[at : at + 16], version=4)) for at in range(0, len(raw), 16)]


def entry(key: str, value: str) -> str:
    return f'"{key}": "{value}"'


def build(sources: Sources, ask: Ask) -> Question:
    meter, wording, limit = sources.meter, sources.wording, room(ask, ANSWER_TOKENS)
    sizes = sum(meter.count(f" {entry(*uuids(rng_for(0, 'helmet size', at), 2))},\n") for at in range(8)) / 8
    sample = "-".join(uuids(rng_for(0, "helmet size"), 8))
    letters = len(sample) / meter.count(sample)  # of a token
    fixed = meter.count(wording.after_context(TASK)) + (SHOTS + 1) * sizes
    start = float(rng_for(ask.seed, "helmet depth", "json_kv").random())

    def pairs(count: int) -> list[tuple[str, str]]:
        drawn = uuids(rng_for(ask.seed, "helmet json_kv", ask.length, ask.index), 2 * count)
        return list(zip(drawn[::2], drawn[1::2], strict=True))

    def asked(budget: int) -> Question:
        count = table_count(COUNTS, ask.length)
        lengthened = 0
        if ask.mode == "fixed":
            # One pair less than would fit, and a value longer by what that leaves: letters come in smaller steps.
            free = budget - fixed
            count = max(FEWEST, min(int((limit - fixed) / sizes) - 1, int(free / sizes)))
            lengthened = max(0, int((free - count * sizes) * letters))
        known = pairs(count)
        rng = rng_for(ask.seed, "helmet json_kv asked", ask.length, ask.index)
        depth = spread(ask.index, start) if ask.mode == "fixed" else float(rng.random())
        at = min(count - 1, int(depth * count))
        others = [number for number in range(count) if number != at]
        shown = [known[number] for number in rng.permutation(others)[: SHOTS + 1]]
        # What is left of the length goes into one value that nobody asks for and no example shows.
        longer = _more(shown[-1][1], lengthened)
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

    return fill(asked, meter, limit, what="helmet json_kv", length=ask.length)


def _more(value: str, letters: int) -> str:
    """The value with its own letters again."""
    return value + (value * (1 + letters // len(value)))[:letters]


def score(output: str, asked: Question) -> float:
    mode = asked.meta["mode"]
    metric = sub_em_reference if mode == "reference" else sub_em
    return raw_or_parsed(metric, first_line(output, asked), asked.references, asked.prefix, mode)
