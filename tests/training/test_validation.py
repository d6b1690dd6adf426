"""Loss on rows that are not trained on, by position."""

import numpy as np
import pytest
import torch

from factory import build_model, build_stage, packed_inputs, random_row, save_rows
from unspool.core.artifacts import publish
from unspool.core.errors import ConfigError
from unspool.data.packing.store import RowWriter
from unspool.training.metrics import validation
from unspool.training.metrics.validation import build_validation, warn_if_trained_on

ROWS = [random_row((90, 38), 50, mask=0.2), random_row((128,), 51, mask=0.0), random_row((1, 60, 67), 52, mask=0.1)]
STAGE = build_stage(context_length=128, batch_tokens=128, tokens=256, validation={"dataset": "held", "samples": 3})


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    return save_rows(tmp_path_factory.mktemp("rows") / "held", ROWS)


def plain_losses(model, row):
    """(place of the token, its loss) of every token asked for, one document at a time."""
    start = 0
    for doc_len in row.doc_lens.tolist():
        ids = torch.from_numpy(row.tokens[start : start + doc_len].astype(np.int64))
        with torch.no_grad():
            logits = model(**packed_inputs(ids[None], (doc_len,)), use_cache=False).logits[0].double()
        losses = -logits.log_softmax(-1)
        for place in range(1, doc_len):
            if row.loss_mask[start + place]:
                yield place, float(losses[place - 1, ids[place]])
        start += doc_len


def test_the_loss_by_position_is_that_of_each_document_alone(held):
    model = build_model()
    wanted = [pair for row in ROWS for pair in plain_losses(model, row)]

    found = build_validation(STAGE, held, model, seed=0).measure(model)

    assert found["n"] == len(wanted)
    assert found["loss"] == pytest.approx(np.mean([loss for _, loss in wanted]), rel=1e-5)
    assert [(bucket["from"], bucket["to"]) for bucket in found["buckets"]] == [(0, 64), (64, 128)]
    for bucket in found["buckets"]:
        inside = [loss for place, loss in wanted if bucket["from"] <= place < bucket["to"]]
        assert bucket["n"] == len(inside) > 0
        assert bucket["value"] == pytest.approx(np.mean(inside), rel=1e-5)


def test_a_place_counted_from_the_row_would_be_noticed(held, monkeypatch):
    model = build_model()
    right = build_validation(STAGE, held, model, seed=0).measure(model)
    monkeypatch.setattr(validation, "position_ids", lambda lens: np.arange(lens.sum()))
    assert build_validation(STAGE, held, model, seed=0).measure(model)["buckets"] != right["buckets"]


def test_full_attention_sees_the_whole_row(held):
    model = build_model()
    full = build_stage(
        context_length=128, batch_tokens=128, tokens=256, attention="full", validation={"dataset": "held"}
    )
    first, last = build_validation(full, held, model, seed=0).measure(model)["buckets"]
    assert last["n"] > build_validation(STAGE, held, model, seed=0).measure(model)["buckets"][1]["n"]
    assert first["n"] + last["n"] == sum(num_asked())


def num_asked():
    # Labels at the end of a document ask for nothing, whoever may look at whom.
    for row in ROWS:
        starts = np.cumsum(row.doc_lens) - row.doc_lens
        asked = row.loss_mask.copy()
        asked[starts] = False
        yield int(asked.sum())


def test_the_same_rows_are_looked_at_each_time_and_chosen_by_the_seed(held):
    one = build_stage(context_length=128, batch_tokens=128, tokens=256, validation={"dataset": "held", "samples": 1})
    model = build_model()

    def looked_at(seed):
        (batch,) = build_validation(one, held, model, seed=seed).batches
        return batch.tokens.tolist()

    assert looked_at(0) == looked_at(0)
    assert len({tuple(looked_at(seed)) for seed in range(8)}) == 3


def test_short_rows_are_read_several_at_a_time(tmp_path):
    folder = save_rows(tmp_path / "held", [random_row((32,), seed) for seed in range(6)])
    stage = build_stage(context_length=128, batch_tokens=128, tokens=256, validation={"dataset": "held", "samples": 6})
    sizes = [len(batch.tokens) for batch in build_validation(stage, folder, build_model(), seed=0).batches]
    assert sizes == [128, 64]


def test_rows_longer_than_the_context_are_refused(held):
    stage = build_stage(validation={"dataset": "held"})
    with pytest.raises(ConfigError, match=r"validation\.dataset held has rows of 128, longer than context_length 32"):
        build_validation(stage, held, build_model(), seed=0)


def test_tokens_that_the_model_does_not_know_are_refused(held):
    with pytest.raises(ConfigError, match="tokens outside the model's vocabulary"):
        build_validation(STAGE, held, build_model(vocab_size=200), seed=0)


def test_rows_of_the_mix_are_refused():
    with pytest.raises(ValueError, match=r"validation.dataset long is in the mix"):
        build_stage(validation={"dataset": "long"})


def rows_of(folder, corpora):
    inputs = {f"corpus {source}": digest for source, digest in corpora.items()}
    with (
        publish(folder, kind="dataset", inputs=inputs, settings={}) as draft,
        RowWriter(draft.folder, row_len=128, masked=True) as writer,
    ):
        writer.append(ROWS[1])
    return folder


def test_rows_made_of_what_is_trained_on_are_told_of(tmp_path, capsys):
    trained = {"long": rows_of(tmp_path / "long", {"books": "b1", "wiki": "w1"})}
    for name, corpora, told in (
        ("same", {"library": "b1", "news": "n1"}, "is packed from library, which the stage also trains on"),
        ("other", {"books": "b2"}, ""),
    ):
        warn_if_trained_on(STAGE, rows_of(tmp_path / name, corpora), trained)
        said = capsys.readouterr().err
        assert told in said if told else said == ""
