"""What questions are made of, and reading them from JSON lines in the shapes that are about.

In: a file: HELMET's released ones, lost-in-the-middle's, HotpotQA's, PopQA's, MS MARCO's, or one's own.
Out: `Item`s and `Passage`s. Known fields are listed in docs/helmet.md.
Promise: a record that lacks what its task needs stops with file, line and the fields it has.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from unspool.core.errors import ConfigError, DataError
from unspool.data.sources.base import Bad
from unspool.data.sources.files import nothing_found
from unspool.data.sources.jsonl import records
from unspool.evals.scoring.answers import normalize

if TYPE_CHECKING:
    from unspool.data.strategies.retrieval import BM25

Record = Mapping[str, Any]


class Passage(NamedTuple):
    title: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Item:
    """One question with what is known of it."""

    id: str
    question: str
    answers: tuple[str, ...]
    gold: tuple[Passage, ...] = ()
    others: tuple[Passage, ...] = ()  # passages that came with it and do not answer it
    grades: tuple[int, ...] = ()  # of `gold`, where relevance has grades
    fixed: tuple[Passage, ...] = ()  # the whole context as released, in its order
    extra: Record = field(default_factory=dict)


def read_records(path: str) -> list[Record]:
    """Every object of a .jsonl file (plain, .gz, .zst), or of a .json file that is a list or has a list in `data`."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(nothing_found(path, file))
    if file.suffix == ".json":
        return list(_json_records(file))
    found: list[Record] = []
    for record in records(file, lambda number, record: {**record, "_line": number}):
        if isinstance(record, Bad):
            raise DataError(f"{path}, {record.record}: {record.detail}.")
        found.append(record)
    if not found:
        raise DataError(f"{path}: no records; one JSON object on each line is expected.")
    return found


def _json_records(file: Path) -> Iterator[Record]:
    try:
        loaded = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise DataError(f"{file}: cannot be read as JSON ({error}).") from error
    rows = loaded.get("data", loaded.get("demos")) if isinstance(loaded, dict) else loaded
    if not isinstance(rows, list) or not rows:
        raise DataError(f"{file}: a list of records was expected, or an object with one in `data` or `demos`.")
    for number, row in enumerate(rows, start=1):
        yield {**row, "_line": number}


def one_of(record: Record, names: tuple[str, ...], path: str) -> Any:
    """The first of these fields that is there; DataError names file, line and what there is."""
    for name in names:
        if record.get(name) not in (None, "", []):
            return record[name]
    present = ", ".join(key for key in record if key != "_line")
    raise DataError(f"{path}, record {record.get('_line')}: none of the fields {', '.join(names)}; it has {present}.")


def passage(value: Any) -> Passage:
    if isinstance(value, str):
        return Passage("", value)
    text = next((value[name] for name in ("text", "contents", "passage", "content") if value.get(name)), "")
    return Passage(str(value.get("title") or ""), str(text))


def read_passages(path: str) -> list[Passage]:
    """Different passages, in order."""
    rows = read_records(path)
    one_of(rows[0], ("text", "contents", "passage", "content"), path)
    return list(dict.fromkeys(passage(row) for row in rows))


def strings(value: Any) -> tuple[str, ...]:
    """Answers in any nesting: a text, a list of texts, a list of lists."""
    if isinstance(value, (list, tuple)):
        return tuple(dict.fromkeys(text for part in value for text in strings(part)))
    return (str(value),)


def qa_item(record: Record, path: str) -> Item:
    question = str(one_of(record, ("question", "query", "input"), path))
    answers = strings(one_of(record, ("answers", "answer", "possible_answers"), path)) + strings(
        record.get("aliases") or []
    )
    contexts = record.get("ctxs") or []
    gold = [passage(one) for one in record.get("gold") or record.get("pos") or []]
    if record.get("gold_passage"):
        gold = [Passage(str(record.get("gold_title") or ""), str(record["gold_passage"]))]
    gold += [passage(one) for one in contexts if one.get("has_answer")]
    others = [passage(one) for one in contexts if not one.get("has_answer")]
    others += [passage(one) for one in record.get("neg") or record.get("retrieved") or []]
    golden = set(gold)
    return Item(
        id=str(record.get("id", record.get("question_id", question))),
        question=question,
        answers=tuple(dict.fromkeys(answers)),
        gold=tuple(dict.fromkeys(gold)),
        others=tuple(one for one in dict.fromkeys(others) if one not in golden),
        fixed=tuple(passage(one) for one in contexts),
        extra=record,
    )


