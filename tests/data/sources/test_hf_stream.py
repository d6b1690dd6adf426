"""A recipe that streams from a Hub, with the real client: what it fetches, and what it fetches after a kill."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from unspool.core.artifacts import read_manifest
from unspool.data.corpus.store import open_corpus

from ..conftest import prose
from .hub_server import HubServer

ASSETS = Path(__file__).parents[3] / "src/unspool/assets/tiny-base"


@pytest.fixture
def server(tmp_path):
    folder = tmp_path / "hub"
    (folder / "data").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number in range(4):
        texts = [prose(6000, seed=100 * number + document) for document in range(100)]
        table = pa.table({"text": texts, "other": [rng.bytes(20_000) for _ in texts]})
        path = folder / f"data/train-{number:05}-of-00004.parquet"
        pq.write_table(table, path, row_group_size=10, compression="none")
    found = HubServer(folder)
    yield found
    found.close()


def recipe(root: Path, *, tokens: int) -> Path:
    stage = {"name": "only", "context_length": 1024, "batch_tokens": 1024, "lr": 1e-4, "mix": {"web": 1.0}}
    content = {
        "name": "streamed",
        "model": str(ASSETS),
        "sources": {"web": {"kind": "hf", "path": "org/name"}},
        "datasets": {"web": {"from": "web", "seq_len": 1024}},
        "stages": [{**stage, "tokens": tokens}],
        "engine": {"workers": 1},
    }
    path = root / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def start(root: Path, path: Path, server: HubServer, out: str) -> subprocess.Popen[bytes]:
    code = (
        "import unspool.data.sources.hub_stream as stream; stream.TASK_BYTES = 1\n"
        "from unspool.cli.main import main; main()"
    )
    environment = {
        **os.environ,
        "HF_ENDPOINT": server.url,
        "HF_HOME": str(root / f"home-{out}"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
    }
    command = [sys.executable, "-c", code, "tokenize", str(path), "--set", f"out={root / out}"]
    return subprocess.Popen(command, env=environment, start_new_session=True)


@pytest.mark.slow
def test_a_recipe_fetches_what_its_mix_needs_and_continues_after_a_kill(tmp_path, server):
    size = sum(file.stat().st_size for file in (server.folder / "data").iterdir())
    path = recipe(tmp_path, tokens=1_000_000)
    assert start(tmp_path, path, server, "straight").wait() == 0
    counts = (read_manifest(tmp_path / "straight/corpus/web") or {})["counts"]
    straight, server.sent = server.sent, 0

    # What the mix needs and five percent; never the other column, nor the rest of the split.
    assert 1_000_000 < counts["tokens"] < 1.2 * 1_000_000
    needed = counts["characters"]
    assert needed < straight < 1.1 * needed + (1 << 20) < size / 2, (needed, straight, size)

    run = start(tmp_path, path, server, "killed")
    while server.sent < straight / 2:
        assert run.poll() is None
        time.sleep(0.01)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    before, server.sent = server.sent, 0
    assert start(tmp_path, path, server, "killed").wait() == 0

    assert before + server.sent < straight + (2 << 20), (before, server.sent, straight)
    one, other = open_corpus(tmp_path / "straight/corpus/web"), open_corpus(tmp_path / "killed/corpus/web")
    assert len(one) == len(other) and all((one[at] == other[at]).all() for at in range(len(one)))
    print(f"split {size:,} bytes, text {needed:,}, fetched {straight:,}; killed at {before:,}, then {server.sent:,}")
