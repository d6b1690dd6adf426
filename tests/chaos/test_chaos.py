"""Whole runs of a very small recipe, disturbed in every way that comes to mind: zero silent, zero tracebacks.

    pytest tests/chaos -m slow --shard 1/5 -s      # 100 events and their count by kind

After each event the run is started again without any disturbance. It must end with the results of a run that was never
disturbed, or refuse in a sentence with exit code 2.
"""

import hashlib
import json
import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import unspool.recipe.run
import unspool.reporting.page  # noqa: F401  (so that forked runs need not load them)
from factory import SMALL_SIZE, save_mini
from unspool.core.artifacts import MANIFEST, WORK_ENDINGS
from unspool.models.config import SIZES

from .events import KINDS, Sandbox, count_events, kill_at_file_event

EVENTS = 100  # of a shard
RECIPE = """\
name: chaos
model: {size: 4M, tokenizer: asset:tiny-base, context_length: 64}
engine: {workers: 1}
device: cpu
sources:
  books: {kind: jsonl, path: part-*.jsonl}
  held: {kind: jsonl, path: held-out.jsonl}
datasets:
  long: {from: books, seq_len: 128}
  held: {from: held, seq_len: 128}
stages:
  - name: one
    context_length: 128
    mix: {long: 1}
    tokens: 768
    batch_tokens: 256
    lr: 1e-3
    checkpoint_every: 1
    validation: {dataset: held, every: 1, samples: 1}
evals:
  - {suite: key_value, lengths: [128], samples: 2, value: words}
  - {suite: perplexity, length: 128, samples: 2, text: held-out.jsonl}
"""
RESULTS = (".arrow", ".safetensors", ".jsonl", ".json")
TIMES = {"seconds", "data_seconds", "tokens_per_second", "memory_gib", "mfu"}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    from unspool.data.sources import base

    monkeypatch.setitem(SIZES, "4M", SMALL_SIZE)
    monkeypatch.setattr(base, "TASK_BYTES", 1)  # every file is a task


@pytest.fixture
def box(tmp_path: Path) -> Sandbox:
    folder = save_mini(tmp_path / "inputs").parent
    lines = (folder / "books.jsonl").read_text().splitlines(keepends=True)
    for part in range(3):
        (folder / f"part-{part}.jsonl").write_text("".join(lines[part::3]))
    (folder / "chaos.yaml").write_text(RECIPE)
    sandbox = Sandbox(recipe=folder / "chaos.yaml", out=tmp_path / "out", log=tmp_path / "log")
    sandbox.num_events = count_events(sandbox, tmp_path / "events")
    shutil.rmtree(sandbox.out)
    began = time.monotonic()
    assert sandbox.run() == 0, sandbox.ends[-1]
    sandbox.seconds = time.monotonic() - began
    return sandbox


def results(out: Path) -> dict[str, Any]:
    """Everything that a run is for: each published file, without what the clock says."""
    found = {}
    for path in sorted(out.glob("*/*/**/*")):
        folder = path.relative_to(out).parts[1]
        if folder.endswith(WORK_ENDINGS) or path.suffix not in RESULTS:
            continue
        found[str(path.relative_to(out))] = _content(path)
    return found


def _content(path: Path) -> Any:
    if path.name == MANIFEST:
        manifest = json.loads(path.read_text())
        # Digests of files that hold times differ.
        return {key: manifest[key] for key in ("kind", "counts", "settings")} | {"files": sorted(manifest["files"])}
    if path.suffix == ".jsonl":
        records = [json.loads(line) for line in path.read_text().split("\n") if line]
        return [{key: value for key, value in record.items() if key not in TIMES} for record in records]
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.slow
def test_after_every_event_the_run_ends_with_the_same_result_or_one_clear_error(chaos_shard, box):
    wanted = results(box.out)
    assert {Path(name).parts[0] for name in wanted} == {"corpus", "datasets", "stages", "scores"}
    shutil.rmtree(box.out)
    rng = random.Random(chaos_shard)
    counts: Counter[str] = Counter()
    ends: Counter[tuple[str, int]] = Counter()
    problems: list[str] = []
    for number in range(EVENTS):
        kind = list(KINDS)[number % len(KINDS)]
        box.ends.clear()
        if "finished work" not in kind or "unfinished" in kind:
            shutil.rmtree(box.out, ignore_errors=True)  # a run that has ended already is not disturbed by much
        KINDS[kind](box, rng)
        if rng.random() < 0.25:
            kill_at_file_event(box, rng)  # and the run that resumes is disturbed too
        code = box.run()
        counts[kind] += 1
        ends.update((kind, end) for end, _ in box.ends[:-1])
        problem = _problem(box, wanted)
        if problem:
            said = "\n---\n".join(text for _, text in box.ends)
            problems.append(f"shard {chaos_shard}, event {number} ({kind}): {problem}\n{said}")
            print(problems[-1], flush=True)
        if problem or code:
            shutil.rmtree(box.out, ignore_errors=True)
    for kind, count in counts.items():
        killed, refused, ended = (ends[kind, code] for code in (-signal.SIGKILL, 2, 0))
        print(f"{count:4} {kind}: {killed} runs killed, {refused} refused, {ended} ended")
    print(f"{counts.total():4} events of shard {chaos_shard}, {len(problems)} silent or with a traceback", flush=True)
    assert not problems, f"{len(problems)} of {EVENTS} events: " + "; ".join(text.split("\n")[0] for text in problems)
    assert ends["second writer", 2], "no second writer met a first one"


def _problem(box: Sandbox, wanted: dict[str, Any]) -> str | None:
    for code, text in box.ends:
        if "Traceback" in text:
            return f"a traceback: {text[text.index('Traceback') :].strip().splitlines()[-1]}"
        if code not in (0, 2, -signal.SIGKILL):
            return f"exit code {code}"
        if code == 2 and "error: " not in text:
            return "refused without a sentence"
    if box.ends[-1][0] == 2:
        return None
    found = results(box.out)
    if found != wanted:
        names = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
        return f"another result without a word: {', '.join(names[:4])}"
    return None
