"""Bring the shares of kinds right where documents ended before the tokens did.

In: the lines of a journal. Out: numbers of the last conversations of kinds that have too much.
Price: at most `MOST` of all tokens are given up; where more would have to go, the shares stay as they are, and the
counts say so.
"""

from collections.abc import Sequence

from unspool.synth.config import SynthConfig
from unspool.synth.journal import Line

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
