"""Score one model: write samples.jsonl, summary.json and, for suites of tasks, prompts.jsonl.

Scores with unchanged inputs are not computed again. A killed run resumes after the last complete unit and ends with the
same bytes as an uninterrupted run.
"""

import json
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unspool.core.artifacts import clean_up, digest, open_work, read_manifest, seal, stale_reason, write_atomic
from unspool.core.checked_lines import SUMS, CheckedLines, intact_lines, read_checked
from unspool.core.errors import ConfigError, naming
from unspool.core.progress import progress_bar
from unspool.core.sizes import format_count
from unspool.data.facts import word_list
from unspool.evals import beyond_context
from unspool.evals.backends.base import Backend
from unspool.evals.config import EvalConfig
from unspool.evals.eval_plan import EvalPlan
from unspool.evals.heldout import heldout_digest
from unspool.evals.prompt_encoder import PromptEncoder
from unspool.evals.prompts import Prompt, PromptCache
from unspool.evals.suite import PromptLine, Sample, Unit
from unspool.evals.suites import suite_of

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

# Increase this when prompts or scoring change, so that older scores are recomputed.
SUITE_VERSION = 1
SAMPLES = "samples.jsonl"
SUMMARY = "summary.json"
PLAN = "plan.json"
PROMPTS = "prompts.jsonl"
REPLIES = "replies.jsonl"
# Files of the work folder that are not results.
WORK_FILES = (PLAN, SAMPLES + SUMS, PROMPTS + SUMS, REPLIES)


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """What to score, and where to write the scores."""

    model: str
    """Name in reports: "base" or a stage's name."""
    model_hash: str
    evals: Sequence[EvalConfig]
    seed: int
    out_dir: Path
    root: Path
    """Base folder of relative paths."""
    title: str = ""
    """Name in messages. Default: `model`."""

    @property
    def label(self) -> str:
        return f"scores of {self.title or self.model}"


def score_model(model_ref: str, scoring: Scoring, *, device: "torch.device", dtype: "torch.dtype") -> dict[str, Any]:
    """Score with transformers. Weights are loaded only if some score is missing."""
    from unspool.evals.backends.transformers import ModelBackend

    return score(scoring, ModelBackend(model_ref, device=device, dtype=dtype))


def score(scoring: Scoring, backend: Backend) -> dict[str, Any]:
    """Return the summary. The backend runs only for missing scores."""
    backend.connect(recorded_backend(scoring.out_dir))
    reason = stale_reason(scoring.out_dir, **_resolve(scoring, backend)[2])
    if reason is None:
        clean_up(scoring.out_dir, WORK_FILES)
        logger.info(f"{scoring.label}: up to date")
        loaded: dict[str, Any] = json.loads((scoring.out_dir / SUMMARY).read_text(encoding="utf-8"))
        return loaded
    backend.connect()
    scoring, beyond, identity = _resolve(scoring, backend)
    plan = EvalPlan(
        scoring.evals,
        backend.tokenizer,
        seed=scoring.seed,
        root=scoring.root,
        context=None if beyond is None else beyond["context"],
        form=backend.form,
    )
    backend.planned_tokens = plan.prompt_tokens
    logger.info(
        f"{scoring.label} ({reason}): {plan.num_contexts} contexts, {plan.num_samples} samples, "
        f"{format_count(plan.prompt_tokens)} prompt tokens"
    )
    if beyond is not None:
        logger.warning(beyond_context.notice(beyond, plan.beyond_context, plan.num_questions))
    with naming(scoring.out_dir):
        return _score(scoring, backend, plan, identity, beyond)


