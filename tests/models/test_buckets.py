import numpy as np

from unspool.models.loss import bucket_edges, bucket_losses, bucket_means


def test_ranges_of_positions_double_up_to_the_length():
    assert bucket_edges(50) == [0, 50]
    assert bucket_edges(64) == [0, 64]
    assert bucket_edges(100) == [0, 64, 100]
    assert bucket_edges(512) == [0, 64, 128, 256, 512]
    assert bucket_edges(4096) == [0, 64, 128, 256, 512, 1024, 2048, 4096]
    assert bucket_edges(5000) == [0, 128, 256, 512, 1024, 2048, 4096, 5000]


def test_a_token_counts_in_the_range_of_its_own_position():
    losses = np.arange(1, 200, dtype=np.float64)  # the token at position p has loss p

    assert bucket_losses(losses) == [
        {"from": 0, "to": 64, "value": 32.0, "n": 63},  # mean of 1…63: the first token has no loss
        {"from": 64, "to": 128, "value": 95.5, "n": 64},
        {"from": 128, "to": 200, "value": 163.5, "n": 72},
    ]


def test_tokens_of_many_documents_meet_in_the_range_of_their_position():
    positions = np.array([70, 1, 2, 130, 3, 65])
    losses = positions * 10.0

    assert bucket_means(losses, positions, length=512) == [
        {"from": 0, "to": 64, "value": 20.0, "n": 3},
        {"from": 64, "to": 128, "value": 675.0, "n": 2},
        {"from": 128, "to": 256, "value": 1300.0, "n": 1},
        {"from": 256, "to": 512, "value": None, "n": 0},  # nothing stands there, which is not a loss of zero
    ]
