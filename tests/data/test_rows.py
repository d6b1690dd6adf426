import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from unspool.core.artifacts import read_manifest, seal
from unspool.core.errors import DataError
from unspool.data.corpus.store import CorpusWriter, open_corpus
from unspool.data.lengths import add_up, histogram, imbalance_of
from unspool.data.packing.build import build_rows
from unspool.data.packing.config import DatasetConfig
from unspool.data.packing.store import RowWriter, open_rows
from unspool.data.strategies.utk.special_tokens import KNOTS


def write_corpus(out: Path, lens: list[int], start: int) -> None:
    """A published corpus whose tokens are all different: start, start + 1, …"""
    partial = out.with_name(out.name + ".making")
    partial.mkdir(parents=True)
    with CorpusWriter(partial / "docs-00000.arrow") as writer:
        for number, size in enumerate(lens):
            writer.append(f"d:{number}", np.arange(start, start + size, dtype=np.uint32))
            start += size
    seal(partial, out, kind="corpus", inputs={}, settings={}, counts={})


@pytest.fixture
def corpora(tmp_path):
    rng = np.random.default_rng(0)
    write_corpus(tmp_path / "corpus/a", rng.integers(1, 60, size=200).tolist(), start=100_000)
    write_corpus(tmp_path / "corpus/b", rng.integers(1, 20, size=900).tolist(), start=200_000)
    return {"a": tmp_path / "corpus/a", "b": tmp_path / "corpus/b"}


def build(corpora, tokenizer, out: Path, seed: int = 0, **config) -> dict:
    rows = DatasetConfig.model_validate({"from": "a", "seq_len": 32, **config})
    return build_rows(rows, corpora, out, tokenizer=tokenizer, seed=seed)


TANGLE = {"min_split": 8, "probability": 1.0, "hops": {2: 1.0}}


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"packing": "truncate"},
        {"packing": "single_doc"},
        {"packing": "single_doc", "from": {"a": 0.7, "b": 0.3}, "seq_len": 12},
        {"from": {"a": 0.5, "b": 0.5}, "limit": 1000},
        {"packing": "best_fit"},
        {"packing": "best_fit", "from": {"a": 0.5, "b": 0.5}, "limit": 1000},
        {"utk": TANGLE, "seq_len": 128},
        {"utk": {**TANGLE, "longest": 10}, "seq_len": 128},
        {"utk": TANGLE, "seq_len": 128, "packing": "truncate", "from": {"a": 0.5, "b": 0.5}, "limit": 1000},
        {"nextlong": {"chunk": 8}, "seq_len": 64},
        {"nextlong": {"chunk": 8, "longest": 20}, "seq_len": 64, "from": {"a": 0.5, "b": 0.5}, "limit": 1000},
        {"cip": {}},
        {"cip": {"pieces": 3, "longest": 20}, "packing": "truncate", "from": {"a": 0.5, "b": 0.5}, "limit": 1000},
        {"attention": "full", "pose": {"target": 100}},
    ],
)
def test_tokens_in_plus_added_are_tokens_in_rows_plus_dropped(corpora, tokenizer, tmp_path, config):
    counts = build(corpora, tokenizer, tmp_path / "out", **config)
    rows = open_rows(tmp_path / "out")

    length = config.get("seq_len", 32)
    assert counts["rows"] == len(rows) > 3
    assert counts["tokens"] == len(rows) * length
    assert counts["tokens_in"] + counts["tokens_added"] == counts["tokens"] + sum(counts["dropped"].values())
    assert counts == read_manifest(tmp_path / "out")["counts"]
    sources = counts["sources"]
    assert list(sources) == (["a", "b"] if isinstance(config.get("from"), dict) else ["a"])
    assert all(imbalance_of(entry) == 0 for entry in sources.values())
    assert imbalance_of(counts) == 0
    assert sum(entry["tokens"] for entry in sources.values()) + counts["tokens_added"] == counts["tokens"]
    assert counts["dropped"] == dict(sum((Counter(entry["dropped"]) for entry in sources.values()), Counter()))
    if "limit" in config:
        assert len(rows) == -(-config["limit"] // length)
    if "nextlong" in config:
        return  # there a token may be used more than once, as the document's own and as another's negative
    texts = np.concatenate([rows[index].tokens[rows[index].tokens >= 100_000] for index in range(len(rows))])
    assert len(np.unique(texts)) == len(texts), "a token of the corpus was used twice"
    assert len(texts) == counts["tokens"] - sum((rows[index].tokens < 100_000).sum() for index in range(len(rows)))


UPSAMPLE = {"above": 15, "times": 2.5, "keep": 0.5}


@pytest.mark.parametrize("limit", [{}, {"limit": 12_000}])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"packing": "truncate"},
        {"packing": "single_doc", "seq_len": 12},
        {"packing": "best_fit"},
        {"utk": TANGLE, "seq_len": 128},
        {"cip": {"pieces": 2, "longest": 10}, "seq_len": 128},
        {"pose": {"target": 1000}},
    ],
)
def test_upsampling_goes_with_everything_and_the_counts_still_add_up(corpora, tokenizer, tmp_path, config, limit):
    mix = {"from": {"a": 0.5, "b": 0.5}, "upsample": UPSAMPLE}
    counts = build(corpora, tokenizer, tmp_path / "out", **mix, **config, **limit)
    rows = [open_rows(tmp_path / "out")[index] for index in range(counts["rows"])]

    assert counts["tokens_in"] + counts["tokens_added"] == counts["tokens"] + sum(counts["dropped"].values())
    assert all(imbalance_of(entry) == 0 for entry in counts["sources"].values())
    upsample = counts["upsample"]
    marks = counts.get("strategy", {}).get("tokens_added", 0)
    assert upsample["tokens_added"] + marks + counts["padding"] == counts["tokens_added"]
    assert upsample["tokens_added"] == sum(entry["tokens_added"] for entry in counts["sources"].values()) > 0
    assert upsample["tokens_dropped"] == counts["dropped"]["downsampled"] > 0
    assert upsample["long_share_after"] > upsample["long_share_before"] + 0.1
    texts = np.concatenate([row.tokens[row.tokens >= 100_000] for row in rows])
    again = len(texts) - len(np.unique(texts))
    assert 0 < np.unique(texts, return_counts=True)[1].max() <= 3
    if config.get("packing") not in ("single_doc", "truncate"):
        # Apart from the row that was never filled.
        assert again == pytest.approx(upsample["tokens_added"], abs=150)


