"""Similarity retrieval: many entries, and a query that is closest to one of them by a countable measure.

Notes share words with the query, records differ from it in one field, codes differ from it in few letters. Exactly one
entry is closest, and others are nearly as close.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np

from unspool.data.sources.synthetic.draft import Builder, Draft, Question, lines_like, numbers, pick, shuffled_words

NOTE_WORDS = 8
CHANGED_WORDS = (1, 3)  # words of a query
FAMILY = 3  # number of entries that share words
FIELDS = ("owner", "town", "colour", "tool", "fruit")
CODE_LETTERS = "ABCDEFGH"
CODE_LEN = 10
MOST_CHANGED = 3  # letters of a code

OPENINGS = (
    "The entries below can look alike; read them with care.",
    "A register of entries follows.",
    "Every entry has a number by which it can be named.",
    "Here are the entries of a catalogue, in no particular order.",
    "Look at these entries; afterwards some of them have to be found again.",
    "Entries from an old ledger:",
)
IDS = ("Entry {id}: {content}", "No. {id}: {content}", "[{id}] {content}", "{id} | {content}", "({id}) {content}")

NOTE_QUERIES = (
    'Which entry shares the most words with "{content}"?',
    'Which entry is closest to "{content}", counted by the words that both have?',
    'Find the entry that has more words of "{content}" than any other.',
)
NOTE_COUNTS = (
    'How many words of "{content}" does entry {id} have?',
    'Counting the words that both have, how much does entry {id} share with "{content}"?',
)
RECORD_QUERIES = (
    "Which entry differs from ({content}) in exactly one field?",
    "One entry agrees with ({content}) in all fields but one; which is it?",
    "Which entry is the same as ({content}), apart from a single field?",
)
RECORD_FIELDS = ("In which field does entry {id} differ from ({content})?",)
CODE_QUERIES = (
    "Which entry differs from {content} in the fewest letters?",
    "Comparing letter by letter, which entry is closest to {content}?",
    "Find the entry that has most letters in the same places as {content}.",
)
CODE_COUNTS = ("In how many letters does entry {id} differ from {content}?",)
LINE = lines_like(IDS, id="[0-9]+", content=".*")


def choose(style: np.random.Generator) -> Builder:
    build = pick(style, (_notes, _records, _codes))
    return partial(build, pick(style, OPENINGS), pick(style, IDS), shuffled_words(style))


def _notes(opening: str, wording: str, known: list[str], rng: np.random.Generator, num: int) -> Draft:
    count = -(-num // FAMILY)
    seeds = _distinct_rows(rng, count, NOTE_WORDS, len(known))
    notes = np.repeat(seeds, FAMILY, axis=0)[:num]
    fresh = _distinct_rows(rng, num, NOTE_WORDS, len(known))
    # A family member keeps the first half of its family's words, unless its own words include one of them.
    half = NOTE_WORDS // 2
    clash = (fresh[:, half:, None] == notes[:, None, :half]).any(axis=(1, 2))
    related = ~clash & (np.arange(num) % FAMILY > 0)
    notes = np.where(related[:, None], np.concatenate([notes[:, :half], fresh[:, half:]], axis=1), fresh)
    notes = rng.permuted(notes[rng.permutation(num)], axis=1)
    ids = numbers(rng, num, smallest=1000).tolist()
    table = [[known[at] for at in row] for row in notes.tolist()]
    facts = [wording.format(id=id, content=" ".join(row)) for id, row in zip(ids, table, strict=True)]
    return Draft(opening, facts, _note_questions(ids, notes, known, rng))


def _note_questions(
    ids: list[int], notes: np.ndarray, known: list[str], rng: np.random.Generator
) -> Iterator[Question]:
    while True:
        target = int(rng.integers(len(notes)))
        query = notes[target].copy()
        places = rng.choice(NOTE_WORDS, size=int(rng.integers(CHANGED_WORDS[0], CHANGED_WORDS[1] + 1)), replace=False)
        wanted = np.zeros(len(known), dtype=np.int8)
        wanted[query] = 1
        query[places] = rng.choice(np.flatnonzero(wanted == 0), size=len(places), replace=False)
        wanted[:] = 0
        wanted[query] = 1
        shared = wanted[notes].sum(axis=1)
        query_text = " ".join(known[at] for at in rng.permuted(query).tolist())
        if rng.random() < 0.2:
            yield Question(pick(rng, NOTE_COUNTS).format(content=query_text, id=ids[target]), str(shared[target]))
        elif (shared == shared.max()).sum() == 1:
            yield Question(pick(rng, NOTE_QUERIES).format(content=query_text), str(ids[int(shared.argmax())]))


def _records(opening: str, wording: str, known: list[str], rng: np.random.Generator, num: int) -> Draft:
    # Few values, but enough that most records differ in two fields.
    values = int(np.clip(2 * num**0.4, 6, len(known) // len(FIELDS)))
    spelled = [[f"{field} {word}" for word in known[at :: len(FIELDS)][:values]] for at, field in enumerate(FIELDS)]
    records = rng.integers(values, size=(num, len(FIELDS)))
    ids = numbers(rng, num, smallest=1000).tolist()
    facts = [
        wording.format(id=id, content=_spell(spelled, record)) for id, record in zip(ids, records.tolist(), strict=True)
    ]
    return Draft(opening, facts, _record_questions(ids, records, spelled, rng))


def _spell(spelled: list[list[str]], record: list[int]) -> str:
    return ", ".join([values[at] for values, at in zip(spelled, record, strict=True)])


def _record_questions(
    ids: list[int], records: np.ndarray, spelled: list[list[str]], rng: np.random.Generator
) -> Iterator[Question]:
    num_fields, num_values = len(FIELDS), len(spelled[0])
    while True:
        target = int(rng.integers(len(records)))
        field = int(rng.integers(num_fields))
        query = records[target].copy()
        query[field] = (query[field] + rng.integers(1, num_values)) % num_values
        query_text = _spell(spelled, query.tolist())
        agree = (records == query).sum(axis=1)
        if rng.random() < 0.2:
            yield Question(pick(rng, RECORD_FIELDS).format(content=query_text, id=ids[target]), FIELDS[field])
        elif (agree >= num_fields - 1).sum() == 1:
            yield Question(pick(rng, RECORD_QUERIES).format(content=query_text), str(ids[target]))


def _codes(opening: str, wording: str, known: list[str], rng: np.random.Generator, num: int) -> Draft:
    letters = np.frombuffer(CODE_LETTERS.encode(), dtype=np.uint8)
    codes = letters[rng.integers(len(letters), size=(num, CODE_LEN))]
    ids = numbers(rng, num, smallest=1000).tolist()
    texts = codes.tobytes().decode()
    facts = [wording.format(id=id, content=texts[at * CODE_LEN : (at + 1) * CODE_LEN]) for at, id in enumerate(ids)]
    return Draft(opening, facts, _code_questions(ids, codes, letters, rng))


def _code_questions(
    ids: list[int], codes: np.ndarray, letters: np.ndarray, rng: np.random.Generator
) -> Iterator[Question]:
    while True:
        target = int(rng.integers(len(codes)))
        query = codes[target].copy()
        places = rng.choice(CODE_LEN, size=int(rng.integers(1, MOST_CHANGED + 1)), replace=False)
        query[places] = letters[
            (query[places] - letters[0] + rng.integers(1, len(letters), len(places))) % len(letters)
        ]
        query_text = query.tobytes().decode()
        differ = (codes != query).sum(axis=1)
        if rng.random() < 0.2:
            yield Question(pick(rng, CODE_COUNTS).format(content=query_text, id=ids[target]), str(differ[target]))
        elif (differ == differ.min()).sum() == 1:
            yield Question(pick(rng, CODE_QUERIES).format(content=query_text), str(ids[int(differ.argmin())]))


def _distinct_rows(rng: np.random.Generator, num: int, width: int, size: int) -> np.ndarray:
    """Draw rows of `width` different numbers below `size`; rows with duplicates are drawn again."""
    rows = rng.integers(size, size=(num, width))
    while True:
        ordered = np.sort(rows, axis=1)
        again = (ordered[:, 1:] == ordered[:, :-1]).any(axis=1)
        if not again.any():
            return rows
        rows[again] = rng.integers(size, size=(int(again.sum()), width))
