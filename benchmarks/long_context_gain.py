"""Speed of LongFilter's scores (`score` of a dataset): documents and tokens per second.

    python benchmarks/long_context_gain.py [--long 8K] [--short 2K] [--length 8K] [--documents 8] [--save]
    python benchmarks/long_context_gain.py --device cpu [--save]

The 135M shape with random weights scores documents of random tokens through the product's `score_documents`, after a
warm-up document. A document of N tokens costs a pass over parts of `--long` tokens, and one over each window of
`--short`. `--save` adds the result of this device to results/long_context_gain.json. `--small` is a tiny model.
"""

import argparse
import json
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gate_parts import Gate, make_model
from gpu import machine, require_gpu

from unspool.core.sizes import format_size, parse_size
from unspool.data.corpus.in_memory import build_from_records
from unspool.data.document_scores import score_documents
from unspool.data.strategies.long_context_gain import STRIDES, LongContextGain
from unspool.models.tokenizer import load_tokenizer
from unspool.recipe.document_scorer import ModelScorer

RESULTS = Path(__file__).parent / "results" / "long_context_gain.json"
CASE = "135m-32k"
WORDS = 200  # ids of the random tokens; the shipped tokenizer, which goes with the model, has more


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--long", type=parse_size, default=8 << 10)
    parser.add_argument("--short", type=parse_size, default=2 << 10)
    parser.add_argument("--length", type=parse_size, default=8 << 10, help="tokens of a document")
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--save", action="store_true", help=f"add the result to results/{RESULTS.name}")
    parser.add_argument("--small", action="store_true", help="a tiny model on a CPU")
    args = parser.parse_args()
    device = "cpu" if args.small else args.device
    if device == "cuda":
        require_gpu()
    config = LongContextGain(long=args.long, short=args.short)
    with tempfile.TemporaryDirectory(prefix="long-context-gain-") as folder:
        gate = Gate(Path(folder), small=args.small)
        gate.device = device
        make_model(gate, CASE)
        line = measure(gate.model(CASE), config, device, documents=args.documents, length=args.length)
    print(describe(line))
    if args.save:
        known = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
        RESULTS.write_text(json.dumps(known | {device: about(device) | line}, indent=1) + "\n")


def measure(model: Path, config: LongContextGain, device: str, *, documents: int, length: int) -> dict[str, Any]:
    scorer, tokenizer = ModelScorer(str(model), device), load_tokenizer(str(model))
    rng = np.random.default_rng(0)
    records = rng.integers(WORDS, size=(documents, length)).tolist()
    passes = []
    losses = scorer.losses

    def counted(tokens: np.ndarray) -> np.ndarray:
        passes.append(len(tokens))
        return losses(tokens)

    scorer.losses = counted  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory(prefix="corpus-") as scratch:
        corpora = Path(scratch, "warm"), Path(scratch, "timed")
        for corpus, some in zip(corpora, (records[:1], records), strict=True):
            build_from_records(some, corpus, tokenizer=tokenizer, text="text", name=corpus.name)
        if device == "cuda":
            score_documents(config, corpora[0], Path(scratch, "warm-scores"), scorer=scorer)
        else:  # kernels are not compiled, and a document may take a minute
            scorer.losses(np.zeros(64, dtype=np.int64))
        passes.clear()
        began, cpu_began = time.perf_counter(), time.process_time()
        counts = score_documents(config, corpora[1], Path(scratch, "timed-scores"), scorer=scorer)
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    return {
        "long": config.long,
        "short": config.short,
        "windows_per_short_context": STRIDES,
        "documents": counts["documents"],
        "tokens": counts["tokens"],
        "passes": len(passes),
        "tokens_through_the_model": sum(passes),
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu_seconds, 2),  # less than threads × seconds if other processes had a part of the cores
        "tokens_per_second": round(counts["tokens"] / seconds, 1),
        "documents_per_second": round(counts["documents"] / seconds, 4),
    }


def about(device: str) -> dict[str, Any]:
    if device == "cuda":
        return {"machine": machine()}
    packages = {"torch": torch.__version__, "python": platform.python_version()}
    return {"machine": {"cores": os.cpu_count(), "threads": torch.get_num_threads(), **packages}}


def describe(line: dict[str, Any]) -> str:
    per_token = line["tokens_through_the_model"] / line["tokens"]
    return (
        f"{line['documents']} documents, {line['tokens']:,} tokens, contexts of {format_size(line['long'])} and "
        f"{format_size(line['short'])}: {line['seconds']:.1f} s, {line['tokens_per_second']:,.0f} tokens/s, "
        f"{line['documents_per_second']:.3g} documents/s; {line['passes']} passes, {per_token:.2f} tokens through the "
        "model for each token of text"
    )


if __name__ == "__main__":
    main()