@pytest.mark.parametrize("pack", ["concat", "best_fit"])
def test_copies_of_a_document_do_not_meet_in_a_row(corpora, tokenizer, tmp_path, pack):
    config = {"seq_len": 128, "packing": pack, "upsample": {"above": 15, "times": 4}}
    counts = build(corpora, tokenizer, tmp_path / "out", **config)
    rows = [open_rows(tmp_path / "out")[index] for index in range(counts["rows"])]
    texts = [row.tokens[row.tokens >= 100_000] for row in rows]
    assert [row for row in texts if len(np.unique(row)) < len(row)] == []
    assert counts["upsample"]["tokens_added"] > 3 * 4000
    assert counts["fill_rate"] > 0.95


@pytest.mark.parametrize("upsample", [{"above": 15, "times": 5}, {"above": 15, "times": 1, "keep": 0.1}])
def test_upsampling_leaves_the_shares_of_sources_as_they_are(corpora, tokenizer, tmp_path, upsample):
    def share_of_a(name: str, **config) -> float:
        counts = build(corpora, tokenizer, tmp_path / name, **{"from": {"a": 3, "b": 2}, **config})
        assert counts["tokens"] > 1500
        return counts["sources"]["a"]["tokens"] / counts["tokens"]

    assert share_of_a("before") == pytest.approx(0.6, abs=0.02)
    assert share_of_a("after", upsample=upsample) == pytest.approx(0.6, abs=0.02)


def test_upsampling_says_how_much_longer_documents_get(corpora, tokenizer, tmp_path):
    counts = build(corpora, tokenizer, tmp_path / "out", upsample={"above": 30, "times": 1, "keep": 0.1})
    lens = open_corpus(corpora["a"]).lens
    before = lens[lens >= 30].sum() / lens.sum()
    assert counts["upsample"]["long_share_before"] == pytest.approx(before)
    kept = lens.sum() - counts["dropped"]["downsampled"]
    assert counts["upsample"]["long_share_after"] == pytest.approx(lens[lens >= 30].sum() / kept)
    assert counts["sources"]["a"]["upsample"] == counts["upsample"]


