"""EXACT's weights against a reference that looks at one label after another."""

import math
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from factory import RowList, build_stage, random_row
from unspool.core.errors import ConfigError
from unspool.data.packing.row import Row, attended_lens
from unspool.training.batch import build_batch
from unspool.training.losses.exact import ExactLoss, count_contexts, tail_edges

CONTEXT = 64
# Long and short documents, masked labels, and rows that attend across documents.
LONG = [random_row((40, 24), 0), random_row((64,), 1, mask=0.3), random_row((9, 33, 2, 20), 2)]
TANGLED = [random_row((10, 22), 3, attention="full"), random_row((1, 30, 1), 4, mask=0.5, attention="full")]
ROWS: dict[str, Any] = {"long": LONG, "tangled": TANGLED}
MIX = {"long": 3.0, "tangled": 1.0}


def stage_of(**loss: Any):
    return build_stage(
        context_length=CONTEXT, batch_tokens=CONTEXT, mix=MIX, loss={"weights": "exact", "threshold": 8} | loss
    )


def weights_of(stage, rows=ROWS):
    return stage.loss.build(stage, stage.loss.measure(stage, {name: RowList(found) for name, found in rows.items()}))


def plain_contexts(row: Row, attention: str = "intra_document") -> list[int | None]:
    """The number of tokens that each label's prediction sees; None without a label."""
    found: list[int | None] = []
    document_start = 0
    for doc_len in row.doc_lens.tolist():
        for at in range(document_start, document_start + doc_len):
            is_last = at == document_start + doc_len - 1
            is_masked = row.loss_mask is not None and not is_last and not row.loss_mask[at + 1]
            start = 0 if "full" in (attention, row.attention) else document_start
            found.append(None if is_last or is_masked else at - start + 1)
        document_start += doc_len
    return found


def plain_weights(attention: str, threshold: int, extra: float) -> dict[int, float]:
    """The weight of every effective context of the mix, by counting labels one by one."""

    def bin_of(context: int) -> int:
        return -1 if context < threshold else int(math.log2(context / threshold))

    share: dict[int, Fraction] = {}
    for name, rows in ROWS.items():
        tokens = sum(len(row.tokens) for row in rows)
        for row in rows:
            for context in plain_contexts(row, attention):
                if context is not None:
                    part = Fraction(int(MIX[name]), tokens)
                    share[bin_of(context)] = share.get(bin_of(context), Fraction(0)) + part
    total = sum(share.values())
    tail = [number for number in share if number >= 0]
    return {
        context: 1
        - extra
        + (extra / (len(tail) * float(share[bin_of(context)] / total)) if bin_of(context) in tail else 0.0)
        for context in range(1, CONTEXT)
    }


@pytest.mark.parametrize("attention", ["intra_document", "full"])
@pytest.mark.parametrize(("threshold", "extra"), [(8, 0.5), (5, 0.2), (40, 0.9)])
def test_weights_are_those_of_the_reference(attention, threshold, extra):
    stage = stage_of(threshold=threshold, extra=extra).model_copy(update={"attention": attention})
    by_context = plain_weights(attention, threshold, extra)
    weights = weights_of(stage)

    for row in [*LONG, *TANGLED]:
        batch = build_batch([row], attention=attention, weigh=weights.of_row)
        wanted = [0.0 if context is None else by_context[context] for context in plain_contexts(row, attention)]
        assert batch.weights.numpy() == pytest.approx(wanted, rel=1e-6)


def test_the_mean_over_the_mix_is_1_and_the_tail_has_its_share():
    weights = weights_of(stage_of(extra=0.3))
    mean, total, tail = 0.0, 0.0, 0.0
    for name, rows in ROWS.items():
        for row in rows:
            batch = build_batch([row], attention="intra_document", weigh=weights.of_row)
            share = MIX[name] / sum(len(each.tokens) for each in rows)
            contexts = np.array([context or 0 for context in plain_contexts(row)])
            mean += share * float(batch.weights.sum())
            total += share * int((contexts > 0).sum())
            tail += share * int((contexts >= 8).sum())
            assert (batch.weights.numpy()[contexts == 0] == 0).all()

    assert mean == pytest.approx(total, rel=1e-6)
    found = stage_of(extra=0.3).loss
    edges = tail_edges(8, CONTEXT)
    shares = found.measure(stage_of(extra=0.3), {name: RowList(rows) for name, rows in ROWS.items()})["shares"]
    by_bin = np.array(shares) * found.bin_weights(shares)
    # Beyond what all labels get, each bin of the tail has the same weight.
    assert by_bin[1:] - 0.7 * np.array(shares[1:]) == pytest.approx([0.3 / len(edges)] * len(edges))
    assert sum(shares[1:]) == pytest.approx(tail / total)


@pytest.mark.parametrize("attention", ["intra_document", "full"])
@pytest.mark.parametrize("row", [*LONG, *TANGLED])
def test_labels_are_counted_by_document_lengths_as_one_by_one(row, attention):
    edges = tail_edges(5, CONTEXT)
    kind = "full" if attention == "full" else row.attention

    found = count_contexts(row, attended_lens(row.doc_lens, kind), edges)

    contexts = [context for context in plain_contexts(row, attention) if context is not None]
    wanted = [sum(low <= context < high for context in contexts) for low, high in pairwise([1, *edges, 999])]
    assert found.tolist() == wanted


def test_weights_do_not_depend_on_where_a_document_is_packed():
    weights = weights_of(stage_of())
    first, second = random_row((40, 24), 5), random_row((24, 40), 5)

    a, b = (
        build_batch([row], attention="intra_document", weigh=weights.of_row).weights.tolist() for row in (first, second)
    )

    assert (a[:40], a[40:]) == (b[24:], b[:24])
    assert a[:24] != a[40:] or a[23] == 0, "all weights are equal, so nothing was tried"


def test_a_tangled_row_counts_its_context_from_the_rows_start():
    weights = weights_of(stage_of())
    tangled, packed = random_row((10, 54), 6, attention="full"), random_row((10, 54), 6)

    of_tangled, of_packed = (
        build_batch([row], attention="intra_document", weigh=weights.of_row).weights for row in (tangled, packed)
    )

    assert of_tangled[10] == of_tangled[13] > of_packed[10], "the second document's start sees the first document"


def test_a_threshold_beyond_all_contexts_is_refused():
    with pytest.raises(ConfigError, match=r"stage one: loss.threshold 60: .*lower it"):
        weights_of(stage_of(threshold=60), {"long": [random_row((40, 24), 0)], "tangled": TANGLED})


def test_a_rare_bin_is_named_in_a_warning(caplog):
    rows = {"long": [random_row((8,) * 8, seed) for seed in range(40)], "tangled": [random_row((2,) * 16, 1)]}
    weights_of(stage_of(threshold=7, extra=0.9), rows)

    assert not caplog.records
    rows["long"][0] = random_row((8,) * 6 + (16,), 0)
    weights_of(stage_of(threshold=8, extra=0.9), rows)
    assert "largest weight is" in caplog.text


def test_the_default_threshold_is_an_eighth_of_the_context_length():
    stage = stage_of(threshold=None)

    assert stage.loss.measure(stage, {name: RowList(rows) for name, rows in ROWS.items()})["edges"] == [8, 16, 32]
    assert isinstance(stage.loss, ExactLoss)
