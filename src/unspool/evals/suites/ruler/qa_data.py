"""SQuAD and HotpotQA, in the forms in which people have them.

In: a path, or hub:ORG/NAME. Out: `Questions`: documents, and questions that say which of them hold the answer.
Forms: JSON as released; JSON lines or Parquet with the Hub's fields; JSON lines with `answers` as a list (SQuAD) or
with `gold` documents (HotpotQA), beside which a pool gives further ones.
Promise: documents are sorted and each stands once, questions keep the order of the file, as in RULER.
"""

import gzip
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from unspool.core.errors import ConfigError, DataError
from unspool.core.rng import rng_for
from unspool.data.sources.config import HfSource

# The records of a file of questions, whatever it is packed in.


_HUB = "hub:"


def records(path: str, *, default_split: str) -> Iterator[dict[str, Any]]:
    if path.startswith(_HUB):
        # Late here and below, because suites are imported to check recipes, which does not need pyarrow.
        from unspool.data.sources.readers import source_units

        name, _, config = path.removeprefix(_HUB).partition("@")
        options = {"kind": "hf", "path": name, "split": default_split} | ({"config": config} if config else {})
        for file in source_units(HfSource.model_validate(options), Path()):
            yield from _read(file)
        return
    found = Path(path).expanduser()
    if not found.is_file():
        raise ConfigError(f"ruler: {path} is no file; give a JSON, JSONL or Parquet file, or hub:ORG/NAME.")
    yield from _read(found)


def _read(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet

    try:
        if path.suffix == ".parquet":
            rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
            yield from rows
            return
        text = _text(path)
        if path.name.removesuffix(".gz").removesuffix(".zst").endswith(".json"):
            whole = json.loads(text)
            yield from whole["data"] if isinstance(whole, dict) and "data" in whole else whole
            return
        yield from (json.loads(line) for line in text.split("\n") if line.strip())
    except (OSError, ValueError, TypeError, zstandard.ZstdError, pyarrow.ArrowException) as error:
        raise DataError(f"ruler: {path} cannot be read ({error}); give JSON, JSONL or Parquet.") from error


def _text(path: Path) -> str:
    raw = path.read_bytes()
    if path.suffix == ".gz":
        raw = gzip.decompress(raw)
    elif path.suffix == ".zst":
        raw = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(raw)).read()
    return raw.decode("utf-8")


Record = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Query:
    question: str
    answers: tuple[str, ...]
    golds: tuple[int, ...]  # numbers of documents
    context: tuple[int, ...]  # those that RULER always shows, gold among them
    more: tuple[int, ...] = ()  # those of the same article


@dataclass(frozen=True)
class Questions:
    documents: list[str]
    queries: list[Query]
    origin: str  # "generated", or the name of the file


@dataclass(frozen=True)
class Raw:
    """One question with its documents as text."""

    question: str
    answers: Sequence[str]
    golds: Sequence[str]
    context: Sequence[str]
    article: str = ""


def read_squad(path: str) -> Questions:
    raw: list[Raw] = []
    for number, record in enumerate(records(path, default_split="validation"), 1):
        try:
            raw += _released_squad(record) if "paragraphs" in record else [_squad_row(record)]
        except (KeyError, TypeError, AttributeError) as error:
            raise _not_as_expected("SQuAD", path, number, "context, question, answers", error) from error
    return collected(raw, Path(path).name)


def read_hotpotqa(path: str, pool: str | None = None) -> Questions:
    raw: list[Raw] = []
    for number, record in enumerate(records(path, default_split="validation"), 1):
        try:
            raw.append(_hotpot_row(record))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise _not_as_expected("HotpotQA", path, number, "question, answer, context or gold", error) from error
    extra: list[str] = []
    for number, record in enumerate(records(pool, default_split="train") if pool else (), 1):
        try:
            extra.append(titled(record["title"], record["text"]))
        except (KeyError, TypeError) as error:
            raise _not_as_expected("HotpotQA pool", str(pool), number, "title, text", error) from error
    return collected(raw, Path(path).name, extra)


def collected(raw: Sequence[Raw], origin: str, extra: Iterable[str] = ()) -> Questions:
    """Documents by number; questions without an answer are left out."""
    answerable = [one for one in raw if any(one.answers)]
    if not answerable:
        raise DataError(f"ruler: {origin} holds no question with an answer.")
    found = {*extra, *(text for one in raw for text in one.context)}
    documents = sorted(found)
    number = {text: at for at, text in enumerate(documents)}
    articles: dict[str, dict[int, None]] = {}
    for one in raw:
        articles.setdefault(one.article, {}).update(dict.fromkeys(number[text] for text in one.context))
    queries = []
    for one in answerable:
        context = tuple(number[text] for text in one.context)
        more = tuple(at for at in articles[one.article] if at not in context) if one.article else ()
        golds = tuple(number[text] for text in one.golds)
        answers = tuple(answer for answer in one.answers if answer)
        queries.append(Query(question=one.question, answers=answers, golds=golds, context=context, more=more))
    return Questions(documents, queries, origin)


def titled(title: str, text: str) -> str:
    return f"{title}\n{text}"