def test_rows_with_negatives_say_what_they_cost(corpora, tokenizer, tmp_path, capfd):
    counts = build(corpora, tokenizer, tmp_path / "out", nextlong={"chunk": 8}, seq_len=64)
    row = open_rows(tmp_path / "out")[0]

    assert counts["strategy"]["name"] == "nextlong"
    assert counts["strategy"]["tokens_added"] == counts["tokens_added"] > counts["tokens"] / 4
    assert row.attention == "full"
    assert (row.chunk_ids == 0).sum() >= 2, "the document is in several pieces"
    assert "index built in" in capfd.readouterr().err
    assert "seconds" not in json.dumps(counts), "the manifest must be the same for every run"


def test_interleaved_rows_attend_fully_and_cost_nothing(corpora, tokenizer, tmp_path):
    counts = build(corpora, tokenizer, tmp_path / "out", cip={"pieces": 3}, seq_len=128)
    row = open_rows(tmp_path / "out")[0]

    assert counts["strategy"] == {"name": "cip", "tokens_added": 0}
    assert (row.attention, row.loss_mask, row.positions) == ("full", None, None)
    assert len(row.chunk_ids) == len(row.doc_lens) > row.chunk_ids.max() + 1
    owners = np.repeat(row.chunk_ids, row.doc_lens)
    for doc in range(row.chunk_ids.max() + 1):
        assert (np.diff(row.tokens[owners == doc].astype(np.int64)) == 1).all()


def test_skips_give_positions_to_whatever_attends_to_itself(corpora, tokenizer, tmp_path):
    def rows(name: str, **config) -> list:
        counts = build(corpora, tokenizer, tmp_path / name, pose={"target": 1000}, **config)
        return [open_rows(tmp_path / name)[index] for index in range(counts["rows"])]

    for row in rows("documents", packing="best_fit", seq_len=64):
        starts = np.cumsum(row.doc_lens) - row.doc_lens
        assert np.flatnonzero(row.positions == 0).tolist() == starts.tolist()
    full = rows("full", attention="full")
    assert all((np.diff(row.positions) >= 1).all() and row.attention == "full" for row in full)
    assert 900 < max(int(row.positions.max()) for row in full) < 1000
    assert len({int(row.positions.max()) for row in full}) > 10
    interleaved = rows("interleaved", cip={})
    assert all((np.diff(row.positions) >= 1).all() for row in interleaved)


def test_attention_of_a_rows_set_is_what_it_asks_for(corpora, tokenizer, tmp_path):
    build(corpora, tokenizer, tmp_path / "out", attention="full")
    build(corpora, tokenizer, tmp_path / "plain", attention="intra_document")
    assert open_rows(tmp_path / "out")[0].attention == "full"
    assert open_rows(tmp_path / "plain")[0].attention == "intra_document"


@pytest.mark.parametrize(
    "config",
    [
        {"utk": TANGLE, "seq_len": 128},
        {"cip": {}},
        {"nextlong": {"chunk": 8}, "seq_len": 64},
        {"upsample": UPSAMPLE, "packing": "best_fit"},
        {"pose": {"target": 100, "chunks": 3}},
    ],
)
def test_the_same_seed_gives_the_same_files(corpora, tokenizer, tmp_path, config):
    def files(folder: str, seed: int) -> list[bytes]:
        build(corpora, tokenizer, tmp_path / folder / "rows", seed, **config)
        return [path.read_bytes() for path in sorted((tmp_path / folder / "rows").glob("rows-*.arrow"))]

    assert files("first", 0) == files("again", 0)
    assert files("first", 0) != files("other", 1)


def test_a_corpus_of_which_too_little_is_kept_is_refused(corpora, tokenizer, tmp_path):
    upsample = {"above": "1K", "times": 1, "keep": 0.0}
    with pytest.raises(DataError, match=r"upsample keeps too few to fill one row of 32; .* below 1K"):
        build(corpora, tokenizer, tmp_path / "out", upsample=upsample)


def test_rows_follow_the_shares_of_their_sources(corpora, tokenizer, tmp_path):
    build(corpora, tokenizer, tmp_path / "out", **{"from": {"a": 3, "b": 1}, "limit": 4000})
    rows = open_rows(tmp_path / "out")
    tokens = np.concatenate([rows[index].tokens for index in range(len(rows))])
    assert (tokens < 200_000).mean() == pytest.approx(0.75, abs=0.02)
    assert {rows[index].source for index in range(len(rows))} <= {"a", "b", "a+b", "b+a"}


