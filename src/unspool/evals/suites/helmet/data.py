"""HELMET's data: questions with passages (from files or generated), distractor pools, and the suite's sources.

Questions can have the formats of HELMET's released files, lost-in-the-middle, HotpotQA, PopQA and MS MARCO. The first
field below that a record has is used. A record without a required field is refused; the error names file, line and the
record's fields.

rag, cite: `question`, `query` or `input`; `answers` or `answer`, `aliases`; gold passages `gold`, `pos`, `gold_passage`
with `gold_title`, or `ctxs` with `has_answer`; others `neg`, `retrieved`; ALCE's ranked `docs`; `s_pop` (PopQA drops
log10 ≥ 3); ASQA `qa_pairs` with `short_answers`.
rerank: `query`; `ctxs` with `label`, `passages` with `is_selected`, or `pos` and `neg`.
longqa, summ: `context`, `document`, `text`, `passage` or `sources`; `question` or `input`; `answer`, `answers`,
`summary/short` or `summary`; `options` for `infbench_mc`; `key_points` for a judge.
icl: `text`; `label` or `intent`, for TREC `coarse` and `fine`.
pools: `text` or `contents`, `title`.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from unspool.core.errors import ConfigError, DataError
from unspool.core.rng import rng_for
from unspool.evals.fill import Meter
from unspool.evals.scoring.answers import normalize
from unspool.evals.suites import generated_world
from unspool.evals.suites.records import Item, Passage, Record, first_field, flatten, read_records
from unspool.evals.wording import PREFIX, TEMPLATE, Form, Text, Wording

if TYPE_CHECKING:
    from unspool.data.strategies.retrieval import BM25

RAG = ("nq", "triviaqa", "hotpotqa", "popqa")
CITE = ("asqa", "qampari")
BOOKS = ("narrativeqa", "infbench_qa", "infbench_mc", "infbench_sum", "multi_lexsum")
LABELS = {"trec_coarse": 6, "trec_fine": 50, "banking77": 77, "clinc150": 151, "nlu": 68}
WITH_PASSAGES = (*RAG, "msmarco", *CITE)
TASKS = (*WITH_PASSAGES, *BOOKS, *LABELS)
# Files that users may provide: a task's questions, its pool of distractors (suffix _passages) and its examples (suffix
# _demos; for ICL the labeled training set). `passages` is the pool of every task without its own.
PATHS = {"passages", "haystack", "llama2_tokenizer", *TASKS, *(f"{task}_demos" for task in TASKS)}
PATHS |= {f"{task}_passages" for task in WITH_PASSAGES}
POPULAR = 3  # log10 of page views; HELMET drops PopQA questions at or above this
AMONG = 100  # number of best-ranked passages to search for a gold passage
# BM25 ranks this many passages. Beyond that, similarity barely matters, and sorting is slow.
RANKED = 8192
# Round scores before comparing, so that last digits that differ between machines do not change the order.
STEPS = 1024
_WORD = re.compile(r"\w+")

# Names of a task's texts, in addition to template and prefix.
PASSAGE, DEMO = "passage", "demo"


def template_form(template: str, prefix: str, *needs: str, demos: bool = True) -> Form:
    return {
        TEMPLATE: Text(own=template, needs=("context", *needs), may=("demos",) if demos else ()),
        PREFIX: Text(own=prefix),
    }


def demo_form(own: str, *needs: str) -> Form:
    return {DEMO: Text(own=own, needs=needs)}


def to_passage(value: Any) -> Passage:
    if isinstance(value, str):
        return Passage("", value)
    text = next((value[name] for name in ("text", "contents", "passage", "content") if value.get(name)), "")
    return Passage(str(value.get("title") or ""), str(text))


def read_passages(path: str) -> list[Passage]:
    """Read the different passages of a file, in order."""
    rows = read_records(path)
    first_field(rows[0], ("text", "contents", "passage", "content"), path)
    return list(dict.fromkeys(to_passage(row) for row in rows))


def qa_item(record: Record, path: str) -> Item:
    question = str(first_field(record, ("question", "query", "input"), path))
    answers = flatten(first_field(record, ("answers", "answer", "possible_answers"), path)) + flatten(
        record.get("aliases") or []
    )
    contexts = record.get("ctxs") or []
    documents = [to_passage(passage) for passage in record.get("docs") or []]  # ALCE's, ranked, without labels
    gold = [to_passage(passage) for passage in record.get("gold") or record.get("pos") or []]
    if record.get("gold_passage"):
        gold = [Passage(str(record.get("gold_title") or ""), str(record["gold_passage"]))]
    gold += [to_passage(passage) for passage in contexts if passage.get("has_answer")]
    others = [to_passage(passage) for passage in contexts if not passage.get("has_answer")]
    others += [to_passage(passage) for passage in record.get("neg") or record.get("retrieved") or []]
    short = flatten([pair.get("short_answers", []) for pair in record.get("qa_pairs") or []]) or answers
    gold += [passage for passage in documents[:AMONG] if has_answer(passage, short)]
    others += documents
    golden = set(gold)
    return Item(
        id=str(record.get("id", record.get("question_id", question))),
        question=question,
        answers=tuple(dict.fromkeys(answers)),
        gold=tuple(dict.fromkeys(gold)),
        others=tuple(passage for passage in dict.fromkeys(others) if passage not in golden),
        released=tuple(to_passage(passage) for passage in contexts) or tuple(documents),
        extra=record,
    )


def rank_item(record: Record, path: str) -> Item:
    question = str(first_field(record, ("query", "question", "query_hindi"), path))
    judged = record.get("ctxs") or record.get("passages") or []
    graded = [(to_passage(passage), int(passage.get("label", passage.get("is_selected", 0)))) for passage in judged]
    graded += [(to_passage(passage), 1) for passage in record.get("pos") or []]
    graded += [(to_passage(passage), 0) for passage in record.get("neg") or []]
    if not graded:
        first_field(record, ("ctxs", "passages", "pos"), path)
    relevant = {passage: grade for passage, grade in graded if grade > 0}
    return Item(
        id=str(record.get("qid", record.get("query_id", question))),
        question=question,
        answers=(),
        gold=tuple(relevant),
        grades=tuple(relevant.values()),
        others=tuple(dict.fromkeys(passage for passage, _ in graded if passage not in relevant)),
        released=tuple(passage for passage, _ in graded) if record.get("ctxs") else (),
        extra=record,
    )


_normalize_cached = lru_cache(1 << 16)(normalize)


def has_answer(passage: Passage, answers: Collection[str]) -> bool:
    text = _normalize_cached(f"{passage.title} {passage.text}")
    return any(answer in text for answer in map(_normalize_cached, answers) if answer)


class Pool:
    """Passages that fill contexts, most similar to the question first. `more` generates further passages."""

    def __init__(self, passages: Sequence[Passage], more: Callable[[int], Passage] | None = None) -> None:
        self.passages = list(passages)
        self._more = more

    @cached_property
    def _index(self) -> tuple["BM25", dict[str, int]]:
        # Import late: recipe checks import suites, and bm25s loads slowly.
        from unspool.data.strategies.retrieval import BM25

        words: dict[str, int] = {}
        chunks = [
            np.array([words.setdefault(word, len(words)) for word in _WORD.findall(f"{title} {text}".lower())])
            for title, text in self.passages
        ]
        return BM25(chunks, query_terms=None), words

    def ranked(self, question: str) -> Iterator[Passage]:
        """Yield all passages: most similar first (BM25), then the rest in file order, then generated ones."""
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
        """Yield passages without an answer: first from the question's record, then from the pool."""
        seen = {*item.gold, *item.others}
        yield from (passage for passage in item.others if not has_answer(passage, item.answers))
        for passage in self.ranked(item.question):
            if passage not in seen and not has_answer(passage, item.answers):
                yield passage

    def gold_for(self, item: Item) -> Passage | None:
        """Find the most similar passage with an answer, for questions without passages."""
        for passage, _ in zip(self.ranked(item.question), range(AMONG), strict=False):
            if has_answer(passage, item.answers):
                return passage
        return None


