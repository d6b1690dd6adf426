"""Shares of sources within a dataset hold in trained tokens, for any packing."""

import json
import logging
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from unspool.core.artifacts import seal
from unspool.core.errors import DataError
from unspool.data.corpus.store import CorpusWriter
from unspool.data.packing.build import build_rows
from unspool.data.packing.config import DatasetConfig
from unspool.data.packing.row import IGNORE, labels
from unspool.data.packing.store import open_rows

from .conftest import build_tokenizer

SHARES = {"a": 0.5, "b": 0.3, "c": 0.2}
# Tokens below are special tokens and labels of strategies; each source has the next so many for itself.
SPAN = 2000
SEQ_LEN = 512
LIMIT = 200 * SEQ_LEN
TANGLE = {"min_split": 16}


def write_corpus(folder: Path, name: str, lens: list[int], *, trained: float | None = None) -> Path:
    rng = np.random.default_rng(ord(name))
    partial = folder / f"{name}.making"
    partial.mkdir(parents=True)
    with CorpusWriter(partial / "docs-00000.arrow", masked=trained is not None) as writer:
        for number, size in enumerate(lens):
            tokens = rng.integers(0, SPAN, size=size) + SPAN * (1 + "abc".index(name))
            # The trained part is last, as in conversations.
            mask = None if trained is None else np.arange(size) >= size - trained * size
            writer.append(f"d:{number}", tokens.astype(np.uint32), mask)
    seal(partial, folder / name, kind="corpus", inputs={}, settings={}, counts={})
    return folder / name


def skewed_lens() -> dict[str, list[int]]:
    """Documents far shorter than a row, shorter, and a multiple of it."""
    rng = np.random.default_rng(0)
    kinds = {"a": (20, 4000), "b": (100, 700), "c": (1600, 120)}
    return {
        name: np.maximum(2, mean * rng.lognormal(-0.1, 0.5, size=count)).astype(int).tolist()
        for name, (mean, count) in kinds.items()
    }


@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("shares")
    return {name: write_corpus(folder, name, lens) for name, lens in skewed_lens().items()}


@pytest.fixture(scope="module")
def bpe():
    return build_tokenizer()


