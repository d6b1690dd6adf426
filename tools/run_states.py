"""What tools/run_study.py says about runs: their states, progress and errors, and never a score."""

import json
import time
from pathlib import Path
from typing import Any

LOGS = "logs"
TAIL = 1 << 16  # bytes at the end of a log that are searched
PROGRESS, ERROR = ("stage ", "score "), "error: "
STARTED = "-- started"  # begins the part of a log that one process wrote
# In the order of a run.
WAITING, STARTING, TRAINING, SCORING, FINISHED, STOPPED, FAILED = (
    "waiting", "starting", "training", "scoring", "finished", "stopped", "failed",
)  # fmt: skip
ACTIVE = (STARTING, TRAINING, SCORING)


def phase_of(folder: Path) -> str:
    logs = [path for path in folder.glob("stages/*/metrics.jsonl") if path.stat().st_size]
    found = {path.name for path in folder.glob("scores/*")}
    active = {name for name in found if name.endswith(".work")}
    if not active and any(path.parent.name.endswith(".work") for path in logs):
        return TRAINING  # a later stage, after the scores of an earlier one
    scores = {name.removesuffix(".work") for name in found}
    # The base model is scored before the first stage.
    if scores - {"base"} or (scores and not logs):
        return SCORING
    return TRAINING if logs else STARTING


def describe(out: Path, facts: dict[str, Any]) -> str:
    left = max(0, round(facts["ends_at"] - time.time()))
    lines = [f"{time.strftime('%H:%M:%S')}  {'ended' if facts['ended'] else f'{left} s left'}"]
    for name, run in facts["runs"].items():
        spent = ", ".join(f"{phase} {seconds:.0f} s" for phase, seconds in run["seconds"].items())
        text = f"  {name:24} {run['state']:9} {spent}"
        if run["state"] in ACTIVE:
            text = f"{text}  {last_line(out / LOGS / f'{name}.log', PROGRESS)}"
        if run["state"] == FAILED:
            text = f"{text}  {failure(out, name)}"
        lines.append(text.rstrip())
    return "\n".join(lines)


def failure(out: Path, name: str) -> str:
    log = out / LOGS / f"{name}.log"
    try:
        found = json.loads((out / "failures" / f"{name}.json").read_text(encoding="utf-8"))["error"]
    except (OSError, ValueError, KeyError):
        found = last_line(log, (ERROR, STARTED)).removeprefix(ERROR)
    return f"{'no message' if found.startswith(STARTED) or not found else found.splitlines()[0]} (log: {log})"


def last_line(log: Path, starts: tuple[str, ...]) -> str:
    """Return the newest line that begins so. Progress of training and scoring, and errors, hold no score."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line for line in reversed(lines) if line.startswith(starts)), "")
