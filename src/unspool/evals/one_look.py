"""Measure a model's effective context length: a few tasks at doubling lengths, within a time budget.

Every length gets a first round of questions, starting at the shortest. This stops at the model's claimed context, when
the score collapses, or when time runs short. The remaining time goes into further rounds at all tested lengths. Answers
are stored as they arrive: a killed run resumes, and a larger budget reuses the stored answers.
"""

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from math import log
from pathlib import Path
from typing import Any

from unspool.core.artifacts import digest, open_work, read_manifest, seal, stale_reason, write_atomic
from unspool.core.checked_lines import CheckedLines, intact_lines
from unspool.core.errors import ConfigError, DataError, naming
from unspool.core.formatting import format_duration, format_percent
from unspool.core.http_client import RefusedError
from unspool.core.progress import Advance, progress_bar
from unspool.core.sizes import format_size
from unspool.evals.backends.base import ROW_TOKENS, Backend
from unspool.evals.config import EvalConfig, eval_adapter
from unspool.evals.eval_plan import EvalPlan
from unspool.evals.look_facts import MIN_SCORE, Stop, has_collapsed, length_rows, look_facts, task_name
from unspool.evals.run import (
    PLAN,
    REPLIES,
    SAMPLES,
    SUMMARY,
    WORK_FILES,
    Scoring,
    describe_work,
    score_in_order,
    scoring_identity,
    summarize,
)
from unspool.evals.suite import PlannedEval, Sample, Unit
from unspool.evals.suites import suite_of

logger = logging.getLogger(__name__)

