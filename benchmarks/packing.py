"""Packing speed, and how evenly work is spread over ranks.

    python benchmarks/packing.py [--tokens 64M] [--save]

Generated documents: short ones of about 600 tokens, long ones of about 100K. `pack` is packing alone, `build` is
everything that `unspool pack` does with the corpus: shuffling, reading, packing, Arrow files, checksums. Both count
tokens of the corpus. `--save` writes benchmarks/results/packing.json.
"""

import argparse
import json
import platform
import resource
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from unspool.core.artifacts import seal
from unspool.core.rng import rng_for
from unspool.core.sizes import format_size, parse_size
from unspool.data.corpus.store import CorpusWriter, open_corpus
from unspool.data.mixture import ModelShape, arrange, imbalance, row_cost
from unspool.data.packing.build import build_rows
from unspool.data.packing.config import DatasetConfig
from unspool.data.packing.pack import PACKERS, Doc, Tally

RESULTS = Path(__file__).parent / "results" / "packing.json"
SHORT, LONG = 600, 100_000
LLAMA_8B = ModelShape(num_layers=32, attention_width=4096, num_params=8_030_000_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=parse_size, default=parse_size("64M"), help="tokens of each corpus")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results: dict[str, Any] = {
            "machine": platform.machine(),
            "packing": list(measure_packing(Path(folder), args.tokens)),
        }
    results["balance"] = measure_balance()
    results["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"peak memory {results['peak_mib']} MiB, mapped files included")
    if args.save:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def measure_packing(folder: Path, tokens: int) -> Any:
    corpora = {"short": folder / "short", "long": folder / "long"}
    for name, mean in (("short", SHORT), ("long", LONG)):
        write_corpus(corpora[name], draw_lens(mean, tokens, rng_for(0, "packing", name)))
    print(f"{'mode':8}{'rows':>6}  {'documents':12}{'pack':>10}{'build':>10}   million tokens per second")
    for mode in PACKERS:
        for row_len in (2 << 10, 64 << 10):
            # Short documents cannot fill rows of 64K alone.
            for sources in (["long"],) if mode == "whole" else (["short"], ["short", "long"]):
                line = measure(mode, row_len, {name: corpora[name] for name in sources}, folder / "rows")
                print(
                    f"{mode:8}{format_size(row_len):>6}  {line['documents']:12}"
                    f"{line['pack'] / 1e6:10.0f}{line['build'] / 1e6:10.0f}   fill {line['fill_rate']:.4%}"
                )
                yield line


def measure(mode: str, row_len: int, corpora: dict[str, Path], out: Path) -> dict[str, Any]:
    readers = {name: open_corpus(path) for name, path in corpora.items()}
    docs = (Doc(tokens, name) for name, reader in readers.items() for tokens in reader)
    began = time.perf_counter()
    deque(PACKERS[mode](docs, row_len, Tally()), maxlen=0)
    pack_seconds = time.perf_counter() - began

    shares = {name: float(reader.num_tokens) for name, reader in readers.items()}
    config = DatasetConfig.model_validate({"from": shares, "length": row_len, "pack": mode})
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    began = time.perf_counter()
    counts = build_rows(config, corpora, out, tokenizer=tokenizer, seed=0)
    build_seconds = time.perf_counter() - began
    return {
        "mode": mode,
        "row_len": row_len,
        "documents": "+".join(corpora),
        "pack": counts["tokens_in"] / pack_seconds,
        "build": counts["tokens_in"] / build_seconds,
        "fill_rate": counts["fill_rate"],
    }


def draw_lens(mean: int, tokens: int, rng: np.random.Generator) -> np.ndarray:
    """Log-normal lengths, as in real text; a few are many times the mean."""
    spread = 1.0
    count = 2 * tokens // mean + 10
    lens = rng.lognormal(np.log(mean) - spread**2 / 2, spread, size=count).astype(np.int64) + 1
    return lens[: int(np.searchsorted(np.cumsum(lens), tokens)) + 1]


def write_corpus(out: Path, lens: np.ndarray) -> None:
    partial = out.with_name(out.name + ".making")
    partial.mkdir()
    text = np.arange(int(lens.max()), dtype=np.uint32)
    with CorpusWriter(partial / "docs-00000.arrow") as writer:
        for number, size in enumerate(lens.tolist()):
            writer.append(str(number), text[:size])
    seal(partial, out, kind="corpus", inputs={}, settings={}, counts={})


def measure_balance() -> dict[str, Any]:
    """ProLong's mix on 8 ranks of 8 rows: 63% of rows are one document of 64K, the others packed short ones."""
    row_len, ranks, per_rank = 64 << 10, 8, 8
    rng = rng_for(0, "balance")
    before, after = [], []
    for _ in range(200):
        costs = np.array([row_cost(draw_row(row_len, rng), LLAMA_8B) for _ in range(ranks * per_rank)])
        before.append(imbalance(costs, np.arange(len(costs)).reshape(ranks, per_rank)))
        after.append(imbalance(costs, arrange(costs, ranks)))
    shown = {}
    for name, kind in (("ranks", 0), ("synchronised", 1)):
        shown[name] = {
            "before": float(np.mean([each[kind] for each in before])),
            "after": float(np.mean([each[kind] for each in after])),
        }
        print(f"imbalance, {name}: {shown[name]['before']:.4f} before, {shown[name]['after']:.4f} after")
    return shown


def draw_row(row_len: int, rng: np.random.Generator) -> np.ndarray:
    if rng.random() < 0.63:
        return np.array([row_len])
    ends = np.cumsum(draw_lens(SHORT, row_len, rng))
    return np.diff(np.minimum(ends, row_len), prepend=0)


if __name__ == "__main__":
    main()
