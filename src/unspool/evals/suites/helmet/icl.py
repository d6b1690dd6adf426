"""Many-shot classification: sentences with integer labels, then one without.

In: sources, an `Ask`. Out: `Question`. Labels are reshuffled for every test sentence and examples balanced over labels,
with HELMET's seed of both: the sentence's hash plus the run's seed. `fixed` fills the length and shows the asked
label even where there are fewer examples than labels; `reference` takes HELMET's number of examples.
"""

import hashlib
import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from unspool.core.errors import DataError
from unspool.evals.fill import fill, room
from unspool.evals.scoring.answers import best, exact_match, exact_match_reference, parse_answer
from unspool.evals.suite import Ask, Question
from unspool.evals.suites.helmet import generated
from unspool.evals.suites.helmet.datasets import LABELS, Sources
from unspool.evals.suites.helmet.instructions import DEMO
from unspool.evals.suites.helmet.rag import first_line, table_count
from unspool.evals.suites.helmet.records import one_of
from unspool.evals.wording import PREFIX

ANSWER_TOKENS = 20
TESTS = 500
SPARE, LAST = 400, 20  # examples among which one is sought that fills what is left; those it may stand in for
_LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
COUNTS = {
    "trec_coarse": (200, 400, 800, 1600, 3300, 6600),
    "trec_fine": (200, 400, 800, 1600, 3200, 6400),
    "banking77": (180, 360, 720, 1450, 2900, 5900),
    "clinc150": (220, 440, 880, 1750, 3525, 7050),
    "nlu": (250, 510, 1020, 2040, 4080, 8296),
}
_FIELDS = {"trec_coarse": ("coarse", "label"), "trec_fine": ("fine", "label")}
Labelled = list[tuple[str, str]]


def sentences(task: str, sources: Sources) -> tuple[Labelled, Labelled, bool]:
    """Examples, tests (at most 500, balanced), and whether they are generated."""
    found: tuple[Labelled, Labelled, bool] = sources.once(f"icl {task}", lambda: _read(task, sources))
    return found


def _read(task: str, sources: Sources) -> tuple[Labelled, Labelled, bool]:
    rows = {name: sources.records(name) for name in (task, f"{task}_demos")}
    if rows[task] is None:
        labels = LABELS[task]
        train = generated.labelled(task, labels, 20 * labels, "train")
        return train, generated.labelled(task, labels, 3 * labels, "test"), True
    fields = _FIELDS.get(task, ("label", "intent"))
    pairs: dict[str, Labelled] = {}
    for name, records in rows.items():
        if records is None:
            raise DataError(f"paths: {task} has test sentences but no examples; give {task}_demos as well.")
        path = sources.paths[name]
        pairs[name] = [(str(one_of(row, ("text",), path)), str(one_of(row, fields, path))) for row in records]
    train, tests = pairs[f"{task}_demos"], pairs[task]
    known = {label for _, label in train}
    tests = [pair for pair in tests if pair[1] in known]
    if not tests:
        raise DataError(f"{sources.paths[task]}: no test sentence has a label of {sources.paths[f'{task}_demos']}.")
    return train, balanced(tests, TESTS, 42) if len(tests) > TESTS else tests, False


def balanced(data: Sequence[tuple[str, str]], count: int, seed: int) -> Labelled:
    """HELMET's choice: rounds of all labels, each in random order, the last cut."""
    rng = random.Random(seed)
    by_label: dict[str, Labelled] = {}
    for pair in data:
        by_label.setdefault(pair[1], []).append(pair)
    rounds: list[Labelled] = [[] for _ in range(math.ceil(count / len(by_label)))]
    for samples in by_label.values():
        picked = rng.sample(range(len(samples)), len(rounds) % len(samples))
        while len(picked) < len(rounds):
            picked += rng.sample(range(len(samples)), min(len(rounds) - len(picked), len(samples)))
        for one, at in zip(rounds, picked, strict=True):
            one.append(samples[at])
    for one in rounds:
        rng.shuffle(one)
    return [pair for one in rounds for pair in one][:count]