# Questions per task and length, if there is enough time.
MAX_SAMPLES = 40
# Questions per round: niah has five depths, key_value four questions per object.
ROUND = {"niah": 5, "key_value": 4, "ruler": 3}
# More rounds at the shortest length, because all other scores are compared with it.
FIRST_ROUNDS = 4
MAX_ROUNDS = -(-MAX_SAMPLES // min(ROUND.values()))
SHORTEST, LEAST = 512, 64
# Used if neither a config nor the server reports the context.
UNKNOWN_CONTEXT = 1 << 20
# Time per token grows by 2 ** GROWTH when the context doubles. Used until two lengths are measured.
GROWTH = 0.4
# Row size on a GPU. A row runs as a whole, so it must be short.
LOOK_ROW_TOKENS = 1 << 17
Key = tuple[str, int, int]
"""Task, length and index of a unit."""


def look_lengths(context: int | None) -> list[int]:
    """Doubling lengths, ending at the claimed context."""
    end = context or UNKNOWN_CONTEXT
    start = SHORTEST
    while start > LEAST and start > end // 8:
        start //= 2
    lengths = [start]
    while 2 * lengths[-1] < end:
        lengths.append(2 * lengths[-1])
    return [*lengths, end] if end > start else [end]


def look_evals(lengths: Sequence[int], *, samples: int = MAX_SAMPLES, text: str | None = None) -> list[EvalConfig]:
    """The tasks: a fact in prose, a value of a long JSON object, a chain of assignments. Base models can do them.

    The needles are words, because small models recall words much better than seven digits.
    """
    shared = {"lengths": list(lengths), "samples": samples}
    entries: list[dict[str, Any]] = [
        {"suite": "niah", "value": "words", "text": text, **shared},
        {"suite": "key_value", "value": "words", **shared},
        {"suite": "ruler", "tasks": ["vt"], **shared},
    ]
    return [eval_adapter().validate_python(entry) for entry in entries]


class OneLook:
    """One measurement within `budget` seconds, summed over all runs with the same folder.

    `scoring.evals` come from `look_evals`.
    """

    def __init__(
        self, scoring: Scoring, backend: Backend, *, budget: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.scoring, self.backend, self.budget, self.clock = scoring, backend, budget, clock
        self.lengths: list[int] = scoring.evals[0].lengths  # type: ignore[attr-defined]
        self.tasks: dict[str, PlannedEval] = {}
        self.left_out: dict[str, str] = {}  # task: reason
        self.answered: dict[Key, list[Sample]] = {}
        self.stop: Stop = "context"
        self.refusal = ""
        self.needed: float | None = None  # seconds for the first length that did not fit
        self._units: dict[Key, Unit] = {}
        self._deadline = self._start = clock()
        self._before = 0.0  # seconds of earlier runs

    def run(self) -> dict[str, Any]:
        """Run the measurement and return the content of summary.json."""
        identity = scoring_identity(self.scoring, self.backend, None)
        out_dir = self.scoring.out_dir
        work_dir = out_dir.with_name(out_dir.name + ".work")
        with naming(out_dir):
            is_published = stale_reason(out_dir, **identity) is None
            label = f"answers of {self.scoring.model}"
            open_work(work_dir, digest(identity), key_file=PLAN, label=label, describe=describe_work)
            path = work_dir / SAMPLES
            kept = intact_lines(path)
            if is_published and not kept:  # a larger budget reuses the stored answers
                kept = [line + b"\n" for line in (out_dir / SAMPLES).read_bytes().split(b"\n") if line]
            self._plan()
            self._restore([json.loads(line) for line in kept])
            with CheckedLines(path, []) as file, progress_bar("eval", round(self.budget)) as advance:
                for samples in self.answered.values():
                    file.append(*map(_line, samples))
                try:
                    with self.backend.keeping_replies(work_dir / REPLIES):
                        self._look(file, advance)
                finally:
                    self.backend.stop()
            summary = self._summary()
            write_atomic(work_dir / SUMMARY, json.dumps(summary, indent=1) + "\n")
            counts = {"contexts": len(self.answered), "samples": len(self._samples)}
            seal(work_dir, out_dir, **identity, counts=counts, unlisted=WORK_FILES)
        return summary

    def _plan(self) -> None:
        scoring = self.scoring
        backend = self.backend
        plan = EvalPlan(scoring.evals, backend.tokenizer, seed=scoring.seed, root=scoring.root, form=backend.form)
        if self.backend.packs_contexts and self.backend.row_tokens > ROW_TOKENS:
            plan.pack_contexts(min(self.backend.row_tokens, LOOK_ROW_TOKENS))
        self.backend.planned_tokens = plan.prompt_tokens
        # Start at the first length that fits needles. With a context of 256, the shortest may be too short.
        needles = plan.evals[0]
        while len(self.lengths) > 1 and not _fits(needles, self.lengths[0]):
            self.lengths = self.lengths[1:]
        for planned in plan.evals:
            name = _task(planned.units[0])
            if _fits(planned, self.lengths[0]):
                self.tasks[name] = planned
            else:
                self.left_out[name] = f"does not fit the shortest length, {format_size(self.lengths[0])} tokens"
        if not self.tasks:
            raise ConfigError(
                f"no question fits the shortest length, {self.lengths[0]} tokens; the model's context is too short. "
                "Choose a suite and lengths yourself: `suite='niah', lengths=LENGTH`."
            )
        self._units = {_key(unit): unit for planned in self.tasks.values() for unit in planned.units}

    def _restore(self, samples: Sequence[Sample]) -> None:
        groups: dict[Key, list[Sample]] = {}
        for sample in samples:
            groups.setdefault((task_name(sample), sample["length"], sample["unit"]), []).append(sample)
        for key, group in groups.items():
            if key in self._units and len(group) == self._units[key].num_samples:
                self.answered[key] = group
        self._before = sum(map(_seconds, self.answered.values()))
        self._deadline = self._start + self.budget - self._before
        if self.answered:
            logger.info(f"{len(self._samples)} questions were already answered in {format_duration(self._before)}")

    @property
    def _samples(self) -> list[Sample]:
        return [sample for samples in self.answered.values() for sample in samples]

    # Search

    def _look(self, file: CheckedLines, advance: Advance) -> None:
        advance(round(self._before), "")
        for length in self.lengths:
            rounds = FIRST_ROUNDS if length == self.lengths[0] else 1
            try:
                is_complete = self._ask(length, rounds, file, advance)
            except RefusedError as error:
                if length == self.lengths[0]:
                    raise
                self.stop, self.refusal = "refusal", error.problem
                break
            if length == self.lengths[0]:
                self._leave_out_hopeless()
            rows = length_rows(self._samples, list(self.tasks))
            for row in rows:
                if row["length"] == length:
                    logger.info(f"{format_size(length)}: {format_percent(row['value'])} (n {row['n']})")
            if not self.tasks or not is_complete:
                self.stop = "budget" if self.tasks else "low score"
                break
            if has_collapsed([row for row in rows if row["length"] <= length]):
                self.stop = "collapse"
                break
        tested = [row["length"] for row in length_rows(self._samples, list(self.tasks))]
        for rounds in range(2, MAX_ROUNDS + 1):
            for length in tested:
                self._ask(length, rounds, file, advance)

    def _leave_out_hopeless(self) -> None:
        """Remove tasks that the model fails at the shortest length: they cannot get worse with length."""
        for name in list(self.tasks):
            rows = length_rows(self._samples, [name])
            if rows and rows[0]["low"] < MIN_SCORE:
                score = f"{format_percent(rows[0]['value'])} of {rows[0]['n']} questions"
                self.left_out[name] = f"{score} at {format_size(rows[0]['length'])}; too low to measure a drop"
                del self.tasks[name]

    def _missing(self, length: int, rounds: int) -> list[Unit]:
        """Unanswered units of the first `rounds` rounds, alternating between tasks."""
        by_task = []
        for planned in self.tasks.values():
            wanted = rounds * ROUND[planned.suite.name]
            units: list[Unit] = []
            for unit in (unit for unit in planned.units if unit.length == length):
                if wanted <= 0:
                    break
                wanted -= unit.num_samples
                units += [unit] if _key(unit) not in self.answered else []
            by_task.append(units)
        return [unit for row in zip_longest(*by_task) for unit in row if unit is not None]

    def _ask(self, length: int, rounds: int, file: CheckedLines, advance: Advance) -> bool:
        """Run the missing units of the first `rounds` rounds. Returns False if time ran out."""
        units = self._missing(length, rounds)
        needed = self._pace(length) * sum(unit.tokens for unit in units)
        if units and self.answered and length != self.lengths[0] and self.clock() + needed > self._deadline:
            self.needed = self.needed or needed
            return False
        before = self.clock()
        for unit, samples in score_in_order(self.backend, self._in_time(units)):
            now = self.clock()
            seconds = (now - before) / len(samples)
            stored = [{**sample, "unit": unit.index, "seconds": round(seconds, 3)} for sample in samples]
            file.append(*map(_line, stored))
            self.answered[_key(unit)] = stored
            advance(round(now - self._start) - round(before - self._start), f"s, {unit.name}")
            before = now
        return not self._missing(length, rounds)

    # Time

    def _in_time(self, units: Sequence[Unit]) -> Iterator[Unit]:
        given: list[Unit] = []
        for unit in units:
            given.append(unit)
            waiting = sum(one.tokens for one in given if _key(one) not in self.answered)
            if self.clock() + self._pace(unit.length) * waiting > self._deadline:
                return
            yield unit

    def _pace(self, length: int) -> float:
        """Seconds per token of a prompt: measured, else extrapolated from the two longest measured lengths."""
        known: dict[int, float] = {}
        for at in sorted({key[1] for key in self.answered}):
            timed = [(_seconds(group), self._units[key].tokens) for key, group in self.answered.items() if key[1] == at]
            if len(timed) > 2:
                timed.remove(max(timed))  # the first prompt also loads the model
            known[at] = sum(seconds for seconds, _ in timed) / sum(tokens for _, tokens in timed)
        if length in known or not known:
            return known.get(length, 0.0)
        last, growth = max(known), GROWTH
        if len(known) > 1:
            before = sorted(known)[-2]
            growth = min(1.0, max(0.0, log(max(known[last], 1e-12) / max(known[before], 1e-12)) / log(last / before)))
        return known[last] * float(max(1.0, length / last) ** growth)

    def _summary(self) -> dict[str, Any]:
        samples = self._samples
        asked = [config.model_copy(update={"lengths": self._asked_lengths(config)}) for config in self.scoring.evals]
        evals = [config for config in asked if suite_of(config).lengths(config)]
        summary = summarize(self.scoring.model, evals, samples, self.backend.record)
        look = look_facts(
            self.scoring.model,
            samples,
            tasks=list(self.tasks),
            left_out=self.left_out,
            lengths=self.lengths,
            context=self.backend.context_limit,
            stop=self.stop,
            refusal=self.refusal,
            budget=self.budget,
            seconds=sum(map(_seconds, self.answered.values())),
            needed=self.needed,
        )
        return {**summary, "look": look}

    def _asked_lengths(self, config: EvalConfig) -> list[int]:
        return sorted({sample["length"] for sample in self._samples if sample["suite"] == config.suite})


def _task(unit: Unit) -> str:
    return unit.questions[0].task if unit.questions else unit.planned.suite.name


def _fits(planned: PlannedEval, length: int) -> bool:
    """True if all questions of this length can be built."""
    units = [unit for unit in planned.units if unit.length == length]
    try:
        for unit in units if length < SHORTEST // 2 else units[:1]:
            planned.prepare(unit)
    except (ConfigError, DataError):
        return False
    return True


def _key(unit: Unit) -> Key:
    return _task(unit), unit.length, unit.index


def _seconds(samples: Sequence[Sample]) -> float:
    return float(sum(sample["seconds"] for sample in samples))


def _line(sample: Sample) -> bytes:
    return json.dumps(sample).encode() + b"\n"


def default_folder(name: str, model_hash: str) -> Path:
    """`scores/NAME`, plus part of the hash if another model of that name has scores."""
    folder = Path("scores") / name.replace("/", "-")
    inputs = (read_manifest(folder) or {}).get("inputs")
    is_other = folder.exists() and (not isinstance(inputs, dict) or inputs.get("model") != model_hash)
    return folder.with_name(f"{folder.name}-{model_hash[:8]}") if is_other else folder
