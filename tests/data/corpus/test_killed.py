"""A run that is killed, workers and all, at random moments and repeated ends with the bytes of one that never was.

The runs are forked from a process that has imported everything, so that the kills meet work and not imports.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from unspool.core.rng import rng_for
from unspool.data.corpus.build import build_corpus
from unspool.data.corpus.config import EngineConfig
from unspool.data.packing.build import build_rows
from unspool.data.packing.config import DatasetConfig
from unspool.data.sources import base
from unspool.data.sources.base import FileSource
from unspool.data.sources.jsonl import JsonlSource
from unspool.data.sources.repos import ReposSource

from ..conftest import build_tokenizer, prose

SOURCES: dict[str, FileSource] = {
    "books": JsonlSource(kind="jsonl", path="part-*.jsonl", max_bad=1),
    "code": ReposSource(kind="repos", path="repos", max_bad=1),
}
ROWS: dict[str, dict[str, Any]] = {
    "long": {"from": {"books": 0.8, "code": 0.2}, "seq_len": 512},
    "tangled": {"from": "books", "seq_len": 512, "utk": {"min_split": 32}},
}


def write_inputs(root: Path, *, num_files: int, documents: int) -> None:
    """Some of it cannot be read, as anywhere."""
    (root / "repos").mkdir(parents=True)
    for number in range(num_files):
        texts = [prose(400, seed=1000 * number + document) for document in range(documents)]
        lines = [json.dumps({"text": text}) for text in texts]
        lines[number % documents] = '{"text": 3}'
        (root / f"part-{number}.jsonl").write_text("\n".join(lines) + "\n")
        (root / f"repos/repo{number}").mkdir()
        (root / f"repos/repo{number}/mill.py").write_text("\n".join(texts[1:]).replace(" the ", "\nthe "))
        with tarfile.open(root / f"repos/archive{number}.tar.gz", "w:gz") as archive:
            archive.add(root / f"repos/repo{number}", "top")
    (root / "repos/broken.zip").write_bytes(b"PK\3\4 no more")


def build(root: Path, out: Path) -> None:
    """Corpora with two workers, then rows: what `unspool pack` does."""
    base.TASK_BYTES = 1
    tokenizer = build_tokenizer()
    for name, source in SOURCES.items():
        build_corpus(source, out / name, tokenizer=tokenizer, root=root / "in", engine=EngineConfig(workers=2), seed=0)
    for name, config in ROWS.items():
        rows = DatasetConfig.model_validate(config)
        build_rows(rows, {source: out / source for source in SOURCES}, out / name, tokenizer=tokenizer, seed=0)


# In the process that the runs are forked from


def start(root: Path, out: Path) -> int:
    """A run in a separate process group."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setpgid(0, 0)
            build(root, out)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    with suppress(OSError):
        os.setpgid(child, child)  # whichever happens first
    return child


def state(out: Path) -> list[str]:
    """What a run has left behind, in a few words."""
    names = sorted(path.name for path in out.glob("*")) if out.exists() else []
    shards = sorted(str(path.relative_to(out)) for path in out.glob("*.partial/docs-*"))
    return [*names, *shards]


def kill_repeatedly(root: Path, kills: int) -> None:
    """Kill runs at random moments until there were `kills`. One that ends before ends its folder; the next is new."""
    began = time.monotonic()
    assert os.waitpid(start(root, root / "whole"), 0)[1] == 0
    seconds = time.monotonic() - began
    rng = rng_for(0, "kills")
    killed: list[dict[str, Any]] = []
    finished = 0
    while True:
        out = root / f"killed-{finished}"
        child = start(root, out)
        if len(killed) < kills:
            moment = rng.uniform(0, seconds)
            time.sleep(moment)
            # Of a run that has ended, this finds the remains until they are waited for.
            os.killpg(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == -signal.SIGKILL:
            killed.append({"after": round(moment, 2), "left": state(out)})
            if len(killed) > 3 and all(kill["left"] == killed[0]["left"] for kill in killed):
                seconds *= 2  # the machine has become slower, and kills are too early to hit any work
            continue
        assert status == 0, f"a run that was repeated ended with {status}"
        finished += 1
        if len(killed) == kills:
            break
    print(json.dumps({"seconds": seconds, "killed": killed, "finished": finished}))


SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from data.corpus.test_killed import kill_repeatedly
kill_repeatedly(Path(sys.argv[1]), int(sys.argv[2]))
"""


def contents(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def check_kills(root: Path, kills: int) -> None:
    command = [sys.executable, "-c", SCRIPT, str(root), str(kills), str(Path(__file__).parents[2])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    outcome = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(outcome, indent=1))

    assert len(outcome["killed"]) == kills
    states = {tuple(kill["left"]) for kill in outcome["killed"]}
    assert len(states) > 1, "all kills met the same moment of the work"
    whole = contents(root / "whole")
    assert {Path(name).parts[0] for name in whole} == {*SOURCES, *ROWS}
    assert sum(name.endswith(".arrow") for name in whole) > 10
    for number in range(outcome["finished"]):
        # Every file, including the manifests and quarantined records.
        assert contents(root / f"killed-{number}") == whole


def test_five_kills_at_random_moments_end_with_the_same_bytes(tmp_path):
    write_inputs(tmp_path / "in", num_files=5, documents=20)
    check_kills(tmp_path, 5)


@pytest.mark.slow
def test_forty_kills_of_a_larger_run_end_with_the_same_bytes(tmp_path):
    write_inputs(tmp_path / "in", num_files=24, documents=300)
    check_kills(tmp_path, 40)
