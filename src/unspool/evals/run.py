"""Score one model: prompts to answers to `samples.jsonl` and `summary.json`.

In: a model, the evals of a recipe, a seed. Out: the artifact `scores/<model>`; where suites consist of tasks also
`prompts.jsonl`, which names every prompt by its hash before the first is asked.
Promise: scores whose inputs have not changed are not made again; a run killed at any moment goes on
from the last whole context and ends with the same bytes as one never killed.
Elsewhere: prompts (tasks/), order (plan.py), right or wrong (score.py), intervals (stats.py).
"""

import json
import logging
import shutil
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unspool.core.artifacts import digest, file_digest, folder_digest, seal, stale_reason, write_atomic
from unspool.core.errors import ConfigError
from unspool.core.progress import progress_bar
from unspool.core.sizes import format_count
from unspool.data.facts import word_list
from unspool.evals.backends.base import Backend, BlockBackend, ModelBackend
from unspool.evals.backends.processes import ProcessesBackend
from unspool.evals.config import Eval, KeyValueEval, PerplexityEval, TaskEval
from unspool.evals.contexts import Plan, Runnable, Sample, Unit, runnable, summarize
from unspool.evals.heldout import heldout_digest
from unspool.evals.prompts import Prompt, Spool
from unspool.evals.questions import ROW_TOKENS, Line, suite_of, wording_of
from unspool.evals.summary import suite_summary

logger = logging.getLogger(__name__)

# Raised when prompts or scoring change, so that older scores are made again.
SUITE_VERSION = 1
SAMPLES = "samples.jsonl"
SUMMARY = "summary.json"
PLAN = "plan.json"
PROMPTS = "prompts.jsonl"


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
    if isinstance(backend, BlockBackend) and any(isinstance(config, PerplexityEval) for config in evals):
        raise ConfigError("suite loss needs a model of ours, not another engine; leave it out or drop --backend.")
    identity = _identity(scoring, evals)
    reason = stale_reason(scoring.out_dir, **identity)
    if reason is None:
        logger.info(f"scores of {scoring.model}: up to date")
        return _summary(scoring.out_dir)
    plan = Plan(evals, backend.tokenizer, seed=scoring.seed, root=scoring.root)
    if isinstance(backend, ModelBackend | ProcessesBackend):
        backend.planned_tokens = plan.prompt_tokens
    num_samples = sum(unit.num_samples for unit in plan.units)
    logger.info(
        f"scores of {scoring.model} ({reason}): {plan.num_contexts} contexts, {num_samples} samples, "
        f"{format_count(plan.prompt_tokens)} prompt tokens"
    )
    work_dir = _work_dir(scoring.out_dir, digest(identity))
    spool = Spool(work_dir)
    if plan.questions:
        plan.keep(spool)
        _list_prompts(plan, work_dir / PROMPTS)
        plan.arrange(_lines(work_dir / PROMPTS), row_tokens=getattr(backend, "row_tokens", ROW_TOKENS))
    if isinstance(backend, ModelBackend | ProcessesBackend):
        plan.put_in_rows(backend.row_tokens)
    _score_units(plan, backend, work_dir / SAMPLES, label=f"score {scoring.model}")
    spool.close()
    summary = summary_of(scoring.model, evals, _lines(work_dir / SAMPLES))
    write_atomic(work_dir / SUMMARY, json.dumps(summary, indent=1) + "\n")
    (work_dir / PLAN).unlink()
    seal(work_dir, scoring.out_dir, **identity, counts={"contexts": plan.num_contexts, "samples": num_samples})
    return summary


def summary_of(model: str, evals: Sequence[Runnable], samples: Sequence[Sample]) -> dict[str, Any]:
    """What summary.json says."""
    cells = summarize(evals, samples)
    suites = [
        suite_summary(config, suite_of(config), cells, samples) for config in evals if isinstance(config, TaskEval)
    ]
    return {"model": model, "cells": cells, **({"suites": suites} if suites else {})}


def _identity(scoring: Scoring, evals: list[Runnable]) -> dict[str, Any]:
    """What the scores depend on, as an artifact wants it."""
    texts = {config.text for config in evals if not isinstance(config, KeyValueEval | TaskEval)}
    suites = [config for config in evals if isinstance(config, TaskEval)]
    paths = {name: path for config in suites for name, path in config.paths.items()}
    words = {config.suite: wording_of(config, scoring.root) for config in suites}
    worded = {suite: wording.hash for suite, wording in words.items() if wording is not None}
    return {
        "kind": "scores",
        "inputs": {
            "model": scoring.model_hash,
            "words": digest(word_list()),
            "text": {text or "shipped": heldout_digest(text, scoring.root) for text in texts},
            **({"paths": {name: _path_digest(scoring.root / path) for name, path in paths.items()}} if paths else {}),
            **({"wording": worded} if worded else {}),
        },
        "settings": {
            "evals": [_settings(config) for config in evals],
            "seed": scoring.seed,
            "suite_version": SUITE_VERSION,
            **({"suites": {config.suite: suite_of(config).version for config in suites}} if suites else {}),
        },
    }


