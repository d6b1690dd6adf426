"""NoCha-style claims: one task with two prompts per pair of a true and a false claim.

Users provide `pairs`, a JSONL file with `true`, `false`, and `text` or `text_path` (the book, relative to the file).
Without it, pairs are generated. Indices 2i and 2i+1 are the two claims of pair i, in random order. A score says whether
one verdict is right; `scoring.ranking.pair_accuracy` counts pairs. A text that is too long is cut at its end
(`meta["cut"]`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal

from unspool.core.config import lookup
from unspool.core.errors import DataError
from unspool.core.rng import rng_for
from unspool.evals.config import TaskEval
from unspool.evals.fill import Meter, Remembered, fill, room, spread
from unspool.evals.scoring.ranking import parse_verdict
from unspool.evals.suite import Ask, Question, Task
from unspool.evals.suites import generated_world
from unspool.evals.suites.helmet.books import text_blocks
from unspool.evals.suites.records import first_field, read_records
from unspool.evals.task_suite import TaskSuite

ANSWER_TOKENS = 16
HEAD = "You are given a text and a claim about it. Decide from the text alone whether the claim is true or false.\n\n"
PREFIX = "The claim is"
GENERATED_PAIRS = 60


@dataclass(frozen=True, kw_only=True)
class Pair:
    true: str
    false: str
    text: str | None  # None: generate a text
    fact: str = ""  # passage that decides a generated pair


@dataclass(frozen=True)
class Sources:
    meter: Meter
    pairs: list[Pair]


def load(tokenizer: Any, paths: Mapping[str, str]) -> Sources:
    for name in paths:
        lookup({"pairs": None}, name, kind="path of nocha")
    pairs = _read_pairs(paths["pairs"]) if "pairs" in paths else [_generate_pair(at) for at in range(GENERATED_PAIRS)]
    return Sources(generated_world.meter(tokenizer), pairs)


def _read_pairs(path: str) -> list[Pair]:
    found = []
    for row in read_records(path):
        text = row.get("text")
        if not text:
            file = Path(path).parent / str(first_field(row, ("text_path", "text"), path))
            try:
                text = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise DataError(
                    f"{path}, record {row.get('_line')}: text_path cannot be read ({error}); correct the path."
                ) from error
        true, false = (str(first_field(row, (name,), path)) for name in ("true", "false"))
        found.append(Pair(true=true, false=false, text=str(text)))
    return found


def _generate_pair(number: int) -> Pair:
    known, other = (generated_world.facts(generated_world.POOL - 200 - at) for at in (number, number + GENERATED_PAIRS))
    claim = "{firm} was founded by {founder}."
    return Pair(
        true=claim.format(**known),
        false=claim.format(firm=known["firm"], founder=other["founder"]),
        text=None,
        fact=generated_world.firm(generated_world.POOL - 200 - number).text + "\n\n",
    )


def build(sources: Sources, ask: Ask) -> Question:
    meter = sources.meter
    number = ask.index // 2 % len(sources.pairs)
    pair = sources.pairs[number]
    true_first = bool(rng_for(ask.seed, "nocha", number).integers(2))
    is_true = true_first == (ask.index % 2 == 0)
    questions = {claim: f"\n\nClaim: {claim}\nAnswer true or false.\n" for claim in (pair.true, pair.false)}
    # Both claims get the context that fits the longer claim, so that backends read it once.
    longer = max(questions.values(), key=lambda question: meter.piece(question + PREFIX))
    used = meter.piece(HEAD) + meter.piece(longer + PREFIX)
    depth = spread(ask.index // 2, float(rng_for(ask.seed, "nocha depth").random()))
    blocks = Remembered(
        text_blocks(pair.text)
        if pair.text is not None
        else (generated_world.filler(130_000 + 500 * number + at).text + "\n\n" for at in count())
    )

    def build_within(budget: int) -> Question:
        kept = meter.take(blocks, budget - used - meter.piece(pair.fact))
        cut = pair.text is not None and sum(map(len, kept)) < len(pair.text)
        if pair.text is None:
            kept.insert(round(depth * len(kept)), pair.fact)
        return Question(
            context=HEAD + "".join(kept).rstrip(),
            question=longer,
            prefix=PREFIX,
            references=(" true" if is_true else " false",),
            depth=depth if pair.text is None else None,
            meta={"mode": ask.mode, "generated": pair.text is None, "pair": number, "cut": cut},
        )

    filled = fill(build_within, meter, room(ask, ANSWER_TOKENS), what="nocha claims", length=ask.length)
    return replace(filled, question=questions[pair.true if is_true else pair.false])


def score(output: str, question: Question) -> float:
    verdict = parse_verdict(output)
    return float(verdict is not None and verdict == (question.references[0].strip() == "true"))


CLAIMS = Task(
    name="claims",
    metric="accuracy",
    answer_tokens=ANSWER_TOKENS,
    build=build,
    score=score,
    size=lambda sources: 2 * len(sources.pairs),
    together=2,
)


class NochaEval(TaskEval):
    """NoCha: pairs of a true and a false claim about a whole book, from the user's file."""

    suite: Literal["nocha"]


SUITE = TaskSuite(
    name="nocha", title="Claims about books", config=NochaEval, version=1, tasks={"claims": CLAIMS}, load=load
)
