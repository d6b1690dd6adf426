"""What is written and shown while a stage trains, and what becomes of it when the stage is resumed."""

import io
import json
import re

import pytest
from rich.console import Console

from factory import CPU, build_model, build_stage, build_tokenizer, random_row, save_rows
from unspool.core import progress
from unspool.training.config import is_due
from unspool.training.metrics import flops, logger
from unspool.training.metrics.flops import FlopCount, MfuCounter, SpeedMeter
from unspool.training.metrics.logger import (
    METRICS,
    SAMPLES,
    VALIDATION,
    MetricsLogger,
    StepReport,
    build_logger,
    copy_logs,
)
from unspool.training.metrics.trackers import Trackers

STAGE = build_stage()  # six steps of 64 tokens


class Clock:
    """Goes on only when it is told to."""

    now = 100.0

    def __call__(self):
        return self.now


def report(step, loss=3.25, **changes):
    plain = {"step": step, "loss": loss, "losses": {"long": loss}, "lr": 1e-3, "grad_norm": 0.5, "doc_lens": [32, 32]}
    return StepReport(**plain | changes)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def watched(work, steps, *, stage=STAGE, done=0, **changes):
    """Steps of 2 seconds, of which the rows take a half."""
    clock = Clock()

    def rows():
        for step in steps:
            clock.now += 0.5
            yield step

    with MetricsLogger(stage, work, done=done, device=CPU, clock=clock, **changes) as watching:
        for step in watching.timed(rows()):
            clock.now += 1.5
            watching.step(report(step))
            clock.now += 10  # a checkpoint, which is nobody's time


def test_each_step_is_one_line_with_every_key(tmp_path):
    mfu = MfuCounter(FlopCount(per_token=1e6, layers=()), peak=1e8, devices=2)

    watched(tmp_path, [1, 2], mfu=mfu)

    first, second = lines(tmp_path / METRICS)
    assert 0 < first.pop("memory_gib") < 1000
    assert first == {
        "step": 1,
        "tokens": 64,
        "loss": 3.25,
        "lr": 1e-3,
        "grad_norm": 0.5,
        "seconds": 2.0,
        "data_seconds": 0.5,
        "tokens_per_second": 32.0,
        "mfu": 0.16,  # 64 tokens · 1e6 in 2 s on two devices of 1e8
        "skipped": False,
        "losses": {"long": 3.25},
    }
    assert (second["tokens"], second["seconds"]) == (128, 2.0)


def test_what_is_not_a_number_is_null_in_the_file(tmp_path):
    with MetricsLogger(STAGE, tmp_path, done=0, device=CPU) as watching:
        for _ in watching.timed([1]):
            watching.step(report(1, loss=float("nan"), grad_norm=float("inf"), skipped=True, extra={"reason": "spike"}))
    (line,) = lines(tmp_path / METRICS)
    assert (line["loss"], line["grad_norm"], line["losses"], line["mfu"]) == (None, None, {"long": None}, None)
    assert line["skipped"] is True
    assert line["reason"] == "spike"


def test_a_resumed_stage_drops_what_comes_after_its_checkpoint(tmp_path):
    watched(tmp_path, [1, 2, 3, 4])
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 5, "tok')

    watched(tmp_path, [3, 4, 5, 6], done=2)

    assert [line["step"] for line in lines(tmp_path / METRICS)] == [1, 2, 3, 4, 5, 6]


def test_lines_that_are_not_dropped_would_be_noticed(tmp_path, monkeypatch):
    watched(tmp_path, [1, 2, 3])
    monkeypatch.setattr(logger, "truncate_log", lambda path, done: None)
    watched(tmp_path, [2, 3], done=1)
    assert [line["step"] for line in lines(tmp_path / METRICS)] == [1, 2, 3, 2, 3]


def test_only_the_leader_writes(tmp_path):
    watched(tmp_path, [1, 2], is_leader=False)
    assert list(tmp_path.iterdir()) == []