def rank_item(record: Record, path: str) -> Item:
    question = str(one_of(record, ("query", "question", "query_hindi"), path))
    graded = [(passage(one), int(one.get("label", one.get("is_selected", 0)))) for one in _judged(record)]
    graded += [(passage(one), 1) for one in record.get("pos") or []]
    graded += [(passage(one), 0) for one in record.get("neg") or []]
    if not graded:
        one_of(record, ("ctxs", "passages", "pos"), path)
    relevant = {one: grade for one, grade in graded if grade > 0}
    return Item(
        id=str(record.get("qid", record.get("query_id", question))),
        question=question,
        answers=(),
        gold=tuple(relevant),
        grades=tuple(relevant.values()),
        others=tuple(dict.fromkeys(one for one, _ in graded if one not in relevant)),
        fixed=tuple(one for one, _ in graded) if record.get("ctxs") else (),
        extra=record,
    )


def _judged(record: Record) -> list[Any]:
    return list(record.get("ctxs") or record.get("passages") or [])


# Passages to fill contexts with: those most like a question that do not answer it.


_WORD = re.compile(r"\w+")
# Beyond this many, how alike a passage is hardly matters any more, and sorting takes the time.
RANKED = 8192
# Scores are compared after rounding, so that a last digit that differs between machines changes no order.
STEPS = 1024

normalized = lru_cache(1 << 16)(normalize)


def has_answer(passage: Passage, answers: Collection[str]) -> bool:
    text = normalized(f"{passage.title} {passage.text}")
    return any(answer in text for answer in map(normalized, answers) if answer)


class Pool:
    def __init__(self, passages: Sequence[Passage], more: Callable[[int], Passage] | None = None) -> None:
        self.passages = list(passages)
        self._more = more

    @cached_property
    def _index(self) -> tuple["BM25", dict[str, int]]:
        # Late, because suites are imported to check recipes, which does not need bm25s.
        from unspool.data.strategies.retrieval import BM25

        words: dict[str, int] = {}
        chunks = [
            np.array([words.setdefault(word, len(words)) for word in _WORD.findall(f"{title} {text}".lower())])
            for title, text in self.passages
        ]
        return BM25(chunks, query_terms=None), words

    def ranked(self, question: str) -> Iterator[Passage]:
        """All passages: the most like the question first, then the rest in their own order, then generated ones."""
        from unspool.data.strategies.retrieval import best

        bm25, words = self._index
        query = np.array([words[word] for word in _WORD.findall(question.lower()) if word in words], dtype=np.int64)
        scores = np.round(bm25.scores(query).astype(np.float64) * STEPS) if len(query) else np.zeros(len(self.passages))
        order = best(scores, RANKED)
        yield from (self.passages[at] for at in order)
        if len(order) < len(self.passages):
            used = set(order.tolist())
            yield from (passage for at, passage in enumerate(self.passages) if at not in used)
        if self._more is not None:
            yield from map(self._more, count())

    def distractors(self, item: Item) -> Iterator[Passage]:
        """What came with the question first, then the pool."""
        seen = {*item.gold, *item.others}
        yield from (one for one in item.others if not has_answer(one, item.answers))
        for one in self.ranked(item.question):
            if one not in seen and not has_answer(one, item.answers):
                yield one

    def gold_for(self, item: Item, among: int = 100) -> Passage | None:
        """For questions without passages: the one most like the question that has an answer."""
        for one, _ in zip(self.ranked(item.question), range(among), strict=False):
            if has_answer(one, item.answers):
                return one
        return None
