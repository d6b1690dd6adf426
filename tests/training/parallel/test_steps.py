"""What a stage's steps do on several ranks is what they do on one, through rows, step and updater."""

import pytest

from factory import build_stage
from unspool.data.mixture import ModelShape
from unspool.training.loader import build_step
from unspool.training.parallel.mesh import RankCoords

from .steps import BROKEN_STEPS, LONGCE, PACKED, SLOTS, STEP_CASES, off_by, take_steps

# fp32 sums in another order.
ALLOWED = {"loss": 1e-6, "loss of a set": 1e-6, "norm": 1e-5, "gradient": 1e-5, "weight": 1e-3}


@pytest.mark.parametrize("name", STEP_CASES)
def test_steps_on_ranks_are_those_of_one_rank(answers, name):
    case = STEP_CASES[name]
    found, same = answers[case.world][f"steps: {name}"]

    off = off_by(found, take_steps(case, alone=True))
    # Of 8-bit moments, those next to the edge of two levels may turn with the order of sums.
    allowed = ALLOWED | ({"weight": 0.1} if case.optimizer else {})
    assert all(off[key] < most for key, most in allowed.items()), off
    assert same, "a second run has other bits"


@pytest.mark.parametrize("name", BROKEN_STEPS)
def test_steps_that_are_broken_are_noticed(answers, name):
    case, _, shows_in = BROKEN_STEPS[name]
    found = answers[STEP_CASES[case].world][f"steps: {name}"]

    off = off_by(found, take_steps(STEP_CASES[case], alone=True, steps=1))
    assert off[shows_in] > 100 * ALLOWED[shows_in], off


def test_optimizers_that_divided_weights_cannot_have_are_refused(answers):
    found = answers[2]["refusals"]

    assert found.keys() == {"weights", "step"}
    assert all("not supported on several devices" in text for text in found.values())


# Which rows a rank gets


def places(data_ranks: int) -> list[RankCoords]:
    return [
        RankCoords(data_rank=rank, data_ranks=data_ranks, sequence_rank=0, sequence_ranks=1, ring=1)
        for rank in range(data_ranks)
    ]


@pytest.mark.parametrize("data_ranks", [1, 2, 4, 8])
def test_every_row_of_a_step_is_one_ranks_and_picks_are_the_same_on_all(data_ranks):
    stage = build_stage(batch_tokens=256, tokens=256)
    shape = ModelShape(num_layers=2, attention_width=32, num_params=1000)

    steps = [build_step(stage, PACKED, SLOTS["packed"], coords=coords, shape=shape) for coords in places(data_ranks)]

    (alone,) = [build_step(stage, PACKED, SLOTS["packed"])]
    rows = sorted(batch.tokens.tolist() for step in steps for batch in step.batches)
    assert rows == sorted(batch.tokens.tolist() for batch in alone.batches)
    assert sum(step.num_valid for step in steps) == alone.num_valid
    assert {len(step.batches) for step in steps} == {8 // data_ranks}
    assert all(step.picks == alone.picks and step.doc_lens == alone.doc_lens for step in steps)


@pytest.mark.parametrize("data_ranks", [2, 4])
def test_ranks_have_unequal_numbers_of_short_passes(data_ranks):
    """So that the cases with LongCE above try ranks that wait for others with more passes."""
    stage = build_stage(batch_tokens=256, tokens=256, loss=LONGCE)
    weights = stage.loss.build(stage, None)
    shape = ModelShape(num_layers=2, attention_width=32, num_params=1000)

    counts = [
        sum(len(weights.short_passes(batch)) for batch in step.batches)
        for coords in places(data_ranks)
        for step in [build_step(stage, PACKED, SLOTS["packed"], coords=coords, shape=shape, loss_weights=weights)]
    ]

    assert len(set(counts)) > 1, counts