class Kept:
    """A tracker that keeps what it is told."""

    def __init__(self):
        self.told, self.texts, self.closed = {}, [], False

    def numbers(self, step, values):
        self.told.setdefault(step, {}).update(values)

    def text(self, step, name, text):
        self.texts.append((step, name, text))

    def close(self):
        self.closed = True


def test_trackers_get_the_numbers_and_are_closed_after_an_error(tmp_path):
    kept = Kept()
    watching = MetricsLogger(
        STAGE, tmp_path, done=0, device=CPU, open_trackers=lambda: Trackers({"kept": lambda: kept})
    )
    with pytest.raises(ValueError, match="broken"), watching:
        for _ in watching.timed([1]):
            watching.step(report(1))
            raise ValueError("broken")
    assert kept.told[1]["train/loss"] == kept.told[1]["train/loss/long"] == 3.25
    assert "train/mfu" not in kept.told[1], "what is not known is not drawn"
    assert "train/step" not in kept.told[1]
    assert kept.closed


# Looking at the model


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    return save_rows(tmp_path_factory.mktemp("rows") / "held", [random_row((32,), seed) for seed in range(3)])


LOOKING = build_stage(
    validation={"dataset": "held", "every": 2}, samples={"prompts": ["the \x1b[1mriver"], "every": 4, "tokens": 3}
)


def looked(work, held, steps, *, done=0):
    model = build_model()
    watching = build_logger(
        LOOKING, model, build_tokenizer(), work, done=done, seed=0, rows={"long": held}, validation=held
    )
    with watching:
        for step in watching.timed(steps):
            watching.step(report(step))


def test_the_model_is_looked_at_before_the_first_step_now_and_then_and_after_the_last(tmp_path, held):
    looked(tmp_path, held, range(1, 7))
    assert [line["step"] for line in lines(tmp_path / VALIDATION)] == [0, 2, 4, 6]
    assert [line["step"] for line in lines(tmp_path / SAMPLES)] == [0, 4, 6]
    first = lines(tmp_path / VALIDATION)[0]
    assert first.keys() == {"step", "tokens", "loss", "n", "buckets", "seconds"}
    assert first["n"] == 3 * 31
    assert lines(tmp_path / SAMPLES)[0].keys() == {"step", "prompt", "text"}


def test_a_resumed_stage_makes_up_for_a_look_that_was_due_and_no_other(tmp_path, held):
    looked(tmp_path, held, [1, 2, 3])
    kept = (tmp_path / VALIDATION).read_text().splitlines(keepends=True)
    assert len(kept) == 2
    looked(tmp_path, held, [3, 4], done=2)
    assert (tmp_path / VALIDATION).read_text().splitlines(keepends=True)[:2] == kept, "what is there is not done again"
    (tmp_path / VALIDATION).write_text("".join(kept[:1]))
    looked(tmp_path, held, [3], done=2)
    assert [line["step"] for line in lines(tmp_path / VALIDATION)] == [0, 2]


def test_a_stage_killed_before_validation_makes_up_for_it_when_resumed(tmp_path, held, monkeypatch):
    model = build_model()

    def watching(done):
        return build_logger(
            LOOKING, model, build_tokenizer(), tmp_path, done=done, seed=0, rows={"long": held}, validation=held
        )

    with watching(0) as watch_:
        for step in watch_.timed([1, 2]):
            if step == 2:
                monkeypatch.setattr(watch_, "_probe", lambda step: None)
            watch_.step(report(step))
    assert [line["step"] for line in lines(tmp_path / VALIDATION)] == [0]
    with watching(2):
        pass
    assert [line["step"] for line in lines(tmp_path / VALIDATION)] == [0, 2]


def test_looks_are_told_on_a_line_that_holds_no_control_characters(tmp_path, held, capsys):
    looked(tmp_path, held, [])
    said = capsys.readouterr().err
    assert re.search(r"stage one: step 0  validation loss \d\.\d{3}  \(0-32 \d\.\d{3}\)\n", said)
    assert "stage one: step 0  the \\x1b[1mriver → " in said
    assert "\x1b" not in said


