"""TensorBoard and Weights & Biases trackers. A resumed stage continues the same run there.

A failing tracker is reported once and dropped; it never ends a stage. W&B keeps all data, so steps that a resumed stage
repeats appear twice, with equal numbers. TensorBoard drops them.
"""

import importlib
import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from unspool.core.artifacts import write_atomic
from unspool.core.config import lookup
from unspool.core.errors import ConfigError

logger = logging.getLogger(__name__)


TENSORBOARD = "tensorboard"
WANDB_ID = "wandb_id"
# Modules that must be importable. torch's own writer is only a wrapper of the first.
MODULES = {"tensorboard": ("tensorboard", "torch.utils.tensorboard"), "wandb": ("wandb",)}


class Tracker(Protocol):
    def numbers(self, step: int, values: Mapping[str, float]) -> None: ...

    def text(self, step: int, name: str, text: str) -> None: ...

    def close(self) -> None: ...


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers that are not installed, before training starts."""
    for name in names:
        try:
            for module in MODULES[name]:
                importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(
                f"loggers: cannot import {name} ({error}); pip install 'unspool[track]', or remove it."
            ) from error


class Trackers:
    """All trackers of a stage as one. A tracker that fails is dropped with a message."""

    def __init__(self, open_trackers: Mapping[str, Callable[[], Tracker]]) -> None:
        self._open: dict[str, Tracker] = {}
        for name, build in open_trackers.items():
            try:
                self._open[name] = build()
            except Exception as error:
                _warn(name, error)

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        self._call_all(lambda tracker: tracker.numbers(step, values))

    def text(self, step: int, name: str, text: str) -> None:
        self._call_all(lambda tracker: tracker.text(step, name, text))

    def close(self) -> None:
        self._call_all(lambda tracker: tracker.close())
        self._open = {}

    def _call_all(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._open.items()):
            try:
                call(tracker)
            # Any network, disk or library error: none of them may end a run.
            except Exception as error:
                del self._open[name]
                with suppress(Exception):
                    tracker.close()
                _warn(name, error)


def build_trackers(names: Sequence[str], work: Path, *, run: str, settings: Mapping[str, Any], done: int) -> Trackers:
    """Build the trackers; `run` is the display name, and `done` steps were tracked before."""

    def build(name: str) -> Callable[[], Tracker]:
        return lambda: lookup(_BUILDERS, name, kind="tracker")(work, run, settings, done)

    return Trackers({name: build(name) for name in names})


class _TensorBoard:
    def __init__(self, work: Path, run: str, settings: Mapping[str, Any], done: int) -> None:
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        # Steps after the checkpoint will be repeated.
        self._writer: Any = writer(str(work / TENSORBOARD), purge_step=done + 1 if done else None)
        if not done:
            self._writer.add_text("settings", "\n".join(f"    {key}: {value}" for key, value in settings.items()), 0)

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def text(self, step: int, name: str, text: str) -> None:
        # Indented, so that TensorBoard does not render it as Markdown.
        self._writer.add_text(name, "    " + text.replace("\n", "\n    "), step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, work: Path, run: str, settings: Mapping[str, Any], done: int) -> None:
        wandb = importlib.import_module("wandb")
        id_path = work / WANDB_ID
        if not id_path.is_file():
            write_atomic(id_path, secrets.token_hex(4))
        self._html = wandb.Html
        self._run: Any = wandb.init(
            project=None if os.environ.get("WANDB_PROJECT") else "unspool",
            name=run,
            id=id_path.read_text(),
            resume="allow",
            dir=str(work),
            config=dict(settings),
        )
        # W&B's own step counter only increases, and would drop the steps that a resumed stage repeats.
        self._run.define_metric("*", step_metric="step")

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def text(self, step: int, name: str, text: str) -> None:
        escaped = text.replace("&", "&amp;").replace("<", "&lt;")
        self._run.log({"step": step, name: self._html(f"<pre>{escaped}</pre>")})

    def close(self) -> None:
        self._run.finish()


_BUILDERS: dict[str, Callable[[Path, str, Mapping[str, Any], int], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
}


def _warn(name: str, error: Exception) -> None:
    reason = str(error).strip().split("\n")[0] or type(error).__name__
    logger.warning(f"loggers: {name} failed and gets no more metrics ({reason}); metrics.jsonl has all of them")
