"""A tiny model trained from scratch on text that has something to be learnt, the same on every machine."""

import json
from pathlib import Path

import numpy as np
import torch

from factory import CPU, SMALL_SIZE, build_stage, build_tokenizer, save_rows
from unspool.data.packing.row import Row
from unspool.models.config import SIZES, NewModel
from unspool.training.metrics.logger import METRICS
from unspool.training.stage import StageInputs, run_stage

GOLDEN = Path(__file__).parent / "golden_loss.json"
STEPS = 40
STAGE = build_stage(
    context_length=64,
    mix={"words": 0.75, "counts": 0.25},
    tokens=STEPS * 256,
    batch_tokens=256,
    micro_batch_tokens=128,
    lr=1e-2,
)


def train_golden(folder: Path) -> list[float]:
    """The loss of every step, on one thread: sums come in one order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    true_size = SIZES["4M"]
    SIZES["4M"] = SMALL_SIZE
    try:
        build_tokenizer().save_pretrained(folder / "tokenizer")
        new = NewModel.model_validate({"size": "4M", "tokenizer": str(folder / "tokenizer"), "context_length": 64})
        rows = {"words": save_rows(folder / "words", _words()), "counts": save_rows(folder / "counts", _counts())}
        run_stage(STAGE, StageInputs(model=new, datasets=rows), folder / "one", seed=0, device=CPU)
    finally:
        SIZES["4M"] = true_size
        torch.set_num_threads(threads)
    return [json.loads(line)["loss"] for line in (folder / "one" / METRICS).read_text().splitlines()]


def _words() -> list[Row]:
    """A few words again and again, two documents in a row."""
    rng = np.random.default_rng(0)
    words = rng.integers(20, 270, size=(8, 4))
    return [_row(words[rng.integers(8, size=16)].reshape(-1), (40, 24)) for _ in range(24)]


def _counts() -> list[Row]:
    """Numbers that go up."""
    return [_row((start + np.arange(64)) % 200, (64,)) for start in range(0, 200, 10)]


def _row(tokens: np.ndarray, doc_lens: tuple[int, ...]) -> Row:
    return Row(
        tokens=tokens.astype(np.uint32),
        doc_lens=np.array(doc_lens, dtype=np.int32),
        loss_mask=None,
        source="made-up",
        attention="intra_document",
    )