def _score(
    scoring: Scoring, backend: Backend, plan: EvalPlan, identity: dict[str, Any], beyond: dict[str, Any] | None
) -> dict[str, Any]:
    work_dir = scoring.out_dir.with_name(scoring.out_dir.name + ".work")
    open_work(work_dir, digest(identity), key_file=PLAN, label=scoring.label, describe=describe_work)
    cache = PromptCache(work_dir)
    if plan.num_listed:
        _list_prompts(plan, work_dir / PROMPTS, cache)
        plan.group_questions(_read_lines(work_dir / PROMPTS), row_tokens=backend.row_tokens)
    if backend.packs_contexts:
        plan.pack_contexts(backend.row_tokens)
    with backend.keeping_replies(work_dir / REPLIES):
        _score_units(plan, backend, work_dir / SAMPLES, label=f"score {scoring.title or scoring.model}")
    cache.close()
    summary = summarize(scoring.model, scoring.evals, _read_lines(work_dir / SAMPLES), backend.record, beyond)
    write_atomic(work_dir / SUMMARY, json.dumps(summary, indent=1) + "\n")
    counts = {"contexts": plan.num_contexts, "samples": plan.num_samples}
    seal(work_dir, scoring.out_dir, **identity, counts=counts, unlisted=WORK_FILES)
    return summary


def recorded_backend(out_dir: Path) -> dict[str, Any] | None:
    """The server recorded by an earlier result in this folder."""
    settings = (read_manifest(out_dir) or {}).get("settings")
    record = settings.get("backend") if isinstance(settings, dict) else None
    return record if isinstance(record, dict) else None


