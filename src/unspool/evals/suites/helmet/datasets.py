"""What HELMET's tasks draw from: files that the user names, or the generated world.

In: a tokenizer, paths by name. Out: `Sources`; each data set is read when its task first asks for it.
Names: a task's own, with `_passages` its pool of distractors, with `_demos` its examples (for `icl` the labelled
training set); `passages` is the pool of every task that has none of its own.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unspool.core.config import lookup
from unspool.core.errors import ConfigError, DataError
from unspool.core.rng import rng_for
from unspool.evals.fill import Meter
from unspool.evals.suites.helmet import generated
from unspool.evals.suites.helmet.instructions import OWN
from unspool.evals.suites.helmet.records import (
    Item,
    Passage,
    Pool,
    Record,
    qa_item,
    rank_item,
    read_passages,
    read_records,
)
from unspool.evals.wording import Wording

RAG = ("nq", "triviaqa", "hotpotqa", "popqa")
CITE = ("asqa", "qampari")
BOOKS = ("narrativeqa", "infbench_qa", "infbench_mc", "infbench_sum", "multi_lexsum")
LABELS = {"trec_coarse": 6, "trec_fine": 50, "banking77": 77, "clinc150": 151, "nlu": 68}
WITH_PASSAGES = (*RAG, "msmarco", *CITE)
TASKS = (*WITH_PASSAGES, *BOOKS, *LABELS)
PATHS = {"passages", "haystack", *TASKS, *(f"{task}_demos" for task in TASKS)}
PATHS |= {f"{task}_passages" for task in WITH_PASSAGES}
POPULAR = 3  # log10 of page views, above which PopQA's questions are left out


@dataclass(frozen=True)
class QaSet:
    items: Sequence[Item]
    demos: Sequence[Item]
    pool: Pool
    generated: bool
    variants: Mapping[str, Sequence[Item]] = field(default_factory=dict)  # of a question: its contexts as released


@dataclass
class Sources:
    tokenizer: Any
    meter: Meter
    paths: Mapping[str, str]
    wording: Wording = OWN
    _sets: dict[str, Any] = field(default_factory=dict)

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._sets:
            self._sets[name] = make()
        return self._sets[name]

    def qa(self, task: str) -> QaSet:
        found: QaSet = self.once(task, lambda: _qa_set(task, self.paths))
        return found

    def records(self, name: str) -> list[Record] | None:
        """The file of that name, or None if none was given."""
        if name not in self.paths:
            return None
        found: list[Record] = self.once(f"records {name}", lambda: read_records(self.paths[name]))
        return found


def load(tokenizer: Any, paths: Mapping[str, str], wording: Wording = OWN) -> Sources:
    for name in paths:
        lookup(dict.fromkeys(sorted(PATHS)), name, kind="path of helmet")
    return Sources(tokenizer=tokenizer, meter=Meter(tokenizer, sample_texts()), paths=dict(paths), wording=wording)


def sample_texts() -> list[str]:
    """What the tokenizer's fast route is tried on."""
    return [passage.text for passage in generated.pool()[:100]]


def chosen(items: Sequence[Item], task: str, seed: int, index: int) -> Item:
    """The question of an index: all of them in an order of the seed's, then again."""
    order = rng_for(seed, "helmet order", task).permutation(len(items))
    return items[int(order[index % len(items)])]


def _qa_set(task: str, paths: Mapping[str, str]) -> QaSet:
    if task not in paths:
        items = generated.questions(task)
        half = len(items) // 2
        return QaSet(items[:half], items[half:], Pool(_passages(items, generated.pool()), generated.endless), True)
    rows = _read(task, paths[task])
    # HELMET's files repeat a question for each depth of its gold passage; it is one question.
    items = list({item.id: item for item in reversed(rows)}.values())[::-1]
    variants = {item.id: [row for row in rows if row.id == item.id] for item in items if item.fixed}
    demos = _read(task, paths[f"{task}_demos"]) if f"{task}_demos" in paths else items
    path = paths.get(f"{task}_passages", paths.get("passages"))
    pool = Pool(_passages([*items, *demos], read_passages(path) if path else []))
    answered = _with_gold(items, pool)
    items, demos = answered, answered if demos is items else _with_gold(demos, pool)
    if not items:
        raise DataError(f"{paths[task]}: no question has a passage with its answer; give {task}_passages with some.")
    return QaSet(items, demos, pool, False, variants)


def _read(task: str, path: str) -> list[Item]:
    make = rank_item if task == "msmarco" else qa_item
    rows = [row for row in read_records(path) if math.log10(max(1, int(row.get("s_pop") or 1))) < POPULAR]
    if not rows:
        raise ConfigError(f"{path}: every question has log10(s_pop) ≥ {POPULAR}, which HELMET leaves out.")
    return [make(row, path) for row in rows]


def _passages(items: Sequence[Item], others: Sequence[Passage]) -> list[Passage]:
    own = [passage for item in items for passage in (*item.gold, *item.others)]
    return list(dict.fromkeys([*own, *others]))


def _with_gold(items: Sequence[Item], pool: Pool) -> list[Item]:
    """Questions that came without passages get the best of the pool; those that nothing answers are left out."""
    found = []
    for item in items:
        gold = item.gold or tuple(filter(None, [pool.gold_for(item)]))
        if gold:
            found.append(item if item.gold else Item(**{**item.__dict__, "gold": gold}))
    return found