@dataclass(frozen=True)
class QaSet:
    items: Sequence[Item]
    demos: Sequence[Item]
    pool: Pool
    generated: bool
    variants: Mapping[str, Sequence[Item]] = field(default_factory=dict)  # by question id: its released contexts


@dataclass
class Sources:
    tokenizer: Any
    meter: Meter
    paths: Mapping[str, str]
    wording: Wording
    _cache: dict[str, Any] = field(default_factory=dict)

    def cached(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._cache:
            self._cache[name] = make()
        return self._cache[name]

    def qa(self, task: str) -> QaSet:
        found: QaSet = self.cached(task, lambda: _load_qa(task, self.paths))
        return found

    def records(self, name: str) -> list[Record] | None:
        """Read the user's file of that name. None if there is none."""
        if name not in self.paths:
            return None
        found: list[Record] = self.cached(f"records {name}", lambda: read_records(self.paths[name]))
        return found


def choose(items: Sequence[Item], task: str, seed: int, index: int) -> Item:
    """Return the question of an index: random order over all questions, then repeated."""
    order = rng_for(seed, "helmet order", task).permutation(len(items))
    return items[int(order[index % len(items)])]


def _load_qa(task: str, paths: Mapping[str, str]) -> QaSet:
    if task not in paths:
        items = generated_world.questions(task)
        half = len(items) // 2
        return QaSet(
            items[:half],
            items[half:],
            Pool(_all_passages(items, generated_world.pool()), generated_world.endless),
            True,
        )
    rows = _read_items(task, paths[task])
    # HELMET's files repeat a question for each depth of its gold passage.
    items = list({item.id: item for item in reversed(rows)}.values())[::-1]
    variants = {item.id: [row for row in rows if row.id == item.id] for item in items if item.released}
    demos = _read_items(task, paths[f"{task}_demos"]) if f"{task}_demos" in paths else items
    path = paths.get(f"{task}_passages", paths.get("passages"))
    pool = Pool(_all_passages([*items, *demos], read_passages(path) if path else []))
    # ALCE uses all questions, whatever its retriever found.
    asked = partial(_with_gold, pool=pool, keep_released=task in CITE)
    answered = asked(items)
    items, demos = answered, answered if demos is items else asked(demos)
    if not items:
        raise DataError(f"{paths[task]}: no question has a passage with its answer; set passages as {task}_passages.")
    return QaSet(items, demos, pool, False, variants)


def _read_items(task: str, path: str) -> list[Item]:
    make = rank_item if task == "msmarco" else qa_item
    rows = [row for row in read_records(path) if math.log10(max(1, int(row.get("s_pop") or 1))) < POPULAR]
    if not rows:
        raise ConfigError(
            f"{path}: every question has log10(s_pop) ≥ {POPULAR}, which HELMET drops; use less popular questions."
        )
    return [make(row, path) for row in rows]


def _all_passages(items: Sequence[Item], others: Sequence[Passage]) -> list[Passage]:
    own = [passage for item in items for passage in (*item.gold, *item.others)]
    return list(dict.fromkeys([*own, *others]))


def _with_gold(items: Sequence[Item], *, pool: Pool, keep_released: bool) -> list[Item]:
    """Add the best passage of the pool to questions without passages. Drop questions that no passage answers."""
    found = []
    for item in items:
        if item.gold or (keep_released and item.released):
            found.append(item)
        elif gold := pool.gold_for(item):
            found.append(replace(item, gold=(gold,)))
    return found
