"""Read SQuAD and HotpotQA in common formats, or generate questions for use without them.

Documents are sorted and unique. Questions keep file order, as in RULER.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from unspool.core.errors import DataError
from unspool.core.rng import rng_for
from unspool.evals.suites.records import Record, read_records

ORIGIN = "generated"
Parsed = TypeVar("Parsed")


@dataclass(frozen=True, kw_only=True)
class Query:
    question: str
    answers: tuple[str, ...]
    golds: tuple[int, ...]  # numbers of the documents with the answer
    context: tuple[int, ...]  # documents that RULER always shows, including gold ones
    more: tuple[int, ...] = ()  # other documents of the same article


@dataclass(frozen=True)
class QuestionSet:
    documents: list[str]
    queries: list[Query]
    origin: str  # "generated", or the name of the file


@dataclass(frozen=True)
class RawQuestion:
    """One question with its documents as text."""

    question: str
    answers: Sequence[str]
    golds: Sequence[str]
    context: Sequence[str]
    article: str = ""
    siblings: Sequence[str] = ()  # all documents of the article, if the file lists them


def read_squad(path: str) -> QuestionSet:
    """Read SQuAD: released JSON, or rows with the Hub's fields or with `answers` as a list."""
    raw = _parse(path, "validation", "SQuAD", "context, question, answers", _squad_rows)
    return index_documents([row for rows in raw for row in rows], Path(path).name)


def read_hotpotqa(path: str, pool: str | None = None) -> QuestionSet:
    """Read HotpotQA: released JSON, rows with the Hub's fields, or rows with `gold` documents.

    `pool` is a file of further documents.
    """
    raw = list(_parse(path, "validation", "HotpotQA", "question, answer, context or gold", _hotpotqa_row))
    extra = _parse(pool, "train", "HotpotQA pool", "title, text", _document) if pool else ()
    return index_documents(raw, Path(path).name, extra)


def _parse(path: str, split: str, kind: str, fields: str, parse: Callable[[Record], Parsed]) -> Iterator[Parsed]:
    for record in read_records(path, split=split):
        try:
            yield parse(record)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise DataError(
                f"ruler: {path}, record {record['_line']}: not a {kind} record ({type(error).__name__}: {error}); "
                f"expected fields: {fields}, as in the released files or on the Hub."
            ) from error


def index_documents(raw: Sequence[RawQuestion], origin: str, extra: Iterable[str] = ()) -> QuestionSet:
    """Number the documents and drop questions without an answer."""
    answerable = [row for row in raw if any(row.answers)]
    if not answerable:
        raise DataError(f"ruler: {origin} has no question with an answer; use another file.")
    found = {*extra, *(text for row in raw for text in row.context)}
    documents = sorted(found)
    number = {text: at for at, text in enumerate(documents)}
    articles: dict[str, dict[int, None]] = {}
    for row in raw:
        articles.setdefault(row.article, {}).update(dict.fromkeys(number[text] for text in row.context))
    queries = []
    for row in answerable:
        context = tuple(number[text] for text in row.context)
        siblings = [number[text] for text in row.siblings] if row.siblings else list(articles[row.article])
        more = tuple(at for at in siblings if at not in context) if row.article else ()
        golds = tuple(number[text] for text in row.golds)
        answers = tuple(answer for answer in row.answers if answer)
        queries.append(Query(question=row.question, answers=answers, golds=golds, context=context, more=more))
    return QuestionSet(documents, queries, origin)


def _with_title(title: str, text: str) -> str:
    return f"{title}\n{text}"


def _squad_rows(record: Record) -> list[RawQuestion]:
    if "paragraphs" in record:
        return _released_squad(record)
    answers = record["answers"]
    texts = answers["text"] if isinstance(answers, Mapping) else answers
    text = record["context"]
    return [RawQuestion(record["question"], list(texts), (text,), (text,), record.get("title") or "")]


def _released_squad(article: Record) -> list[RawQuestion]:
    found = []
    every = [paragraph["context"] for paragraph in article["paragraphs"]]
    for at, paragraph in enumerate(article["paragraphs"]):
        text = paragraph["context"]
        # A paragraph without questions is still a document.
        found += [RawQuestion("", (), (), (text,), article["title"])] if not paragraph["qas"] else []
        for qa in paragraph["qas"]:
            answers = [] if qa.get("is_impossible") else [answer["text"] for answer in qa["answers"]]
            title = article["title"] or f"article {at}"
            found.append(RawQuestion(qa["question"], answers, (text,), (text,), title, every))
    return found


def _hotpotqa_row(record: Record) -> RawQuestion:
    if "gold" in record:
        golds = [_with_title(gold["title"], gold["text"]) for gold in record["gold"]]
        return RawQuestion(record["question"], [record["answer"]], golds, golds)
    context = record["context"]
    if isinstance(context, str):
        context = json.loads(context)
    pairs = list(zip(context["title"], context["sentences"], strict=True)) if isinstance(context, Mapping) else context
    texts = {title: _with_title(title, "".join(sentences)) for title, sentences in pairs}
    facts = record.get("supporting_facts") or []
    names = facts["title"] if isinstance(facts, Mapping) else [fact[0] for fact in facts]
    golds = [texts[name] for name in dict.fromkeys(names) if name in texts]
    shown = [_with_title(title, "".join(sentences)) for title, sentences in pairs]
    return RawQuestion(record["question"], [record["answer"]], golds or shown, shown)


def _document(record: Record) -> str:
    return _with_title(record["title"], record["text"])


