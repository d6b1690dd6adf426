"""One small stage for all tests of stages: what it is made of, and its result when nothing disturbs it."""

import json
from importlib.resources import files
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from factory import (
    save_folder,
    save_rows,
)
from unspool.data.packing.row import Row
from unspool.models.tokenizer import load_tokenizer
from unspool.training.stage import StageInputs

from .stage_runs import LONG, SHORT, run


@pytest.fixture(scope="session")
def materials(tmp_path_factory) -> StageInputs:
    folder = tmp_path_factory.mktemp("materials")
    rows = {
        "long": save_rows(folder / "datasets" / "long", LONG),
        "short": save_rows(folder / "datasets" / "short", SHORT),
    }
    return StageInputs(model=str(save_folder(folder / "model")), datasets=rows)


@pytest.fixture(scope="session")
def never_killed(materials, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "one"
    run(materials, out)
    return out


@pytest.fixture(scope="session")
def text_rows(tmp_path_factory) -> Path:
    """Rows of real text that the shipped model can read whole."""
    assets = files("unspool") / "assets"
    tokenizer = load_tokenizer(str(assets / "tiny-base"))
    with pa.input_stream(str(assets / "demo" / "train.jsonl.zst"), compression="zstd") as stream:
        texts = [json.loads(line)["text"] for line in stream.read(400_000).splitlines()[:-1]]
    tokens = np.array(tokenizer("\n".join(texts))["input_ids"][: 64 * 256], dtype=np.uint32).reshape(64, 256)
    lens = np.array([256], dtype=np.int32)
    rows = [
        Row(tokens=row, doc_lens=lens, loss_mask=None, source="books", attention="intra_document") for row in tokens
    ]
    return save_rows(tmp_path_factory.mktemp("rows") / "short", rows)