def _released_squad(article: Record) -> list[Raw]:
    found = []
    for at, paragraph in enumerate(article["paragraphs"]):
        text = paragraph["context"]
        # A paragraph without questions is a document all the same.
        found += [Raw("", (), (), (text,), article["title"])] if not paragraph["qas"] else []
        for asked in paragraph["qas"]:
            answers = [] if asked.get("is_impossible") else [answer["text"] for answer in asked["answers"]]
            found.append(Raw(asked["question"], answers, (text,), (text,), article["title"] or f"article {at}"))
    return found


def _squad_row(record: Record) -> Raw:
    answers = record["answers"]
    texts = answers["text"] if isinstance(answers, Mapping) else answers
    text = record["context"]
    return Raw(record["question"], list(texts), (text,), (text,), record.get("title") or "")


def _hotpot_row(record: Record) -> Raw:
    if "gold" in record:
        golds = [titled(gold["title"], gold["text"]) for gold in record["gold"]]
        return Raw(record["question"], [record["answer"]], golds, golds)
    context = record["context"]
    if isinstance(context, str):
        context = json.loads(context)
    pairs = list(zip(context["title"], context["sentences"], strict=True)) if isinstance(context, Mapping) else context
    texts = {title: titled(title, "".join(sentences)) for title, sentences in pairs}
    facts = record.get("supporting_facts") or []
    names = facts["title"] if isinstance(facts, Mapping) else [fact[0] for fact in facts]
    golds = [texts[name] for name in dict.fromkeys(names) if name in texts]
    shown = list(texts.values())
    return Raw(record["question"], [record["answer"]], golds or shown, shown)


def _not_as_expected(kind: str, path: str, number: int, fields: str, error: Exception) -> DataError:
    return DataError(
        f"ruler: {path}, record {number}, is no {kind} record ({type(error).__name__}: {error}); "
        f"it should have {fields}, as the released files or the Hub's data set do."
    )


# Questions about people and buildings that never were, for use without SQuAD and HotpotQA.


ORIGIN = "generated"
_NUM_TOWNS = 60
_PEOPLE_PER_TOWN = 20
# Documents that a two-hop question shows in any case, as HotpotQA's do.
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
_WEATHER = (
    "The winters there were long, and the river often froze from one bank to the other.",
    "Letters from those years speak of a quiet life with few visitors and many books.",
    "The neighbours remembered a patient voice and a habit of walking before sunrise.",
    "Most of what is known of that time comes from the account books of the parish.",
    "The house stood near the old ferry, and travellers used to ask there for the way.",
    "In the evenings the family sat in the kitchen, where the only good lamp hung.",
)


def made_squad() -> Questions:
    """One paragraph per person; three questions on each."""
    raw = [
        Raw(question, [answer], (person.text,), (person.text,), person.town)
        for person in _people()
        for question, answer in person.facts
    ]
    return collected(raw, ORIGIN)


def made_hotpotqa() -> Questions:
    """Who built it, and of what is it made? One document on the person, one on the building."""
    rng = rng_for(0, "ruler", "two hops")
    pairs = [(person, *_building(person, rng)) for person in _people()]
    raw = []
    for person, building, text, stone in pairs:
        golds = [titled(person.name, person.text), text]
        mates = [titled(mate.name, mate.text) for mate, *_ in pairs if mate.town == person.town and mate is not person]
        shown = golds + [mates[at] for at in rng.permutation(len(mates))[: _SHOWN - len(golds)]]
        asked = f"Of what material are the walls of the {building} that was founded by the owner of {person.pet}?"
        raw.append(Raw(asked, [stone], golds, [shown[at] for at in rng.permutation(len(shown))]))
    return collected(raw, ORIGIN, [text for _, _, text, _ in pairs])


class _Person:
    def __init__(self, name: str, town: str, pet: str, rng: np.random.Generator) -> None:
        self.name, self.town = name, town
        trade, instrument, shop = (_one(kind, rng) for kind in (_TRADES, _INSTRUMENTS, _SHOPS))
        animal, born = _one(_PETS, rng), int(rng.integers(1701, 1860))
        opened = born + int(rng.integers(20, 50))
        self.pet = f"a {animal} called {pet}"
        first, second = (_WEATHER[at] for at in rng.permutation(len(_WEATHER))[:2])
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
    """What it is called, the document about it, and its material."""
    kind, stone = _one(_BUILDINGS, rng), _one(_STONES, rng)
    family = person.name.split()[1]
    first, second = (_WEATHER[at] for at in rng.permutation(len(_WEATHER))[:2])
    text = (
        f"The {family} {kind} of {person.town} was founded by {person.name} and finished after {rng.integers(2, 19)} "
        f"years of work. {first} Its walls are made of {stone}, which had to be brought from far away. {second}"
    )
    return kind, titled(f"{family} {kind}", text), stone


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
    """Invented names of two or three syllables, none twice, none part of another."""
    known: set[str] = set()
    while True:
        syllables = [_one(_ONSETS, rng) + _one(_VOWELS, rng) for _ in range(int(rng.integers(2, 4)))]
        name = "".join(syllables).capitalize() + _one(_CODAS, rng)
        if name not in known and len(name) > 5:
            known.add(name)
            yield name


def _one(words: str, rng: np.random.Generator) -> str:
    options = words.split()
    return options[int(rng.integers(len(options)))]
