"""The loss of a tiny model trained from scratch is what it always was; tools/golden_loss.py writes it anew."""

import json

import pytest

from unspool.training import loop as loop_module

from .golden import GOLDEN, STEPS, train_golden

# Another CPU, or another version of torch, adds up in another order: a rounding (6e-8) is amplified in some ten updates
# to 1e-5 and more. Of the mistakes that this is for, a wrong rate or mask, none is below a hundredth.
TOLERANCE = 1e-3


def test_the_loss_falls_as_it_was_written_down(tmp_path):
    golden = json.loads(GOLDEN.read_text())["losses"]
    assert len(golden) == STEPS
    assert golden[-1] < 0.7 * golden[0], "nothing is learnt, so that nothing is compared"

    assert train_golden(tmp_path) == pytest.approx(golden, rel=TOLERANCE)


def test_another_learning_rate_would_be_noticed(tmp_path, monkeypatch):
    true = loop_module.learning_rate
    monkeypatch.setattr(loop_module, "learning_rate", lambda stage, step: 1.03 * true(stage, step))

    golden = json.loads(GOLDEN.read_text())["losses"]
    assert train_golden(tmp_path) != pytest.approx(golden, rel=TOLERANCE)
