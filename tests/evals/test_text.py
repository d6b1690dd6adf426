import json

import pytest
import zstandard

from unspool.core.errors import ConfigError
from unspool.evals import heldout
from unspool.evals.heldout import heldout_digest, heldout_documents


def test_plain_and_compressed_jsonl_give_their_documents_in_order(tmp_path):
    (tmp_path / "a.txt").write_text("First.")
    (tmp_path / "b.txt").write_text("Second.")
    lines = "".join(json.dumps({"text": name}) + "\n" for name in ("one", "two"))
    (tmp_path / "c.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))

    assert heldout_documents("*.txt", tmp_path, tokens=1) == ["First.", "Second."]
    assert heldout_documents("c.jsonl.zst", tmp_path, tokens=1) == ["one", "two"]


def test_reading_stops_at_the_needed_size(tmp_path, monkeypatch):
    monkeypatch.setattr(heldout, "MIN_CHARS", 10)
    for name in "abcd":
        (tmp_path / f"{name}.txt").write_text(name * 100)

    assert len(heldout_documents("*.txt", tmp_path, tokens=1)) == 1
    assert len(heldout_documents("*.txt", tmp_path, tokens=200 // heldout.CHARS_PER_TOKEN)) == 2
    assert len(heldout_documents("*.txt", tmp_path, tokens=10**6)) == 4


def test_the_shipped_text_is_found_from_anywhere_and_has_long_documents(tmp_path):
    documents = heldout_documents(None, tmp_path, tokens=1)

    assert min(map(len, documents)) > 100_000


def test_the_digest_follows_the_content(tmp_path):
    (tmp_path / "a.txt").write_text("First.")
    before = heldout_digest("a.txt", tmp_path)
    (tmp_path / "a.txt").write_text("Other.")

    assert heldout_digest("a.txt", tmp_path) != before


def test_missing_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.txt"):
        heldout_documents("none.txt", tmp_path, tokens=1)
