import numpy as np
import pytest

from unspool.data.packing.row import IGNORE, attended_lens, labels, position_ids


def test_labels_are_shifted_and_stop_at_each_documents_end():
    tokens = np.array([11, 12, 13, 21, 31, 32], dtype=np.uint32)
    made = labels(tokens, np.array([3, 1, 2], dtype=np.int32), None)
    assert made.tolist() == [12, 13, IGNORE, IGNORE, 32, IGNORE]
    assert made.dtype == np.int64


def test_a_masked_token_is_not_a_prediction_target():
    tokens = np.array([11, 12, 13, 14, 15], dtype=np.uint32)
    mask = np.array([0, 1, 0, 1, 1], dtype=bool)
    assert labels(tokens, np.array([5]), mask).tolist() == [12, IGNORE, 14, 15, IGNORE]


def test_masks_stored_as_bytes_mean_the_same():
    tokens = np.array([11, 12, 13], dtype=np.uint32)
    assert labels(tokens, np.array([3]), np.array([1, 0, 1], dtype=np.uint8)).tolist() == [IGNORE, 13, IGNORE]


def test_the_largest_token_id_survives_the_change_of_type():
    tokens = np.array([0, 2**32 - 1], dtype=np.uint32)
    assert labels(tokens, np.array([2]), None).tolist() == [2**32 - 1, IGNORE]


def test_positions_restart_in_every_document():
    assert position_ids(np.array([3, 1, 2], dtype=np.int32)).tolist() == [0, 1, 2, 0, 0, 1]


@pytest.mark.parametrize(("attention", "positions"), [("intra_document", [0, 1, 0, 1, 2]), ("full", [0, 1, 2, 3, 4])])
def test_a_full_row_counts_as_one_document_for_positions_but_not_for_labels(attention, positions):
    tokens, lens = np.arange(10, 15, dtype=np.uint32), np.array([2, 3], dtype=np.int32)
    assert position_ids(attended_lens(lens, attention)).tolist() == positions
    assert labels(tokens, lens, None)[1] == IGNORE
