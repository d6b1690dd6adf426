"""In-context learning: many sentences with integer labels, then one without a label.

Labels are renumbered for every test sentence, and examples are balanced over labels. Both use HELMET's seed: the
sentence's hash plus the run's seed. `fixed` fills the length and always includes an example with the right label.
`reference` uses HELMET's number of examples.
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
from unspool.evals.suites import generated_world
from unspool.evals.suites.helmet.data import DEMO, LABELS, Sources, demo_form, template_form
from unspool.evals.suites.helmet.rag import cue_of, first_line, table_count
from unspool.evals.suites.records import first_field
from unspool.evals.wording import PREFIX, Form, literal

_INSTRUCTION = (
    "The examples show which label each text has. Give the last text its label. "
    'Answer with "label: {label}" and nothing more. \n\n'
)
_FORM: Form = {
    **template_form(literal(_INSTRUCTION) + "{context}\n\n{question}\n", "label:", "question", demos=False),
    **demo_form("{text}\nlabel: {label}", "text", "label"),
}
FORMS: dict[str, Form] = dict.fromkeys(LABELS, _FORM)
ANSWER_TOKENS = 20
TESTS = 500
SPARE, LAST = 400, 20  # spare examples that fill the rest of the length; last examples that they may replace
LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
COUNTS = {
    "trec_coarse": (200, 400, 800, 1600, 3300, 6600),
    "trec_fine": (200, 400, 800, 1600, 3200, 6400),
    "banking77": (180, 360, 720, 1450, 2900, 5900),
    "clinc150": (220, 440, 880, 1750, 3525, 7050),
    "nlu": (250, 510, 1020, 2040, 4080, 8296),
}
_FIELDS = {"trec_coarse": ("coarse", "label"), "trec_fine": ("fine", "label")}
Labeled = list[tuple[str, str]]


def load_sentences(task: str, sources: Sources) -> tuple[Labeled, Labeled, bool]:
    """Return (examples, at most 500 balanced tests, True if both are generated)."""
    found: tuple[Labeled, Labeled, bool] = sources.cached(f"icl {task}", lambda: _read(task, sources))
    return found


def _read(task: str, sources: Sources) -> tuple[Labeled, Labeled, bool]:
    rows = {name: sources.records(name) for name in (task, f"{task}_demos")}
    if rows[task] is None:
        labels = LABELS[task]
        train = generated_world.labeled(task, labels, 20 * labels, "train")
        return train, generated_world.labeled(task, labels, 3 * labels, "test"), True
    fields = _FIELDS.get(task, ("label", "intent"))
    pairs: dict[str, Labeled] = {}
    for name, records in rows.items():
        if records is None:
            raise DataError(f"paths: {task} has test sentences but no examples; also set {task}_demos.")
        path = sources.paths[name]
        pairs[name] = [(str(first_field(row, ("text",), path)), str(first_field(row, fields, path))) for row in records]
    train, tests = pairs[f"{task}_demos"], pairs[task]
    known = {label for _, label in train}
    tests = [pair for pair in tests if pair[1] in known]
    if not tests:
        raise DataError(f"{sources.paths[task]}: no test sentence has a label of {sources.paths[f'{task}_demos']}.")
    return train, balance(tests, TESTS, 42) if len(tests) > TESTS else tests, False


def balance(data: Sequence[tuple[str, str]], count: int, seed: int) -> Labeled:
    """Choose balanced examples like HELMET: rounds over all labels in random order; the last round is cut."""
    rng = random.Random(seed)
    by_label: dict[str, Labeled] = {}
    for pair in data:
        by_label.setdefault(pair[1], []).append(pair)
    rounds: list[Labeled] = [[] for _ in range(math.ceil(count / len(by_label)))]
    for samples in by_label.values():
        picked = rng.sample(range(len(samples)), len(rounds) % len(samples))
        while len(picked) < len(rounds):
            picked += rng.sample(range(len(samples)), min(len(rounds) - len(picked), len(samples)))
        for pairs, at in zip(rounds, picked, strict=True):
            pairs.append(samples[at])
    for pairs in rounds:
        rng.shuffle(pairs)
    return [pair for pairs in rounds for pair in pairs][:count]


def number_labels(task: str, train: Labeled, seed: int) -> dict[str, str]:
    """Give every label a number that depends on the seed."""
    labels = _sort_labels(tuple(label for _, label in train))
    numbers = list(range(max(LABELS[task], len(labels))))
    random.Random(seed).shuffle(numbers)
    return dict(zip(labels, map(str, numbers), strict=False))


def build(task: str, sources: Sources, ask: Ask) -> Question:
    train, tests, is_generated = load_sentences(task, sources)
    meter, wording, limit = sources.meter, sources.wording, room(ask, ANSWER_TOKENS)
    text, label = tests[ask.index % len(tests)]
    seed = (int(hashlib.sha256(text.encode()).hexdigest(), 16) + ask.seed) % 2**31
    number = number_labels(task, train, seed)

    def write(pair: tuple[str, str]) -> str:
        return wording.fill(task, DEMO, text=pair[0], label=number[pair[1]])

    def size(pair: tuple[str, str]) -> int:
        # Count texts once, without labels, because labels change with every question.
        return meter.piece(pair[0]) + meter.piece(wording.fill(task, DEMO, text="", label=number[pair[1]])) + meter.gap

    mean = sum(size(pair) for pair in train[:200]) / len(train[:200])
    head, question = wording.around(task, question=text)
    prefix = wording.fill(task, PREFIX)
    used = meter.piece(head) + meter.piece(question + prefix)
    reference = ask.mode == "reference"
    counts = dict(zip(LENGTHS, COUNTS[task], strict=True))
    # Slightly more than the mean size suggests, because the first examples may be short.
    wanted = table_count(counts, ask.length) if reference else max(1, round(1.1 * limit / mean))
    drawn = balance(train, wanted, seed)
    ends = list(accumulate(map(size, drawn)))
    spare = random.Random(seed).sample(train, min(len(train), SPARE))
    by_size = {size(pair): pair for pair in spare}

    def build_within(budget: int) -> Question:
        if reference:
            shown = meter.take(map(write, drawn), budget - used, between=meter.gap)
        else:
            shown = [write(pair) for pair in fit_examples(budget - used)]
        return Question(
            context=head + "\n\n".join(shown),
            question=question,
            prefix=prefix,
            references=(f" {number[label]}",),
            meta={"mode": ask.mode, "generated": is_generated, "label": label, "shots": len(shown)},
        )

    def fit_examples(free: int) -> Labeled:
        """Choose whole examples that best fill the free tokens and include one with the right label."""
        fits = bisect_right(ends, free)
        kept, free = drawn[:fits], free - ends[fits - 1] if fits else free
        if label not in {label for _, label in kept}:
            shown = next(pair for pair in drawn + train if pair[1] == label)
            free += size(kept.pop()) - size(shown) if kept else -size(shown)
            kept.insert(0, shown)
        while fitting := [pair for pair in spare if size(pair) <= free]:
            kept.append(max(fitting, key=size))
            free -= size(kept[-1])
        # Replace some of the last examples by longer ones, to fill the remaining tokens.
        for at in range(max(0, len(kept) - LAST), len(kept)):
            longer = [new for new in by_size if 0 < new - size(kept[at]) <= free and kept[at][1] != label]
            if longer:
                free -= max(longer) - size(kept[at])
                kept[at] = by_size[max(longer)]
        random.Random(seed).shuffle(kept)
        return kept

    return fill(build_within, meter, limit, what=f"helmet {task}", length=ask.length)


@lru_cache(16)
def _sort_labels(labels: tuple[str, ...]) -> list[str]:
    """Sort the distinct labels, so that their numbers do not depend on file order."""
    return sorted(set(labels))


def score(output: str, question: Question) -> float:
    """Score only the first line. The prefix is restored, and parsing removes it again."""
    metric = exact_match_reference if question.meta["mode"] == "reference" else exact_match
    answer = parse_answer(question.prefix + first_line(output, question), cue_of(question))
    return best(metric, answer, question.references)