def summarize(
    model: str,
    evals: Sequence[EvalConfig],
    samples: Sequence[Sample],
    backend: dict[str, Any],
    beyond: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Build the content of summary.json. `beyond` describes questions beyond the model's context, if any."""
    cells = [cell for config in evals for cell in suite_of(config).cells(config, samples)]
    found = [suite_of(config).summary(config, cells, samples) for config in evals]
    suites = [summary for summary in found if summary is not None]
    return {
        "model": model,
        "backend": backend,
        "cells": beyond_context.mark_cells(cells, beyond),
        **({"suites": suites} if suites else {}),
        **({"beyond_context": beyond} if beyond else {}),
    }


def _resolve(scoring: Scoring, backend: Backend) -> tuple[Scoring, dict[str, Any] | None, dict[str, Any]]:
    """Return (scoring, entry about questions beyond the context, identity of the scores)."""
    _check_backend(scoring.evals, backend)
    scoring = replace(scoring, evals=beyond_context.resolve(scoring.evals, backend))
    beyond = beyond_context.facts(scoring.evals, backend.context_limit)
    return scoring, beyond, scoring_identity(scoring, backend, beyond)


def _check_backend(evals: Sequence[EvalConfig], backend: Backend) -> None:
    for suite in map(suite_of, evals):
        if suite.needs_losses and not backend.has_losses:
            raise ConfigError(
                f"suite {suite.name} needs token losses, which this backend cannot compute; remove the suite or "
                "use `backend='transformers'`."
            )
        if suite.runs_model and backend.options is None:
            raise ConfigError(f"suite {suite.name} loads the model itself; use `backend='transformers'`.")


def scoring_identity(scoring: Scoring, backend: Backend, beyond: dict[str, Any] | None) -> dict[str, Any]:
    """Everything that the scores depend on, as recorded in the manifest."""
    texts = {found.text for config in scoring.evals if (found := suite_of(config).heldout(config)) is not None}
    files: dict[str, dict[str, Any]] = {}
    for config in scoring.evals:
        for kind, digests in suite_of(config).inputs(config, scoring.root).items():
            if digests:
                files.setdefault(kind, {}).update(digests)
    versions = {config.suite: version for config in scoring.evals if (version := suite_of(config).version) is not None}
    return {
        "kind": "scores",
        "inputs": {
            "model": scoring.model_hash,
            "words": digest(word_list()),
            "text": {text or "shipped": heldout_digest(text, scoring.root) for text in texts},
            **files,
        },
        "settings": {
            "evals": [_settings(config) for config in scoring.evals],
            "seed": scoring.seed,
            "suite_version": SUITE_VERSION,
            **({"suites": versions} if versions else {}),
            **({"backend": backend.record} if backend.kind == "openai" else {}),
            **({"context": beyond["context"]} if beyond and set(beyond["policies"].values()) != {"ask"} else {}),
        },
    }


def _settings(config: EvalConfig) -> dict[str, Any]:
    """Settings of an entry, without defaults of newer keys, so that older scores stay up to date."""
    settings = config.model_dump(mode="json", exclude={"after"})  # the time of scoring does not change scores
    defaults: dict[str, tuple[Any, ...]] = {"wording": (None,), "reference": (None,), "beyond_context": (None, "ask")}
    defaults |= dict.fromkeys(("preset", "target_length", "reference_length"), (None,)) | {"shots": (0,)}
    defaults["average_of"] = ({},)
    return {name: value for name, value in settings.items() if value not in defaults.get(name, ())}


def describe_work(folder: Path) -> str | None:
    for name in (SAMPLES, REPLIES):
        path = folder / name
        count = path.read_bytes().count(b"\n") if path.exists() else 0
        if count:
            return f"{count} {path.stem}"
    return None


def _list_prompts(plan: EvalPlan, path: Path, cache: PromptCache) -> None:
    """Write prompts.jsonl, resuming after its last complete line."""
    kept = intact_lines(path)
    with CheckedLines(path, kept) as file, progress_bar("build prompts", plan.num_listed) as advance:
        advance(len(kept), "")
        for line in plan.prompt_lines(skip=len(kept), cache=cache):
            file.append(json.dumps(line).encode() + b"\n")
            advance(1, f"{line['suite']} {line['task']}")


def _read_lines(path: Path) -> list[PromptLine]:
    # Not splitlines(): outputs may contain characters that it treats as line ends.
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def _score_units(plan: EvalPlan, backend: Backend, path: Path, *, label: str) -> None:
    units, total = plan.units, plan.num_contexts
    scored = _recover(path, units)
    contexts = sum(units[at].num_contexts for at in scored)
    if scored:
        logger.info(f"{label}: {contexts} of {total} contexts were already scored")
    if len(scored) < len(units):
        plan.check()
    done = next((at for at in range(len(units)) if at not in scored), len(units))
    missing = [unit for at, unit in enumerate(units) if at not in scored]
    # Count tokens, because one long context takes as much time as many short ones.
    with (
        progress_bar(label, plan.prompt_tokens) as advance,
        CheckedLines(path, [line for at in range(done) for line in scored[at]]) as file,
    ):
        advance(sum(units[at].tokens for at in scored), "")
        coming = iter(score_in_order(backend, missing))
        for at in range(done, len(units)):
            if at in scored:  # already scored; a line before it was damaged
                file.append(*scored[at])
                continue
            unit, samples = next(coming)
            file.append(*(json.dumps(sample).encode() + b"\n" for sample in samples))
            contexts += unit.num_contexts
            advance(unit.tokens, f"tokens, {contexts}/{total} contexts, {unit.name}")
        assert next(coming, None) is None, "every unit is written"
    backend.stop()


def score_in_order(backend: Backend, units: Iterable[Unit]) -> Iterator[tuple[Unit, list[Sample]]]:
    """Yield every unit with its samples. Backends that answer several prompts at a time are kept busy."""
    if backend.block_size > 1:
        waiting = iter(units)
        while block := list(islice(waiting, backend.block_size)):
            prompts = [unit.planned.prepare(unit) for unit in block]
            for unit, prompt, answers in zip(block, prompts, backend.answers_all(prompts), strict=True):
                yield unit, unit.planned.samples(unit, prompt, answers)
    elif backend.width > 1:
        yield from _score_in_threads(backend, units)
    else:
        yield from ((unit, unit.score(backend)) for unit in units)


def _score_in_threads(backend: Backend, units: Iterable[Unit]) -> Iterator[tuple[Unit, list[Sample]]]:
    waiting: deque[tuple[Unit, Any, Future[Any]]] = deque()

    def first() -> tuple[Unit, list[Sample]]:
        unit, prepared, future = waiting.popleft()
        return unit, unit.planned.samples(unit, prepared, future.result())

    # Threads only call the backend, because tokenizers are not thread-safe.
    with ThreadPoolExecutor(backend.width) as pool:
        try:
            for unit in units:
                prepared = unit.planned.prepare(unit)
                waiting.append((unit, prepared, pool.submit(unit.planned.ask, prepared, backend)))
                if len(waiting) >= 2 * backend.width:
                    yield first()
            while waiting:
                yield first()
        except BaseException:
            for _, _, future in waiting:
                future.cancel()
            # Otherwise the pool waits for answers in progress.
            backend.stop()
            raise


def _recover(path: Path, units: Sequence[Unit]) -> dict[int, list[bytes]]:
    """Lines of every complete and undamaged unit on disk, by unit index."""
    lines = read_checked(path)
    scored: dict[int, list[bytes]] = {}
    first = 0
    for at, unit in enumerate(units):
        found = [line for line in lines[first : first + unit.num_samples] if line is not None]
        first += unit.num_samples
        if len(found) == unit.num_samples and all(_belongs(line, unit, place) for place, line in enumerate(found)):
            scored[at] = found
    return scored


def _belongs(line: bytes, unit: Unit, at: int) -> bool:
    """Whether a line is the unit's sample number `at`."""
    try:
        sample: Sample = json.loads(line)
        if unit.hashes:
            return bool(sample["hash"] == unit.hashes[at])
        return (sample["suite"], sample["length"]) == (unit.planned.suite.name, unit.length)
    except (ValueError, KeyError, TypeError):
        return False


PARITY_PROMPTS = 20
_SHOWN_AROUND = 24


def compare_backends(plan: EvalPlan, first: Backend, second: Backend, *, count: int = PARITY_PROMPTS) -> dict[str, Any]:
    """Compare two backends' answers to `count` questions, spread over the plan.

    A difference lists its unit, the question's index, the first character that differs (`at`), and both answers around
    it.
    """
    units = [unit for unit in plan.units if not unit.planned.suite.needs_losses]
    pairs: list[tuple[Unit, int, str, str]] = []
    for unit in units[:: max(1, len(units) // count)]:
        if len(pairs) < count:
            prompt = unit.planned.prepare(unit)
            answers = zip(first.answers(prompt), second.answers(as_local_prompt(prompt, first)), strict=True)
            pairs += [(unit, unit.index + at, one, other) for at, (one, other) in enumerate(answers)]
    pairs = pairs[:count]
    differences = [
        {"name": unit.name, "index": index, **_difference(one, other)}
        for unit, index, one, other in pairs
        if one != other
    ]
    return {"n": len(pairs), "equal": len(pairs) - len(differences), "differences": differences}


def as_local_prompt(prompt: Prompt, backend: Backend) -> Prompt:
    """Replace a prompt's ids by those that a server with this tokenizer and template reads."""
    encoder = PromptEncoder(backend.tokenizer, backend.form)
    if prompt.questions[0].payload is None:
        return prompt
    read = [
        replace(asked, ids=encoder.read_ids(asked.payload), payload=None)
        for asked in prompt.questions
        if asked.payload is not None
    ]
    return replace(prompt, context_ids=prompt.context_ids[:0], questions=read, template_tokens=0)


def _difference(one: str, other: str) -> dict[str, Any]:
    shorter = min(len(one), len(other))
    at = next((place for place in range(shorter) if one[place] != other[place]), shorter)
    part = slice(max(0, at - _SHOWN_AROUND), at + _SHOWN_AROUND)
    return {"at": at, "first": one[part], "second": other[part]}
