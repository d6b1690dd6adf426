"""Real kills: a stage that is killed at random moments ends with the bits of one that never was."""

from dataclasses import replace

import pytest
import torch

import unspool.training.checkpoint.resume
import unspool.verification.interruptions
from unspool.training.optim.updater import Updater
from unspool.verification.case import SkippedError
from unspool.verification.fixtures import user_model
from unspool.verification.interruptions import run_kills
from unspool.verification.run import build_checks, run_check

CPU = torch.device("cpu")


def test_two_kills_in_processes_of_their_own_change_no_bit(built):
    found = run_check(build_checks(None, kills=2)["sigkill"], built("llama"))
    assert [(result.quantity, result.status) for result in found] == [("bits", "passed"), ("ledger", "passed")]
    assert all(result.detail.startswith("2 kills, ") for result in found)


@pytest.mark.gpu
def test_kills_on_a_gpu_change_no_bit(built):
    found = run_check(build_checks(None)["sigkill"], replace(built("llama"), device=torch.device("cuda")))
    if found[0].status == "skipped":
        pytest.skip(found[0].detail)  # where sums come in any order, nothing can be said of those that were killed
    assert [(result.quantity, result.status) for result in found] == [("bits", "passed"), ("ledger", "passed")], found


def test_cuda_is_not_initialized_before_runs_are_forked(tmp_path, monkeypatch):
    """Processes that are forked after that could not use it."""

    def woken():
        raise AssertionError("CUDA was asked for something")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for module in (torch.cuda, torch.cuda.random):
        monkeypatch.setattr(module, "_lazy_init", woken)
    assert unspool.verification.interruptions._inputs(tmp_path, seed=0).datasets


def test_a_run_that_fails_says_why(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("no space left")

    monkeypatch.setattr(unspool.verification.interruptions, "run_stage", fail)
    with pytest.raises(RuntimeError, match="an uninterrupted run failed: OSError: no space left"):
        run_kills(tmp_path, kills=1, seed=0, device=CPU)


@pytest.mark.slow
def test_twenty_kills_change_no_bit(tmp_path):
    outcome = run_kills(tmp_path, kills=20, seed=1, device=CPU)
    assert (outcome.kills, outcome.differing, outcome.gaps) == (20, [], [])


def without_moments(monkeypatch):
    monkeypatch.setattr(Updater, "load_optimizer", lambda updater, saved: None)


def without_cutting_the_ledger(monkeypatch):
    monkeypatch.setattr(unspool.training.checkpoint.resume, "write_atomic", lambda path, text: None)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [without_moments, without_cutting_the_ledger])
def test_kills_bring_a_mistake_to_light(mistake, tmp_path, monkeypatch):
    mistake(monkeypatch)
    outcome = run_kills(tmp_path, kills=6, seed=0, device=CPU)
    assert outcome.differing


def test_a_model_of_the_users_is_not_killed(built, tmp_path):
    case = built("llama")
    check = build_checks(None)["sigkill"]
    named = case.__class__(**vars(case) | {"spec": user_model(str(tmp_path))})
    with pytest.raises(SkippedError, match="unspool verify --only sigkill"):
        check.measure(named)
