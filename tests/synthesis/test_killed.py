"""A run that is killed again and again ends with the same bytes as one that is not, and asks for nothing twice."""

import hashlib
import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from unspool.recipe.load import load_recipe
from unspool.recipe.synthesis import Synthesis

from .toy import MOCK, read_conversations, write_documents, write_recipe

FAULTS = {"garbage": 0.05, "refers": 0.05, "unsupported": 0.05, "error": 0.2}


def run(recipe: str) -> None:
    made = Synthesis(load_recipe(recipe))
    made.corpora()
    made.make()


def killed_run(recipe: Path, *, kills: int, least: float, most: float) -> None:
    """Run, kill at a random moment of its work, run again …; a last run is left to whoever calls."""
    context = multiprocessing.get_context("fork")
    dice = random.Random(7)
    work = recipe.parent / "run" / "synth" / "long.work" / "journal.jsonl"
    counted, sizes = 0, []
    while counted < kills:
        process = context.Process(target=run, args=(str(recipe),))
        before = _size(work)
        process.start()
        end = time.monotonic() + 300
        while process.is_alive() and _size(work) <= before and time.monotonic() < end:
            time.sleep(0.002)
        time.sleep(dice.uniform(least, most))
        assert process.is_alive(), f"it ended before it was killed {kills} times ({counted}); make more documents"
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        counted += 1
        sizes.append(_size(work))
    assert sizes == sorted(sizes)
    assert len(set(sizes)) > 1, "each run was killed before it had got further"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def reply_keys(folder: Path) -> list[str]:
    lines = (folder / "run/replies/synth.jsonl").read_text().splitlines()
    records: list[dict[str, Any]] = []
    for line in lines:
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return [record["key"] for record in records if "key" in record]


def compare(tmp_path: Path, documents: int, synth: dict[str, Any], **timing: Any) -> list[dict[str, Any]]:
    """A killed run beside one that is left alone; returns what both made.

    Runs that are to be killed get their replies so slowly that none of them can end before, on any machine.
    """
    folders = [tmp_path / "killed", tmp_path / "alone"]
    for folder in folders:
        folder.mkdir()
        write_documents(folder / "docs.jsonl", documents)
    killed_run(write_recipe(folders[0], synth), **timing)
    quick = {**synth, "generator": {**synth["generator"], "seconds": 0}}
    for folder in folders:
        run(str(write_recipe(folder, quick)))
    first, second = (digests(folder / "run/synth/long") for folder in folders)
    assert first == second
    keys = reply_keys(folders[0])
    assert len(keys) == len(set(keys)), "a reply was asked for twice"
    assert sorted(keys) == sorted(reply_keys(folders[1]))
    assert not (folders[0] / "run/synth/long.work").exists()
    records = read_conversations(folders[0] / "run/synth/long")
    assert len({record["id"] for record in records}) == len(records)
    return records


def test_a_run_killed_three_times_ends_as_if_it_had_not_been(tmp_path):
    synth = {"generator": {**MOCK, "faults": FAULTS, "seconds": 0.2, "concurrency": 4}, "ahead": 16}
    records = compare(tmp_path, 160, synth, kills=3, least=0.0, most=1.0)
    assert len(records) > 100


@pytest.mark.slow
def test_ten_thousand_documents_killed_ten_times(tmp_path):
    synth = {"generator": {**MOCK, "faults": FAULTS, "seconds": 0.02, "concurrency": 4}}
    records = compare(tmp_path, 10_000, synth, kills=10, least=0.5, most=6.0)
    assert len(records) > 8000