def build(corpora: dict[str, Path], bpe, out: Path, **config) -> tuple[dict, dict[str, float]]:
    """The counts of a dataset, and its shares as its labels show them."""
    settings = DatasetConfig.model_validate({"from": SHARES, "seq_len": SEQ_LEN, **config})
    counts = build_rows(settings, corpora, out, tokenizer=bpe, seed=0)
    rows = open_rows(out)
    found = np.zeros(4, dtype=np.int64)
    for row in (rows[index] for index in range(len(rows))):
        targets = labels(row.tokens, row.doc_lens, row.loss_mask)
        found += np.bincount(targets[targets != IGNORE] // SPAN, minlength=4)
    trained = dict(zip("abc", found[1:].tolist(), strict=True))
    total = sum(trained[name] for name in settings.shares)
    return counts, {name: trained[name] / total for name in settings.shares}


NEXTLONG = {"nextlong": {"chunk": 64}, "seq_len": 1024, "limit": 20 * 1024}
COMBINATIONS = {
    "concat": {},
    "concat, utk": {"utk": TANGLE},
    "concat, cip": {"cip": {"pieces": 4}},
    "concat, upsample": {"upsample": {"above": 150, "times": 3, "keep": 0.9}},
    "concat, nextlong": NEXTLONG,
    "truncate": {"packing": "truncate"},
    "truncate, utk": {"packing": "truncate", "utk": TANGLE},
    "truncate, pose": {"packing": "truncate", "pose": {"target": 4096}},
    "truncate, nextlong": {"packing": "truncate", **NEXTLONG},
    "best_fit": {"packing": "best_fit"},
    "best_fit, upsample": {"packing": "best_fit", "upsample": {"above": 150, "times": 3}},
    "single_doc": {"packing": "single_doc", "from": {"b": 0.6, "c": 0.4}, "seq_len": 128, "limit": 160 * 128},
}


@pytest.mark.parametrize("limit", [LIMIT, None])
@pytest.mark.parametrize("name", COMBINATIONS)
def test_shares_hold_in_trained_tokens(corpora, bpe, tmp_path, name, limit):
    config = {"limit": limit, **COMBINATIONS[name]}
    if limit is None:
        if "nextlong" in name:
            pytest.skip("without a limit it would make a thousand rows")
        config["limit"] = None
    counts, realized = build(corpora, bpe, tmp_path / "rows", **config)

    wanted = config.get("from", SHARES)
    assert realized == pytest.approx(wanted, abs=0.01)
    # The manifest agrees with the labels.
    assert {name: entry["realized"] for name, entry in counts["shares"].items()} == pytest.approx(realized, abs=1e-9)
    assert {name: entry["requested"] for name, entry in counts["shares"].items()} == pytest.approx(wanted)
    if limit:
        assert counts["rows"] * config.get("seq_len", SEQ_LEN) == config["limit"]


@pytest.mark.parametrize("packing", ["concat", "truncate", "best_fit"])
def test_shares_hold_where_a_loss_mask_leaves_little_of_one_source(bpe, tmp_path, packing):
    lens = skewed_lens()
    corpora = {name: write_corpus(tmp_path, name, lens[name], trained={"b": 0.4}.get(name)) for name in "abc"}
    shares = {"a": 0.5, "b": 0.15, "c": 0.35}
    counts, realized = build(corpora, bpe, tmp_path / "rows", packing=packing, **{"from": shares, "limit": LIMIT})
    assert realized == pytest.approx(shares, abs=0.01)
    assert sum(entry["trained_tokens"] for entry in counts["shares"].values()) == counts["trained_tokens"]


def test_shares_hold_when_one_document_is_larger_than_its_share(bpe, tmp_path):
    """20 rows, of which c may have 4, from documents of 25 rows; what is cut off is counted."""
    lens = {"a": [20] * 3000, "b": [100] * 500, "c": [25 * SEQ_LEN] * 3}
    corpora = {name: write_corpus(tmp_path, name, lens[name]) for name in "abc"}
    counts, realized = build(corpora, bpe, tmp_path / "rows", limit=20 * SEQ_LEN)
    assert realized == pytest.approx(SHARES, abs=0.01)
    assert counts["dropped"]["share"] >= 21 * SEQ_LEN


def test_long_documents_stay_whole_where_they_do_not_matter(corpora, bpe, tmp_path):
    counts, _ = build(corpora, bpe, tmp_path / "rows")
    cut = counts["dropped"].get("share", 0)
    assert cut <= 2 * max(skewed_lens()["c"]), "more than the last document of a source was cut"


# A source that runs out


def test_a_source_that_runs_out_is_named_with_its_missing_tokens_and_working_remedies(corpora, bpe, tmp_path):
    shares = {"a": 0.1, "b": 0.8, "c": 0.1}
    with pytest.raises(DataError, match=r"source b runs out: its share of 0\.8") as refused:
        build(corpora, bpe, tmp_path / "rows", **{"from": shares, "limit": LIMIT})
    assert not (tmp_path / "rows").exists()

    words = str(refused.value).split()
    options = {name: words[words.index(name) + 1].rstrip(".,") for name in ("max_epochs:", "to", "limit:")}
    share = float(words[len(words) - 1 - words[::-1].index("to") + 1].rstrip(","))
    repeated = {"from": shares, "limit": LIMIT, "max_epochs": int(options["max_epochs:"])}
    lower = {"from": {"a": 0.1, "b": share, "c": 0.9 - share}, "limit": LIMIT}
    shorter = {"from": shares, "limit": int(options["limit:"])}
    for number, config in enumerate((repeated, lower, shorter)):
        _, realized = build(corpora, bpe, tmp_path / f"rows-{number}", **config)
        assert realized == pytest.approx(config["from"], abs=0.01)
    missing = next(word for word, after in pairwise(words) if after == "are")
    total = sum(skewed_lens()["b"])
    assert float(missing.rstrip("K")) * 1000 == pytest.approx(0.8 * LIMIT - total, rel=0.05)


def test_a_source_that_truncation_uses_up_is_named_after_the_fact(bpe, tmp_path):
    """There is text enough for the limit, but rows keep little of each document."""
    lens = skewed_lens()
    corpora = {name: write_corpus(tmp_path / "corpora", name, lens[name]) for name in "abc"}
    shares = {"a": 0.2, "b": 0.1, "c": 0.7}
    assert sum(lens["c"]) > 0.7 * LIMIT
    with pytest.raises(DataError, match="source c runs out"):
        build(corpora, bpe, tmp_path / "rows", packing="truncate", **{"from": shares, "limit": LIMIT})
    assert not (tmp_path / "rows").exists()


def test_a_source_without_a_document_of_a_row_is_refused(corpora, bpe, tmp_path):
    with pytest.raises(DataError, match=r"source a has no document of 512 tokens that packing: single_doc"):
        build(corpora, bpe, tmp_path / "rows", packing="single_doc")


def test_repeated_sources_use_up_each_epoch_before_the_next(corpora, bpe, tmp_path):
    config = {"from": "b", "packing": "best_fit", "max_epochs": 2}
    once = build_rows(
        DatasetConfig.model_validate({"seq_len": SEQ_LEN, **config, "max_epochs": 1}),
        corpora,
        tmp_path / "once",
        tokenizer=bpe,
        seed=0,
    )
    twice = build_rows(
        DatasetConfig.model_validate({"seq_len": SEQ_LEN, **config}), corpora, tmp_path / "twice", tokenizer=bpe, seed=0
    )
    assert twice["tokens"] - twice["padding"] == 2 * (once["tokens"] - once["padding"])
    assert twice["tokens_added"] - twice["padding"] == once["tokens_in"]


# Reports


def test_realized_shares_and_too_few_rows_are_logged(corpora, bpe, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    build(corpora, bpe, tmp_path / "rows", limit=LIMIT)
    assert re.search(r"shares of trained tokens: a (49|50)\.\d\d% \(requested 50\.00%\), b ", caplog.text)
    assert "off by" not in caplog.text
    config = {"packing": "single_doc", "from": {"b": 0.6, "c": 0.4}, "seq_len": 128, "limit": 3 * 128}
    counts, _ = build(corpora, bpe, tmp_path / "few", **config)
    assert "too few rows" in caplog.text
    assert json.loads((tmp_path / "few/manifest.json").read_text())["counts"]["shares"] == counts["shares"]


def test_the_same_seed_gives_the_same_mixed_rows(corpora, bpe, tmp_path):
    for name in ("first", "again"):
        build(corpora, bpe, tmp_path / name / "rows", packing="truncate", limit=LIMIT)
    files = [(tmp_path / name / "rows/rows-00000.arrow").read_bytes() for name in ("first", "again")]
    assert files[0] == files[1]