def test_whole_rows_follow_the_shares_although_short_documents_are_dropped(corpora, tokenizer, tmp_path):
    build(corpora, tokenizer, tmp_path / "out", **{"from": {"a": 1, "b": 1}, "seq_len": 16, "packing": "single_doc"})
    rows = open_rows(tmp_path / "out")
    firsts = np.array([rows[index].tokens[0] for index in range(len(rows))])
    assert (firsts < 200_000).mean() == pytest.approx(0.5, abs=0.05)


def test_a_source_that_runs_out_ends_the_rows_and_is_named(corpora, tokenizer, tmp_path, capfd):
    counts = build(corpora, tokenizer, tmp_path / "out", **{"from": {"a": 0.9, "b": 0.1}})
    assert "source a ran out" in capfd.readouterr().err
    assert counts["dropped"]["unread"] > 1000


def test_documents_are_shuffled_by_the_seed(corpora, tokenizer, tmp_path):
    def tokens(name: str, seed: int) -> list[int]:
        build(corpora, tokenizer, tmp_path / name / "rows", seed)
        rows = open_rows(tmp_path / name / "rows")
        return np.concatenate([rows[index].tokens for index in range(len(rows))]).tolist()

    assert tokens("first", 0) == tokens("again", 0)
    assert tokens("first", 0) != tokens("other", 1)
    assert tokens("first", 0) != sorted(tokens("first", 0))


@pytest.mark.parametrize("pack", ["concat", "truncate", "single_doc", "best_fit"])
def test_the_counts_say_what_is_in_the_rows(corpora, tokenizer, tmp_path, pack):
    counts = build(
        corpora, tokenizer, tmp_path / "out", **{"from": {"a": 0.5, "b": 0.5}, "seq_len": 16, "packing": pack}
    )
    rows = [open_rows(tmp_path / "out")[index] for index in range(counts["rows"])]
    lens: dict[str, list[int]] = {"a": [], "b": []}
    for row in rows:
        for begin, size in zip(np.cumsum(row.doc_lens) - row.doc_lens, row.doc_lens.tolist(), strict=True):
            if row.tokens[begin] >= 100_000:
                lens["b" if row.tokens[begin] >= 200_000 else "a"].append(size)

    for name, entry in counts["sources"].items():
        assert entry["lengths"] == histogram(np.array(lens[name]))
        assert entry["tokens"] == sum(lens[name])
        assert entry["truncated"] <= entry["documents"] <= entry["documents_in"] == {"a": 200, "b": 900}[name]
    assert counts["lengths"] == add_up(entry["lengths"] for entry in counts["sources"].values())
    assert counts["truncated"] == sum(entry["truncated"] for entry in counts["sources"].values()) > 0
    used = sum(entry["documents"] for entry in counts["sources"].values())
    assert counts["truncation_rate"] == counts["truncated"] / used
    assert counts["padding"] == sum((row.tokens < 100_000).sum() for row in rows)
    assert counts["fill_rate"] == 1 - counts["padding"] / counts["tokens"]
    assert (counts["padding"] > 0) == (pack == "best_fit")


def test_fit_drops_nothing_and_pads_with_eos(corpora, tokenizer, tmp_path):
    counts = build(corpora, tokenizer, tmp_path / "out", **{"from": "b", "packing": "best_fit", "seq_len": 64})
    rows = [open_rows(tmp_path / "out")[index] for index in range(counts["rows"])]
    assert counts["dropped"] == {}
    assert counts["truncated"] == 0
    assert counts["tokens_added"] == counts["padding"] < 64 + 0.01 * counts["tokens"]
    padding = np.concatenate([row.tokens[~row.loss_mask] for row in rows])
    assert set(padding.tolist()) == {tokenizer.eos_token_id}
    assert (np.concatenate([row.tokens[row.loss_mask] for row in rows]) >= 100_000).all()


def test_a_limit_keeps_the_shares_under_fit(corpora, tokenizer, tmp_path):
    build(corpora, tokenizer, tmp_path / "out", **{"from": {"a": 3, "b": 1}, "limit": 2000, "packing": "best_fit"})
    rows = open_rows(tmp_path / "out")
    tokens = np.concatenate([rows[index].tokens for index in range(len(rows))])
    assert (tokens[tokens >= 100_000] < 200_000).mean() == pytest.approx(0.75, abs=0.04)