def _settings(config: Runnable) -> dict[str, Any]:
    """What an entry says; a wording that it does not ask for goes unsaid, so that older scores stay what they are."""
    said = config.model_dump(mode="json")
    return {name: value for name, value in said.items() if name != "wording" or value is not None}


def _path_digest(path: Path) -> str:
    """Of what a suite reads; of the name alone where it is none of this machine's paths."""
    if path.is_dir():
        return folder_digest(path)
    return file_digest(path) if path.is_file() else digest(str(path))


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


def _list_prompts(plan: Plan, path: Path) -> None:
    """Write prompts.jsonl, going on from its last whole line."""
    whole = [line for line in _bytes(path).splitlines(keepends=True) if line.endswith(b"\n")]
    with path.open("ab") as file:
        file.truncate(sum(map(len, whole)))
        with progress_bar("make prompts", plan.num_listed) as advance:
            advance(len(whole), "")
            for line in plan.listing(skip=len(whole)):
                file.write(json.dumps(line).encode() + b"\n")
                advance(1, f"{line['suite']} {line['task']}")


def _lines(path: Path) -> list[Line]:
    # Not splitlines(): outputs may hold separators that it takes for the ends of lines.
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def _score_units(plan: Plan, backend: Backend, path: Path, *, label: str) -> None:
    done = _recover(path, plan.units)
    contexts = sum(unit.num_contexts for unit in plan.units[:done])
    if done:
        logger.info(f"{label}: {contexts} of {plan.num_contexts} contexts were scored before")
    if done < len(plan.units):
        plan.check()
    # Counted in tokens, since a long context takes as much time as many short ones.
    with progress_bar(label, plan.prompt_tokens) as advance, path.open("a", encoding="utf-8") as file:
        advance(sum(unit.tokens for unit in plan.units[:done]), "")
        for unit, samples in _in_order(plan, backend, plan.units[done:]):
            file.write("".join(json.dumps(sample) + "\n" for sample in samples))
            file.flush()
            contexts += unit.num_contexts
            advance(unit.tokens, f"tokens, {contexts}/{plan.num_contexts} contexts, {unit.name}")


def _in_order(plan: Plan, backend: Backend, units: Sequence[Unit]) -> Iterator[tuple[Unit, list[Sample]]]:
    """Every unit with its samples; a backend that answers many at a time (a server) is kept busy."""
    if isinstance(backend, BlockBackend):
        yield from _in_blocks(plan, backend, units)
        return
    width = getattr(backend, "width", 1)
    if width <= 1:
        yield from ((unit, plan.score(unit, backend)) for unit in units)
        return
    waiting: deque[tuple[Unit, Prompt | None, Future[Any]]] = deque()

    def first() -> tuple[Unit, list[Sample]]:
        unit, prompt, found = waiting.popleft()
        if prompt is None:
            return unit, [plan.window_sample(unit, found.result())]
        return unit, plan.samples(unit, prompt, found.result())

    # Only asking is done in threads: tokenizers must not be used by several at a time.
    with ThreadPoolExecutor(width) as pool:
        try:
            for unit in units:
                if isinstance(unit.config, PerplexityEval):
                    waiting.append((unit, None, pool.submit(backend.window_losses, plan.window(unit))))
                else:
                    prompt = plan.prompt(unit)
                    waiting.append((unit, prompt, pool.submit(backend.answers, prompt)))
                if len(waiting) >= 2 * width:
                    yield first()
            while waiting:
                yield first()
        finally:
            for _, _, found in waiting:
                found.cancel()
            # Else leaving would wait for what is being answered.
            getattr(backend, "stop", lambda: None)()


def _in_blocks(plan: Plan, backend: BlockBackend, units: Sequence[Unit]) -> Iterator[tuple[Unit, list[Sample]]]:
    for start in range(0, len(units), backend.block):
        some = units[start : start + backend.block]
        prompts = [plan.prompt(unit) for unit in some]
        for unit, prompt, outputs in zip(some, prompts, backend.answers_all(prompts), strict=True):
            yield unit, plan.samples(unit, prompt, outputs)


def _recover(path: Path, units: Sequence[Unit]) -> int:
    """How many units are whole on disk; whatever follows them is cut off."""
    lines = _bytes(path).splitlines(keepends=True)
    done = kept = size = 0
    for unit in units:
        wanted = lines[kept : kept + unit.num_samples]
        if len(wanted) < unit.num_samples or not all(_belongs(line, unit, at) for at, line in enumerate(wanted)):
            break
        done, kept, size = done + 1, kept + len(wanted), size + sum(map(len, wanted))
    if path.exists():
        with path.open("r+b") as file:
            file.truncate(size)
    return done


def _belongs(line: bytes, unit: Unit, at: int) -> bool:
    """Whether a line is the sample that the unit gives at this place."""
    if not line.endswith(b"\n"):
        return False
    try:
        sample: Sample = json.loads(line)
        if unit.hashes:
            return bool(sample["hash"] == unit.hashes[at])
        return (sample["suite"], sample["length"]) == (unit.config.suite, unit.length)
    except (ValueError, KeyError, TypeError):
        return False
