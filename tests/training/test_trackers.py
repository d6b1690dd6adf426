"""TensorBoard and W&B get the numbers, and never end a run."""

import importlib
import sys
import types

import pytest

from unspool.core.errors import ConfigError
from unspool.training.metrics import trackers
from unspool.training.metrics.trackers import TENSORBOARD, build_trackers, check_trackers


class FakeRun:
    def __init__(self, options):
        self.options, self.logged, self.metrics, self.finished = options, [], [], False

    def define_metric(self, name, step_metric):
        self.metrics.append((name, step_metric))

    def log(self, values):
        self.logged.append(values)

    def finish(self):
        self.finished = True


@pytest.fixture
def wandb(monkeypatch):
    """A module that keeps what it is told."""
    module = types.ModuleType("wandb")
    module.runs = []
    module.Html = lambda text: ("html", text)

    def init(**options):
        module.runs.append(FakeRun(options))
        return module.runs[-1]

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return module


def opened(work, names=("wandb",), done=0):
    return build_trackers(list(names), work, run="tiny/abf", settings={"lr": 1e-4}, done=done)


def test_wandb_gets_name_settings_and_numbers(wandb, tmp_path):
    tracked = opened(tmp_path)
    tracked.numbers(1, {"train/loss": 3.5})
    tracked.text(1, "samples/0", "a <b> & c")
    tracked.close()

    (run,) = wandb.runs
    assert (run.options["project"], run.options["name"]) == ("unspool", "tiny/abf")
    assert run.options["config"] == {"lr": 1e-4}
    assert run.logged == [
        {"step": 1, "train/loss": 3.5},
        {"step": 1, "samples/0": ("html", "<pre>a &lt;b> &amp; c</pre>")},
    ]
    assert run.metrics == [("*", "step")]
    assert run.finished


def test_wandb_goes_on_with_the_same_run(wandb, tmp_path):
    for done in (0, 4):
        opened(tmp_path, done=done).close()
    opened_elsewhere = tmp_path / "other"
    opened_elsewhere.mkdir()
    opened(opened_elsewhere).close()

    first, again, other = (run.options["id"] for run in wandb.runs)
    assert first == again != other
    assert {run.options["resume"] for run in wandb.runs} == {"allow"}


def test_a_project_that_the_user_has_set_is_left_to_wandb(wandb, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    opened(tmp_path)
    assert wandb.runs[0].options["project"] is None


def test_a_tracker_that_fails_is_told_of_once_and_left_alone(wandb, tmp_path, capsys):
    tracked = opened(tmp_path)
    run = wandb.runs[0]

    def fail(values):
        raise OSError("no route to host\nand more")

    run.log = fail
    for step in range(5):
        tracked.numbers(step, {"train/loss": 1.0})
    tracked.close()

    assert capsys.readouterr().err == (
        "loggers: wandb failed and gets no more metrics (no route to host); metrics.jsonl has all of them\n"
    )
    assert run.finished, "what was sent before is not thrown away"


def test_a_tracker_that_cannot_start_does_not_end_the_run(wandb, tmp_path, capsys):
    def refuse(**options):
        raise RuntimeError("api key not configured")

    wandb.init = refuse
    opened(tmp_path).numbers(1, {"train/loss": 1.0})
    assert "wandb failed and gets no more metrics (api key not configured)" in capsys.readouterr().err


def test_one_that_fails_does_not_silence_another(wandb, tmp_path, monkeypatch):
    class Broken:
        def __init__(self, *args):
            raise OSError("disk full")

    monkeypatch.setitem(trackers._BUILDERS, "tensorboard", Broken)
    tracked = opened(tmp_path, names=("tensorboard", "wandb"))
    tracked.numbers(1, {"train/loss": 1.0})
    assert wandb.runs[0].logged


def test_what_is_not_installed_is_refused_before_any_work(monkeypatch):
    real = importlib.import_module

    def missing(name):
        if name in ("wandb", "tensorboard"):
            raise ImportError(f"No module named {name!r}")
        return real(name)

    monkeypatch.setattr(trackers.importlib, "import_module", missing)
    check_trackers([])
    for name in ("tensorboard", "wandb"):
        with pytest.raises(
            ConfigError, match=rf"loggers: cannot import {name} .*; pip install 'unspool\[track\]', or remove it"
        ):
            check_trackers([name])


def events(folder):
    loader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    found = loader.EventAccumulator(str(folder))
    found.Reload()
    return found


def test_tensorboard_gets_numbers_and_drops_steps_that_come_again(tmp_path):
    pytest.importorskip("tensorboard")
    check_trackers(["tensorboard"])
    first = opened(tmp_path, names=["tensorboard"])
    for step in (1, 2, 3):
        first.numbers(step, {"train/loss": float(step)})
    first.text(3, "samples/0", "# not a heading")
    first.close()
    again = opened(tmp_path, names=["tensorboard"], done=1)
    again.numbers(2, {"train/loss": 20.0})
    again.close()

    scalars = events(tmp_path / TENSORBOARD).Scalars("train/loss")
    assert [(event.step, event.value) for event in scalars] == [(1, 1.0), (2, 20.0)]