def test_validation_of_rows_that_are_trained_on_is_warned_of_only_where_corpora_are_known(tmp_path, held, capsys):
    looked(tmp_path, held, [])
    assert "also trains on" not in capsys.readouterr().err


def test_looks_come_at_a_tenth_of_the_stage_if_nothing_is_said():
    assert [step for step in range(101) if is_due(None, step, 100)] == list(range(0, 101, 10))
    assert [step for step in range(6) if is_due(None, step, 5)] == [0, 1, 2, 3, 4, 5]
    assert [step for step in range(8) if is_due(3, step, 7)] == [0, 3, 6, 7]


def test_what_was_watched_is_published_with_the_stage(tmp_path, held):
    work, out = tmp_path / "work", tmp_path / "out"
    work.mkdir()
    out.mkdir()
    looked(work, held, [1])
    (work / "tensorboard").mkdir()
    (work / "tensorboard" / "events.1").write_bytes(b"x")
    for kind in ("offline-run-1", "run-2"):
        (work / "wandb" / kind).mkdir(parents=True)
        (work / "wandb" / kind / "data").write_bytes(b"x")
    (work / "checkpoints").mkdir()
    copy_logs(work, out)
    names = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    assert names == [METRICS, SAMPLES, "tensorboard/events.1", VALIDATION, "wandb/offline-run-1/data"]


def test_a_line_of_the_metrics_has_these_keys(tmp_path):
    watched(tmp_path, [1])
    keys = ["step", "tokens", "loss", "lr", "grad_norm", "seconds", "data_seconds", "tokens_per_second", "mfu"]
    keys += ["memory_gib", "skipped", "losses"]
    assert list(lines(tmp_path / METRICS)[0]) == keys


# What is shown


@pytest.mark.parametrize("width", [80, 120])
def test_the_bar_shows_speed_mfu_memory_loss_and_eta(tmp_path, monkeypatch, width):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, highlight=False, width=width)
    monkeypatch.setattr(progress, "console", console)
    monkeypatch.setattr(logger, "peak_memory_gib", lambda device: 72.34)
    mfu = MfuCounter(FlopCount(per_token=1e6, layers=()), peak=74e6)
    stage = build_stage(name="abf-32k", tokens=64 * 1000)

    watched(tmp_path, range(1, 4), stage=stage, mfu=mfu)

    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())
    last = [line for line in plain.replace("\r", "\n").splitlines() if "3/1000" in line][-1]
    # 12 s a step by the wall, 2 s of them training; 997 steps to go.
    for part in ("stage abf-32k", "3/1000", "loss 3.250", "32 tok/s", "MFU 43%", "72.3 GiB", "eta 3:19:24"):
        assert part in last, (part, last)
    assert len(last.rstrip()) <= width
    assert ("━" in last) == (width == 120)


def test_a_log_gets_a_line_at_first_at_last_and_now_and_then(tmp_path, capsys):
    stage = build_stage(tokens=64 * 100)
    with MetricsLogger(stage, tmp_path, done=0, device=CPU) as watching:
        for step in watching.timed(range(1, 101)):
            watching.step(report(step))
    first, last = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"stage one: 1/100  loss 3\.250  eta \d+:\d\d:\d\d  \S+ tok/s  \d+\.\d GiB", first), first
    assert last.startswith("stage one: 100/100  loss 3.250")


def test_time_that_is_left_is_by_the_wall_and_speed_by_the_steps():
    clock = Clock()
    found = SpeedMeter(steps=10, batch=64, clock=clock)
    for _ in range(3):
        clock.now += 5
        found.add(2.0, None)
    assert found.seconds_left(3) == 7 * 5
    assert found.summary(3, 1.5, 0.25) == "loss 1.500  eta 0:00:35  32 tok/s  0.2 GiB"


def test_speed_is_that_of_the_last_steps_only():
    found = SpeedMeter(steps=100, batch=64, clock=Clock())
    found.add(1000.0, 0.01)  # a first step that compiles
    for _ in range(flops.LAST_STEPS):
        found.add(2.0, 0.5)
    assert "32 tok/s  MFU 50%" in found.summary(21, 1.0, 1.0)