# Generated questions about invented people and buildings, for use without SQuAD and HotpotQA
_NUM_TOWNS = 60
_PEOPLE_PER_TOWN = 20
# Documents that a two-hop question always shows, as in HotpotQA.
_SHOWN = 10

_ONSETS = "b br c cl d dr f g gr h j k l m n p r s st t tr v w"
_VOWELS = "a e i o u ai ea o"
_CODAS = "l n r s t nd rn lm sk th"
_TRADES = "baker cooper dyer farrier glazier joiner mason miller potter saddler tanner weaver"
_INSTRUMENTS = "bagpipe cello clarinet fiddle flute guitar harp horn lute oboe organ trumpet viola zither"
_PETS = "cat dog goat goose hen jackdaw parrot pony rabbit tortoise"
_SHOPS = "bakery bookshop brewery chandlery dairy forge pharmacy printing-house rope-walk tea-room"
_BUILDINGS = "bridge chapel granary library lighthouse market-hall theatre town-hall watch-tower"
_STONES = "basalt brick chalk-stone flint granite limestone marble oak sandstone slate"
_SENTENCES = (
    "The winters there were long, and the river often froze from one bank to the other.",
    "Letters from those years speak of a quiet life with few visitors and many books.",
    "The neighbours remembered a patient voice and a habit of walking before sunrise.",
    "Most of what is known of that time comes from the account books of the parish.",
    "The house stood near the old ferry, and travellers used to ask there for the way.",
    "In the evenings the family sat in the kitchen, where the only good lamp hung.",
)


def generate_squad() -> QuestionSet:
    """Generate one paragraph per person, with three questions each."""
    raw = [
        RawQuestion(question, [answer], (person.text,), (person.text,), person.town)
        for person in _people()
        for question, answer in person.facts
    ]
    return index_documents(raw, ORIGIN)


def generate_hotpotqa() -> QuestionSet:
    """Generate two-hop questions: one document about a person, one about the building that the person founded."""
    rng = rng_for(0, "ruler", "two hops")
    pairs = [(person, *_building(person, rng)) for person in _people()]
    raw = []
    for person, building, text, stone in pairs:
        golds = [_with_title(person.name, person.text), text]
        neighbors = [other for other, *_ in pairs if other.town == person.town and other is not person]
        mates = [_with_title(other.name, other.text) for other in neighbors]
        shown = golds + [mates[at] for at in rng.permutation(len(mates))[: _SHOWN - len(golds)]]
        question = f"Of what material are the walls of the {building} that was founded by the owner of {person.pet}?"
        raw.append(RawQuestion(question, [stone], golds, [shown[at] for at in rng.permutation(len(shown))]))
    return index_documents(raw, ORIGIN, [text for _, _, text, _ in pairs])


class _Person:
    def __init__(self, name: str, town: str, pet: str, rng: np.random.Generator) -> None:
        self.name, self.town = name, town
        trade, instrument, shop = (_choose(kind, rng) for kind in (_TRADES, _INSTRUMENTS, _SHOPS))
        animal, born = _choose(_PETS, rng), int(rng.integers(1701, 1860))
        opened = born + int(rng.integers(20, 50))
        self.pet = f"a {animal} called {pet}"
        first, second = (_SENTENCES[at] for at in rng.permutation(len(_SENTENCES))[:2])
        self.text = (
            f"{name} was born in {town} in {born}, the child of a {trade}, and learned to play the {instrument} before "
            f"learning to read. {first} In {opened} {name} opened a {shop} in the high street of {town}, which stayed "
            f"in the family for three generations. {second} For many years {name} was seen about the town with "
            f"{self.pet}, and both are shown together on the only portrait that is left."
        )
        self.facts = [
            (f"Which instrument did {name} learn to play?", instrument),
            (f"In which year did {name} open a {shop}?", str(opened)),
            (f"What was the name of the {animal} of {name}?", pet),
        ]


def _building(person: _Person, rng: np.random.Generator) -> tuple[str, str, str]:
    """Return kind, document and material of a building."""
    kind, stone = _choose(_BUILDINGS, rng), _choose(_STONES, rng)
    family = person.name.split()[1]
    first, second = (_SENTENCES[at] for at in rng.permutation(len(_SENTENCES))[:2])
    text = (
        f"The {family} {kind} of {person.town} was founded by {person.name} and finished after {rng.integers(2, 19)} "
        f"years of work. {first} Its walls are made of {stone}, which had to be brought from far away. {second}"
    )
    return kind, _with_title(f"{family} {kind}", text), stone


def _people() -> list[_Person]:
    rng = rng_for(0, "ruler", "people")
    names = _names(rng)
    towns = [next(names) for _ in range(_NUM_TOWNS)]
    return [
        _Person(f"{next(names)} {next(names)}", town, next(names), rng)
        for town in towns
        for _ in range(_PEOPLE_PER_TOWN)
    ]


def _names(rng: np.random.Generator) -> Iterator[str]:
    """Yield distinct invented names of two or three syllables."""
    known: set[str] = set()
    while True:
        syllables = [_choose(_ONSETS, rng) + _choose(_VOWELS, rng) for _ in range(int(rng.integers(2, 4)))]
        name = "".join(syllables).capitalize() + _choose(_CODAS, rng)
        if name not in known and len(name) > 5:
            known.add(name)
            yield name


def _choose(words: str, rng: np.random.Generator) -> str:
    options = words.split()
    return options[int(rng.integers(len(options)))]
