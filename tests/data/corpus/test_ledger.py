import json

import pytest

from unspool.core.errors import DataError
from unspool.data.corpus.ledger import Ledger, check_bad_share, load_ledgers
from unspool.data.sources.base import Bad, Document, Filtered


def entered(*items) -> Ledger:
    ledger = Ledger()
    for item in items:
        ledger.add(item)
    return ledger


BAD = Bad("a.jsonl", "line 2", "broken_json", "not valid JSON")


def test_every_record_is_counted_once_and_missing_ones_are_beyond_the_limit():
    ledger = entered(Document("a:1", "x"), BAD, Filtered("a:3", "empty"), Document("a:4", "y"), Document("a:5", "z"))
    assert ledger.counts(documents=2) == {
        "records": 5,
        "quarantined": {"broken_json": 1},
        "filtered": {"empty": 1, "limit": 1},
        "left_out": {},
    }
    assert ledger.counts(documents=3)["filtered"] == {"empty": 1}
    with pytest.raises(AssertionError):
        ledger.counts(documents=4)


def test_ledgers_of_tasks_join_in_their_order(tmp_path):
    first = entered(BAD, Document("r:1", "x", left_out=(("a.lock", "lock"), ("b.png", "binary"))))
    second = entered(Bad("b", "line 1", "nul", "ä\n\ud800"), Filtered("b:2", "empty"))
    for number, ledger in enumerate((first, second)):
        ledger.save(tmp_path / f"{number}.json")
    whole = load_ledgers([tmp_path / "0.json", tmp_path / "1.json"])
    assert whole.records == 4
    assert whole.bad == first.bad + second.bad
    assert whole.counts(documents=1)["left_out"] == {"binary": 1, "lock": 1}


def test_the_lists_for_people_are_written_only_when_there_is_something_in_them(tmp_path):
    entered(Document("a:1", "x")).publish(tmp_path)
    assert list(tmp_path.iterdir()) == []
    ledger = entered(BAD, Document("r:1", "x", left_out=(("a.lock", "lock"),)))
    ledger.publish(tmp_path)
    (line,) = (tmp_path / "quarantine.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "file": "a.jsonl",
        "record": "line 2",
        "reason": "broken_json",
        "detail": "not valid JSON",
    }
    (line,) = (tmp_path / "left_out.jsonl").read_text().splitlines()
    assert json.loads(line) == {"document": "r:1", "part": "a.lock", "reason": "lock"}


@pytest.mark.parametrize(("records", "allowed"), [(1000, True), (999, False)])
def test_the_share_of_bad_records_may_reach_the_limit_but_not_exceed_it(tmp_path, records, allowed):
    ledger = entered(BAD)
    ledger.records = records
    if allowed:
        check_bad_share(ledger, name="web", max_bad=0.001, listed=tmp_path)
    else:
        with pytest.raises(DataError, match=r"corpus web: 1 of 999 records \(0.1%\) cannot be read"):
            check_bad_share(ledger, name="web", max_bad=0.001, listed=tmp_path)
