"""Score one model: prompts to answers to `samples.jsonl` and `summary.json`.

In: a model, the evals of a recipe, a seed. Out: the artefact `scores/<model>`.
Promise: scores whose inputs have not changed are not made again; a run killed at any moment goes on
from the last whole context and ends with the same bytes as one never killed.
Elsewhere: prompts (tasks/), order (plan.py), right or wrong (score.py), intervals (stats.py).
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unspool.base.artefact import digest, seal, stale_reason, write_atomic
from unspool.base.progress import progress_bar, say
from unspool.base.sizes import format_count, format_size
from unspool.data.wording import word_list
from unspool.eval.backend import Backend, ModelBackend
from unspool.eval.config import Eval, KvEval
from unspool.eval.plan import Plan, Runnable, Sample, Unit, runnable, summarize
from unspool.eval.text import heldout_digest

# Raised when prompts or scoring change, so that older scores are made again.
SUITE_VERSION = 1
SAMPLES = "samples.jsonl"
SUMMARY = "summary.json"
PLAN = "plan.json"


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """What is scored, and where the scores go."""

    model: str
    """Its name in reports: "base" or a stage's name."""
    model_hash: str
    evals: Sequence[Eval]
    seed: int
    out_dir: Path
    root: Path
    """What relative paths of `text` start from."""


def score_model(model_ref: str, scoring: Scoring, *, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """The summary; weights are loaded only if something is left to score."""
    return score(scoring, ModelBackend(model_ref, device=device, dtype=dtype))


def score(scoring: Scoring, backend: Backend) -> dict[str, Any]:
    evals = runnable(scoring.evals)
    identity = _identity(scoring, evals)
    reason = stale_reason(scoring.out_dir, **identity)
    if reason is None:
        say(f"scores of {scoring.model}: up to date")
        return _summary(scoring.out_dir)
    plan = Plan(evals, backend.tokenizer, seed=scoring.seed, root=scoring.root)
    num_samples = sum(unit.num_samples for unit in plan.units)
    say(
        f"scores of {scoring.model} ({reason}): {len(plan.units)} contexts, {num_samples} samples, "
        f"{format_count(plan.prompt_tokens)} prompt tokens"
    )
    work_dir = _work_dir(scoring.out_dir, digest(identity))
    _score_units(plan, backend, work_dir / SAMPLES, label=f"score {scoring.model}")
    samples = [json.loads(line) for line in (work_dir / SAMPLES).read_text(encoding="utf-8").splitlines()]
    summary = {"model": scoring.model, "cells": summarize(evals, samples)}
    write_atomic(work_dir / SUMMARY, json.dumps(summary, indent=1) + "\n")
    (work_dir / PLAN).unlink()
    seal(work_dir, scoring.out_dir, **identity, counts={"contexts": len(plan.units), "samples": num_samples})
    return summary


def _identity(scoring: Scoring, evals: list[Runnable]) -> dict[str, Any]:
    """What the scores depend on, as an artefact wants it."""
    texts = {config.text for config in evals if not isinstance(config, KvEval)}
    return {
        "kind": "scores",
        "inputs": {
            "model": scoring.model_hash,
            "words": digest(word_list()),
            "text": {text or "shipped": heldout_digest(text, scoring.root) for text in texts},
        },
        "settings": {
            "evals": [config.model_dump(mode="json") for config in evals],
            "seed": scoring.seed,
            "suite_version": SUITE_VERSION,
        },
    }


def _summary(out_dir: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((out_dir / SUMMARY).read_text(encoding="utf-8"))
    return loaded


def _work_dir(out_dir: Path, identity: str) -> Path:
    """The folder of work in progress; emptied if what it began is no longer what is wanted."""
    work_dir = out_dir.with_name(out_dir.name + ".work")
    plan_path = work_dir / PLAN
    if not plan_path.is_file() or plan_path.read_text(encoding="utf-8") != identity:
        shutil.rmtree(work_dir, ignore_errors=True)
        work_dir.mkdir(parents=True)
        write_atomic(plan_path, identity)
    return work_dir


def _score_units(plan: Plan, backend: Backend, path: Path, *, label: str) -> None:
    done = _recover(path, plan.units)
    if done:
        say(f"{label}: {done} of {len(plan.units)} contexts were scored before")
    if done < len(plan.units):
        plan.check()
    with progress_bar(label, len(plan.units)) as advance, path.open("a", encoding="utf-8") as file:
        advance(done, "")
        for unit in plan.units[done:]:
            samples = plan.score(unit, backend)
            file.write("".join(json.dumps(sample) + "\n" for sample in samples))
            file.flush()
            advance(1, f"{unit.config.suite} {format_size(unit.length)}")


def _recover(path: Path, units: Sequence[Unit]) -> int:
    """How many units are whole on disk; whatever follows them is cut off."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    done = kept = size = 0
    for unit in units:
        wanted = lines[kept : kept + unit.num_samples]
        if len(wanted) < unit.num_samples or not all(_belongs(line, unit) for line in wanted):
            break
        done, kept, size = done + 1, kept + len(wanted), size + sum(map(len, wanted))
    if path.exists():
        with path.open("r+b") as file:
            file.truncate(size)
    return done


def _belongs(line: bytes, unit: Unit) -> bool:
    if not line.endswith(b"\n"):
        return False
    try:
        sample: Sample = json.loads(line)
        return (sample["suite"], sample["length"]) == (unit.config.suite, unit.length)
    except (ValueError, KeyError, TypeError):
        return False
