from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from unspool.data.corpus.store import CorpusReader, CorpusWriter
from unspool.data.packing.config import DatasetConfig
from unspool.data.packing.order import Order
from unspool.data.packing.pack import PACKERS, Tally
from unspool.data.strategies.base import RowBuilder


def reader(path: Path, lens: list[int], start: int) -> CorpusReader:
    """All tokens different: start, start + 1, …"""
    with CorpusWriter(path) as writer:
        for number, size in enumerate(lens):
            writer.append(str(number), np.arange(start, start + size, dtype=np.uint32))
            start += size
    return CorpusReader([path])


@pytest.fixture
def readers(tmp_path):
    rng = np.random.default_rng(0)
    short_and_long = np.concatenate([rng.integers(1, 30, size=300), rng.integers(100, 200, size=60)]).tolist()
    return {
        "a": reader(tmp_path / "a.arrow", short_and_long, 100_000),
        "b": reader(tmp_path / "b.arrow", rng.integers(1, 150, size=300).tolist(), 200_000),
    }


def order_of(readers, *, seed: int = 0, arrays: bool = False, most_rows: int | None = None, **config) -> Order:
    given = DatasetConfig.model_validate({"from": "a", "seq_len": 512, **config})
    used = {name: readers[name] for name in given.shares}
    builder = RowBuilder(pack=PACKERS[given.packing], arrays=arrays)
    return Order(given, used, seed=seed, name="rows", builder=builder, tally=Tally(), most_rows=most_rows)


def firsts(order: Order) -> list[int]:
    return [int(doc.tokens[0:1][0]) for doc in order]


FIVE_TIMES = {"above": 100, "times": 5}


def test_every_document_is_drawn_once_in_a_seeded_order(readers):
    drawn = firsts(order_of(readers))
    assert len(set(drawn)) == len(drawn) == 360
    assert drawn == firsts(order_of(readers))
    assert drawn != firsts(order_of(readers, seed=1))
    assert drawn != sorted(drawn)


def test_long_documents_repeat_as_often_as_configured(readers):
    order = order_of(readers, upsample=FIVE_TIMES)
    uses = Counter(firsts(order))

    assert Counter(uses.values()) == {1: 300, 5: 60}
    lens = readers["a"].lens
    drawn = order.drawn()["a"]
    assert drawn.long_in == lens[lens >= 100].sum()
    assert drawn.used == lens.sum() + 4 * drawn.long_in
    assert (drawn.again, drawn.long, drawn.dropped) == (4 * drawn.long_in, 5 * drawn.long_in, 0)


def test_dropped_documents_are_never_drawn_and_are_counted(readers):
    order = order_of(readers, upsample={"above": 100, "times": 1, "keep": 0.1})
    uses = Counter(firsts(order))

    drawn = order.drawn()["a"]
    assert set(uses.values()) == {1}
    assert 60 + 10 < len(uses) < 60 + 60
    assert drawn.used + drawn.dropped == readers["a"].num_tokens
    assert drawn.again == 0


def test_long_is_a_matter_of_whole_documents_not_of_the_parts_that_longest_makes(readers):
    config = {"upsample": FIVE_TIMES, "cip": {"longest": 40}}
    order = order_of(readers, **config)
    starts = Counter(firsts(order))
    lens = readers["a"].lens

    parts = -(-lens // 40)
    assert sum(starts.values()) == parts[lens < 100].sum() + 5 * parts[lens >= 100].sum()
    assert order.drawn()["a"].long == 5 * lens[lens >= 100].sum()


def shares(order: Order) -> dict[str, float]:
    drawn = order.drawn()
    total = sum(entry.used for entry in drawn.values())
    return {name: entry.used / total for name, entry in drawn.items()}


@pytest.mark.parametrize("upsample", [FIVE_TIMES, {"above": 100, "times": 1, "keep": 0.2}])
def test_each_source_keeps_its_share_of_tokens(readers, upsample):
    mix = {"from": {"a": 0.7, "b": 0.3}}
    before, after = order_of(readers, **mix), order_of(readers, **mix, upsample=upsample)
    firsts(before), firsts(after)

    assert shares(before) == pytest.approx({"a": 0.7, "b": 0.3}, abs=0.02)
    assert shares(after) == pytest.approx({"a": 0.7, "b": 0.3}, abs=0.02)
    for name, drawn in after.drawn().items():
        assert drawn.long / drawn.used > drawn.long_in / readers[name].num_tokens + 0.03


def test_stretches_are_the_same_documents_and_none_holds_one_twice(readers):
    config = {"from": {"a": 0.5, "b": 0.5}, "upsample": FIVE_TIMES}
    parts = [[int(doc.tokens[0:1][0]) for doc in part] for part in order_of(readers, **config).stretches()]

    assert [first for part in parts for first in part] == firsts(order_of(readers, **config))
    assert all(len(set(part)) == len(part) for part in parts)
    assert 4 <= len(parts) <= 20


def test_a_document_counts_only_when_it_is_drawn(readers):
    order = order_of(readers, upsample=FIVE_TIMES)
    part = next(order.stretches())
    for _ in range(3):
        next(part)
    assert order.documents_read == 3


def test_documents_given_back_are_the_last_ones_and_repeat_nothing(readers):
    order = order_of(readers, **{"from": {"a": 0.5, "b": 0.5}, "upsample": FIVE_TIMES})
    docs = [(int(doc.tokens[0:1][0]), len(doc.tokens), doc.source) for doc in order]
    drawn = order.drawn(given_back=100)

    for name, entry in drawn.items():
        used = [doc for doc in docs[:-100] if doc[2] == name]
        assert entry.used == sum(size for _, size, _ in used)
        assert entry.again == entry.used - sum(size for _, size, _ in set(used))
        assert entry.read == sum(size for _, size, source in docs if source == name) > entry.used


def test_it_ends_with_the_document_that_reaches_the_most(readers):
    order = order_of(readers, most_rows=2, packing="best_fit")
    lens = [len(doc.tokens) for doc in order]
    assert sum(lens[:-1]) < 1024 <= sum(lens)
    assert order.ran_out is None


def test_the_source_that_has_no_more_is_named(readers):
    order = order_of(readers, **{"from": {"a": 0.1, "b": 0.9}})
    firsts(order)
    assert order.ran_out == "b"


def test_strategies_that_cut_further_get_arrays(readers):
    assert isinstance(next(iter(order_of(readers, arrays=True))).tokens, np.ndarray)
    assert not isinstance(next(iter(order_of(readers))).tokens, np.ndarray)