def test_reaching_the_limit_is_not_running_out(corpora, tokenizer, tmp_path, capfd):
    counts = build(corpora, tokenizer, tmp_path / "out", **{"from": {"a": 0.9, "b": 0.1}, "limit": 100})
    assert counts["dropped"]["unread"] > 1000
    assert counts["documents"] < 20, "documents that were only drawn ahead are not counted"
    assert "ran out" not in capfd.readouterr().err


def test_an_error_while_writing_reaches_the_caller(corpora, tokenizer, tmp_path, monkeypatch):
    def refuse(self, row):
        raise OSError("disk full")

    monkeypatch.setattr(RowWriter, "append", refuse)
    with pytest.raises(OSError, match="disk full"):
        build(corpora, tokenizer, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("pack", ["single_doc", "best_fit"])
def test_what_cannot_be_tangled_is_refused(pack):
    with pytest.raises(ValidationError, match=f"packing: {pack} .* use concat or truncate"):
        DatasetConfig.model_validate({"from": "a", "seq_len": 128, "packing": pack, "utk": TANGLE})


def test_tangled_rows_attend_fully_and_name_the_tokens_they_add(corpora, tokenizer, tmp_path):
    size = len(tokenizer)
    counts = build(corpora, tokenizer, tmp_path / "out", utk=TANGLE, seq_len=128)
    row = open_rows(tmp_path / "out")[0]

    assert len(tokenizer) == size, "the caller's tokenizer was changed"
    assert list(counts["added_tokens"]) == list(KNOTS)
    assert counts["strategy"]["tokens_added"] == counts["tokens_added"] > 0
    assert row.attention == "full"
    assert set(range(size, size + 7)) <= set(row.tokens.tolist()), "two hops use all knots but the last two"
    assert row.loss_mask.dtype == np.bool_
    assert not row.loss_mask[0]


def test_longest_lets_pieces_of_long_documents_share_a_row_with_others(corpora, tokenizer, tmp_path):
    write_corpus(corpora["b"], [5000, 5000], start=200_000)
    tangle = {"probability": 0.0, "longest": 16}
    build(corpora, tokenizer, tmp_path / "out", **{"from": "b", "utk": tangle, "seq_len": 4096})
    row = open_rows(tmp_path / "out")[0]
    starts = row.tokens[np.cumsum(row.doc_lens) - row.doc_lens]
    assert row.doc_lens.max() == 16
    assert 0.3 < (starts < 205_000).mean() < 0.7


def test_plain_rows_attend_within_documents_and_have_no_mask(corpora, tokenizer, tmp_path):
    counts = build(corpora, tokenizer, tmp_path / "out")
    row = open_rows(tmp_path / "out")[0]
    assert (row.attention, row.loss_mask, row.source) == ("intra_document", None, "a")
    assert "added_tokens" not in counts


def test_rows_are_rebuilt_only_when_something_changed(corpora, tokenizer, tmp_path, capfd):
    def said(**changes) -> str:
        build(corpora, tokenizer, tmp_path / "out", **changes)
        return capfd.readouterr().err

    assert "not built yet" in said()
    assert said() == "dataset out: up to date\n"
    assert "changed settings: dataset" in said(seq_len=16)
    assert "changed settings: dataset, seed" in said(seed=3)
    write_corpus(corpora["a"], [500], start=0)
    assert "changed inputs: corpus a" in said(seed=3)


def test_too_little_text_is_refused(corpora, tokenizer, tmp_path):
    with pytest.raises(DataError, match=r"dataset out: .* tokens do not fill one row of 64K"):
        build(corpora, tokenizer, tmp_path / "out", seq_len="64K")
    with pytest.raises(
        DataError, match=r"dataset out: packing: single_doc needs documents of at least 64 .* source a has 59;"
    ):
        build(corpora, tokenizer, tmp_path / "out", seq_len=64, packing="single_doc")
    assert not (tmp_path / "out").exists()


def test_the_manifest_is_plain_json(corpora, tokenizer, tmp_path):
    build(corpora, tokenizer, tmp_path / "out", utk=TANGLE, seq_len=128)
    assert json.loads((tmp_path / "out/manifest.json").read_text())["settings"]["dataset"]["from"] == "a"