def numbered(task: str, train: Labelled, seed: int) -> dict[str, str]:
    """An integer for every label, another for each seed."""
    labels = label_order(tuple(label for _, label in train))
    numbers = list(range(max(LABELS[task], len(labels))))
    random.Random(seed).shuffle(numbers)
    return dict(zip(labels, map(str, numbers), strict=False))


def build(task: str, sources: Sources, ask: Ask) -> Question:
    train, tests, is_generated = sentences(task, sources)
    meter, wording, limit = sources.meter, sources.wording, room(ask, ANSWER_TOKENS)
    text, label = tests[ask.index % len(tests)]
    seed = (int(hashlib.sha256(text.encode()).hexdigest(), 16) + ask.seed) % 2**31
    number = numbered(task, train, seed)

    def written(pair: tuple[str, str]) -> str:
        return wording.fill(task, DEMO, text=pair[0], label=number[pair[1]])

    def size(pair: tuple[str, str]) -> int:
        # Text and label apart: labels change with every question, texts are counted once.
        return meter.piece(pair[0]) + meter.piece(wording.fill(task, DEMO, text="", label=number[pair[1]])) + meter.gap

    mean = sum(size(pair) for pair in train[:200]) / len(train[:200])
    head, question = wording.around(task, question=text)
    cue = wording.fill(task, PREFIX)
    used = meter.piece(head) + meter.piece(question + cue)
    reference = ask.mode == "reference"
    named = dict(zip(_LENGTHS, COUNTS[task], strict=True))
    # A little more than the mean says, as the first ones may be short.
    wanted = table_count(named, ask.length) if reference else max(1, round(1.1 * limit / mean))
    drawn = balanced(train, wanted, seed)
    ends = list(accumulate(map(size, drawn)))
    spare = random.Random(seed).sample(train, min(len(train), SPARE))
    by_size = {size(pair): pair for pair in spare}

    def asked(budget: int) -> Question:
        if reference:
            shown = meter.take(map(written, drawn), budget - used, between=meter.gap)
        else:
            shown = [written(pair) for pair in fitted(budget - used)]
        return Question(
            context=head + "\n\n".join(shown),
            question=question,
            prefix=cue,
            references=(f" {number[label]}",),
            meta={"mode": ask.mode, "generated": is_generated, "label": label, "shots": len(shown)},
        )

    def fitted(free: int) -> Labelled:
        """Whole examples within the room, the asked label among them; the last ones are those that fill it best."""
        fits = bisect_right(ends, free)
        kept, free = drawn[:fits], free - ends[fits - 1] if fits else free
        if label not in {label for _, label in kept}:
            shown = next(pair for pair in drawn + train if pair[1] == label)
            free += size(kept.pop()) - size(shown) if kept else -size(shown)
            kept.insert(0, shown)
        while fitting := [pair for pair in spare if size(pair) <= free]:
            kept.append(max(fitting, key=size))
            free -= size(kept[-1])
        # What is still left goes to longer ones in place of some of the last.
        for at in range(max(0, len(kept) - LAST), len(kept)):
            longer = [new for new in by_size if 0 < new - size(kept[at]) <= free and kept[at][1] != label]
            if longer:
                free -= max(longer) - size(kept[at])
                kept[at] = by_size[max(longer)]
        random.Random(seed).shuffle(kept)
        return kept

    return fill(asked, meter, limit, what=f"helmet {task}", length=ask.length)


@lru_cache(16)
def label_order(labels: tuple[str, ...]) -> list[str]:
    """All labels, so that a label's number before shuffling does not hang on the order of a file."""
    return sorted(set(labels))


def score(output: str, asked: Question) -> float:
    """Only the parsed line counts here; `reference` puts the cue back first, which parsing takes away again."""
    metric = exact_match_reference if asked.meta["mode"] == "reference" else exact_match
    return best(metric, parse_answer(asked.prefix + first_line(output, asked), asked.prefix), asked.references)
