"""LongFilter's gains against plain Python, which documents they choose, and scores that continue after a kill."""

import math
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from unspool.core.artifacts import read_manifest
from unspool.core.errors import DataError
from unspool.data import document_scores
from unspool.data.document_scores import SCORES_FILE, read_scores, score_documents
from unspool.data.packing.build import build_rows
from unspool.data.packing.config import DatasetConfig
from unspool.data.packing.store import open_rows
from unspool.data.strategies.long_context_gain import LongContextGain, document_gain, uses_by_gain

from .test_rows import build, write_corpus

LONG, SHORT = 32, 8


def config(**options) -> LongContextGain:
    return LongContextGain.model_validate({"model": "m", "long": LONG, "short": SHORT, **options})


def copying(ids: np.ndarray) -> np.ndarray:
    """−log p of a model that knows which tokens came before, and how far back the last one was."""
    return np.array([loss_of(ids[at], ids[:at]) for at in range(1, len(ids))])


def loss_of(token: int, context: np.ndarray) -> float:
    found = np.flatnonzero(context == token)
    return 4.0 if not len(found) else 0.2 + 0.01 * (len(context) - int(found[-1]))


def gain_in_plain_python(ids: list[int], long: int, short: int) -> float:
    """The definition: every token with its own long and its own short context."""
    stride, total = max(1, short // 4), 0.0
    for begin in range(0, len(ids), long):
        part = ids[begin : begin + long]
        for at in range(short, len(part)):
            stop = min(at - (at - short) % stride + stride, len(part))
            context = part[stop - short - 1 : at]
            assert short - stride <= len(context) <= short
            with_long = loss_of(part[at], np.array(part[:at]))
            total += math.exp(-with_long) * (loss_of(part[at], np.array(context)) - with_long)
    return total / (len(ids) - 1)


@pytest.mark.parametrize("length", [9, 10, 31, 32, 33, 64, 75, 101])
def test_a_gain_is_the_mean_of_p_times_the_difference_of_losses(length):
    ids = np.random.default_rng(length).integers(20, size=length).astype(np.uint32)
    found = document_gain(copying, ids, long=LONG, short=SHORT)

    assert found == pytest.approx(gain_in_plain_python(ids.tolist(), LONG, SHORT), rel=1e-12)
    assert found > 0 or length < 12


def test_only_repeats_beyond_the_short_context_give_a_gain():
    near, far = np.arange(30, dtype=np.uint32), np.arange(30, dtype=np.uint32)
    near[20], far[20] = near[16], far[2]

    assert document_gain(copying, near, long=LONG, short=SHORT) == 0
    assert document_gain(copying, far, long=LONG, short=SHORT) > 0.05


def test_a_document_up_to_the_short_context_has_gain_0_and_is_not_read():
    def refuse(_: np.ndarray) -> np.ndarray:
        raise AssertionError

    for length in (0, 1, SHORT):
        assert document_gain(refuse, np.zeros(length, dtype=np.uint32), long=LONG, short=SHORT) == 0


def test_the_top_share_is_of_tokens_and_equal_gains_keep_their_order():
    gains, lens = np.array([0.1, 0.5, 0.1, -0.2, 0.3]), np.array([10, 20, 10, 50, 10])

    def used(keep: float) -> list[int]:
        return np.flatnonzero(uses_by_gain(gains, lens, config(keep=keep), np.random.default_rng(0))).tolist()

    assert [used(keep) for keep in (0.1, 0.2, 0.21, 0.4, 0.41, 1.0)] == [
        [1],
        [1],
        [1, 4],
        [0, 1, 4],
        [0, 1, 2, 4],
        [0, 1, 2, 3, 4],
    ]


def test_weights_are_in_proportion_to_gains_up_to_four_uses():
    rng = np.random.default_rng(0)
    gains = np.array([0.0, -1.0, 0.1, 0.2, 0.4] * 2000)
    uses = uses_by_gain(gains, np.full(10_000, 10), config(keep=0.5, use="weight"), rng).reshape(-1, 5)

    assert uses.mean(0) == pytest.approx([0, 0, 5 / 14, 10 / 14, 20 / 14], abs=0.03)
    one = np.array([1.0] + [0.0] * 99)
    assert uses_by_gain(one, np.full(100, 10), config(keep=1.0, use="weight"), rng).tolist() == [4] + [0] * 99


class Counting:
    """A scorer that counts documents' windows, and stops like a killed process after `limit` of them."""

    digest = "copying"

    def __init__(self, limit: int | None = None, losses=copying) -> None:
        self.calls, self._limit, self._losses = 0, limit, losses

    def losses(self, tokens: np.ndarray) -> np.ndarray:
        self.calls += 1
        if self._limit is not None and self.calls > self._limit:
            raise KeyboardInterrupt
        return self._losses(tokens)


LENS = [3, 40, 8, 9, 70, 20, 1, 33]


def corpus_of(folder: Path, order: list[int]) -> Path:
    """Documents of a few different tokens, the same ones in any order."""
    from unspool.core.artifacts import seal
    from unspool.data.corpus.store import CorpusWriter

    partial = folder.with_name(folder.name + ".making")
    partial.mkdir(parents=True)
    with CorpusWriter(partial / "docs-00000.arrow") as writer:
        for number in order:
            writer.append(
                f"d:{number}", np.random.default_rng(number).integers(12, size=LENS[number]).astype(np.uint32)
            )
    seal(partial, folder, kind="corpus", inputs={}, settings={}, counts={})
    return folder


def test_a_gain_does_not_depend_on_the_order_of_documents(tmp_path):
    by_id = []
    for name, order in (("a", list(range(8))), ("b", [5, 1, 7, 0, 3, 2, 6, 4])):
        score_documents(config(), corpus_of(tmp_path / "corpus" / name, order), tmp_path / name, scorer=Counting())
        found = read_scores(tmp_path / name)
        assert found.ids.to_pylist() == [f"d:{number}" for number in order]
        assert found.lens.tolist() == [LENS[number] for number in order]
        by_id.append(dict(zip(found.ids.to_pylist(), found.gains.tolist(), strict=True)))

    assert by_id[0] == by_id[1]
    assert all(by_id[0][f"d:{number}"] == 0 for number in range(8) if LENS[number] <= SHORT)
    assert len(set(by_id[0].values())) > 4


@pytest.mark.parametrize("calls", [0, 1, 7, 30])
def test_a_killed_scoring_continues_with_the_same_bytes(tmp_path, calls):
    corpus = corpus_of(tmp_path / "corpus", list(range(8)))
    whole = Counting()
    counts = score_documents(config(), corpus, tmp_path / "whole", scorer=whole)
    assert (counts["documents"], counts["documents_up_to_short"], counts["tokens_scored"]) == (8, 3, 172)

    out = tmp_path / "killed"
    with pytest.raises(KeyboardInterrupt):
        score_documents(config(), corpus, out, scorer=Counting(calls))
    assert not out.exists()
    rest = Counting()
    assert score_documents(config(), corpus, out, scorer=rest) == counts
    assert (out / SCORES_FILE).read_bytes() == (tmp_path / "whole" / SCORES_FILE).read_bytes()
    assert [path.name for path in sorted(out.iterdir())] == ["manifest.json", SCORES_FILE]
    # Documents d:1 and d:3 need 13 and 2 calls: one for each part, and one for each window of 2 tokens in it.
    assert rest.calls == whole.calls - (15 if calls == 30 else 0)
    assert score_documents(config(), corpus, out, scorer=Counting(0)) == counts  # up to date


def test_damaged_unfinished_gains_are_computed_again(tmp_path):
    corpus = corpus_of(tmp_path / "corpus", list(range(8)))
    score_documents(config(), corpus, tmp_path / "whole", scorer=Counting())
    with pytest.raises(KeyboardInterrupt):
        score_documents(config(), corpus, tmp_path / "out", scorer=Counting(40))
    done = tmp_path / "out.partial" / "work" / "gains.jsonl"
    assert len(done.read_bytes().splitlines()) > 1
    done.write_bytes(done.read_bytes().replace(b"0.", b"1.", 1))
    score_documents(config(), corpus, tmp_path / "out", scorer=Counting())

    assert (tmp_path / "out" / SCORES_FILE).read_bytes() == (tmp_path / "whole" / SCORES_FILE).read_bytes()


def test_losses_that_are_not_finite_are_refused(tmp_path):
    corpus = corpus_of(tmp_path / "corpus", list(range(8)))
    scorer = Counting(losses=lambda ids: np.full(len(ids) - 1, np.nan))
    with pytest.raises(DataError, match=r"document 'd:1' has a gain of nan.*use another one"):
        score_documents(config(), corpus, tmp_path / "out", scorer=scorer)


SCORE = {"model": "m", "long": LONG, "short": SHORT}


@pytest.mark.parametrize("packing", ["concat", "truncate", "single_doc", "best_fit"])
@pytest.mark.parametrize("more", [{}, {"upsample": {"above": 30, "times": 3, "keep": 0.5}}, {"use": "weight"}])
def test_rows_hold_the_chosen_documents_and_every_token_is_accounted_for(tmp_path, tokenizer, packing, more):
    lens = np.random.default_rng(1).integers(5, 60, size=150)
    write_corpus(tmp_path / "a", lens.tolist(), start=1000)
    gains = np.random.default_rng(2).normal(size=150)
    use = {key: value for key, value in more.items() if key == "use"}
    score = {**SCORE, "keep": 0.4, **use}
    settings = {"from": "a", "seq_len": 16, "packing": packing, "score": score, **more}
    settings.pop("use", None)
    folder = scores_folder(tmp_path, gains, lens)
    counts = build_rows(
        DatasetConfig.model_validate(settings),
        {"a": tmp_path / "a"},
        tmp_path / "out",
        tokenizer=tokenizer,
        seed=0,
        scores={"a": folder},
    )

    assert counts["tokens_in"] + counts["tokens_added"] == counts["tokens"] + sum(counts["dropped"].values())
    starts = 1000 + np.cumsum(lens) - lens
    tokens = np.unique(np.concatenate([row.tokens for row in open_rows(tmp_path / "out")]))
    docs = set(np.searchsorted(starts, tokens[tokens >= 1000], side="right") - 1)
    best = np.argsort(-gains)[: int((np.cumsum(lens[np.argsort(-gains)]) < 0.4 * lens.sum()).sum()) + 1]
    if use:
        assert docs and all(gains[doc] > 0 for doc in docs)
    else:
        assert docs <= set(best.tolist())
        assert counts["dropped"]["low_gain"] == lens.sum() - lens[best].sum()
    about = counts["sources"]["a"]["score"]
    assert about["documents"] == 150
    assert about["mean_gain"] == pytest.approx((gains * lens).sum() / lens.sum())
    assert about["mean_gain_used"] > 0.4


def scores_folder(root: Path, gains: np.ndarray, lens: np.ndarray) -> Path:
    """A published scores folder with given gains."""
    folder = root / "scores/a"
    given = iter(gains[lens > SHORT].tolist())
    gains[lens <= SHORT] = 0
    patch = pytest.MonkeyPatch()
    patch.setattr(document_scores, "document_gain", lambda *_, **__: next(given))
    score_documents(config(), root / "a", folder, scorer=Counting())
    patch.undo()
    assert read_scores(folder).gains.tolist() == gains.tolist()
    return folder


def test_datasets_without_score_keep_their_settings(tmp_path, tokenizer):
    write_corpus(tmp_path / "a", [40] * 9, start=1000)
    build({"a": tmp_path / "a"}, tokenizer, tmp_path / "out")
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None and "score" not in manifest["settings"]["dataset"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"short": 20}, r"score.long 32 is less than twice score.short 20"),
        ({"sources": ["b"]}, r"score.sources names 'b', which the dataset does not read; use some of a"),
        ({"keep": 0}, "greater than 0"),
        ({"method": "other"}, "long_context_gain"),
    ],
)
def test_wrong_settings_are_refused(wrong, message):
    with pytest.raises(ValidationError, match=message):
        DatasetConfig.model_validate({"from": "a", "seq_len": 16, "score": {**SCORE, **wrong}})


def test_no_gain_above_0_leaves_nothing_to_weigh(tmp_path, tokenizer):
    write_corpus(tmp_path / "a", [40] * 9, start=1000)
    folder = tmp_path / "scores/a"
    score_documents(config(), tmp_path / "a", folder, scorer=Counting())  # all tokens differ: no gain
    settings = {"from": "a", "seq_len": 16, "score": {**SCORE, "use": "weight"}}
    with pytest.raises(DataError, match=r"score keeps no document of source a.*use score.use: top"):
        build_rows(
            DatasetConfig.model_validate(settings),
            {"a": tmp_path / "a"},
            tmp_path / "out",
            tokenizer=tokenizer,
            seed=0,
            scores={"a": folder},
        )


def test_rows_without_scores_are_refused(tmp_path, tokenizer):
    write_corpus(tmp_path / "a", [40] * 9, start=1000)
    with pytest.raises(AssertionError, match="dataset out: the caller gives no scores of a"):
        build({"a": tmp_path / "a"}, tokenizer, tmp_path / "out", score=SCORE)
    assert not (tmp_path / "out").exists()
