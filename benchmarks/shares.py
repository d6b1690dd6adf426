"""Check that shares of sources hold in trained tokens, for documents of very different lengths.

    python benchmarks/shares.py [--tokens 16M] [--seq-len 64K] [--save]

Generated documents whose tokens identify their source. The script counts labels in the rows on disk and ignores the
manifest. `--save` writes benchmarks/results/shares.json.
"""

import argparse
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from unspool.core.artifacts import seal
from unspool.core.rng import rng_for
from unspool.core.sizes import format_size, parse_size
from unspool.data.corpus.store import CorpusWriter
from unspool.data.packing.build import build_rows
from unspool.data.packing.config import DatasetConfig
from unspool.data.packing.row import IGNORE, labels
from unspool.data.packing.store import open_rows
from unspool.models.location import resolve_path
from unspool.models.tokenizer import load_tokenizer

RESULTS = Path(__file__).parent / "results" / "shares.json"
SHARES = {"a": 0.5, "b": 0.3, "c": 0.2}
# Words of one source. Ids below are special tokens of strategies.
SPAN = 20_000
# Mean lengths in rows of the default length: 100 and 3,000 tokens, and 3 rows.
LENGTHS = {
    "short a, long c": {"a": 100 / 65_536, "b": 3000 / 65_536, "c": 3.0},
    "long a, short c": {"a": 3.0, "b": 3000 / 65_536, "c": 100 / 65_536},
    "1, 2 and 9 rows": {"a": 1.0, "b": 2.0, "c": 9.0},
}
COMBINATIONS: list[tuple[str, dict[str, Any]]] = [
    ("short a, long c", {"packing": "concat"}),
    ("long a, short c", {"packing": "concat"}),
    ("short a, long c", {"packing": "truncate"}),
    ("long a, short c", {"packing": "truncate"}),
    ("short a, long c", {"packing": "best_fit"}),
    ("1, 2 and 9 rows", {"packing": "single_doc"}),
    ("short a, long c", {"packing": "concat", "utk": {}}),
    ("long a, short c", {"packing": "truncate", "utk": {}}),
    ("short a, long c", {"packing": "concat", "cip": {"pieces": 4, "split": "equal"}}),
    ("long a, short c", {"packing": "best_fit", "upsample": {"above": "32K", "times": 3}}),
    ("short a, long c", {"packing": "truncate", "pose": {"target": "512K"}}),
    ("short a, long c", {"packing": "concat", "nextlong": {}}),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=parse_size, default=parse_size("16M"), help="tokens of each dataset")
    parser.add_argument("--seq-len", type=parse_size, default=parse_size("64K"))
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    tokenizer = load_tokenizer(resolve_path("asset:tiny-base", Path()))
    results = []
    print("| packing | strategy | documents | rows | a | b | c | largest error |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        for name, means in LENGTHS.items():
            for number, source in enumerate(SHARES):
                # Several times the dataset's tokens, because truncation drops most of a long document.
                tokens = args.tokens * SHARES[source] * (1.3 if means[source] < 0.5 else 8)
                write_corpus(Path(folder) / name / source, means[source] * args.seq_len, tokens, number)
        for number, (name, options) in enumerate(COMBINATIONS):
            corpora = {source: Path(folder) / name / source for source in SHARES}
            # NExtLong searches the whole corpus for every row.
            limit = args.tokens // 4 if "nextlong" in options else args.tokens
            config = DatasetConfig.model_validate({"from": SHARES, "seq_len": args.seq_len, "limit": limit} | options)
            out = Path(folder) / str(number)
            build_rows(config, corpora, out, tokenizer=tokenizer, seed=0)
            rows, found = count_labels(out)
            off = max(abs(found[source] - share) for source, share in SHARES.items())
            strategy = ", ".join(key for key in options if key != "packing") or "–"
            shown = " | ".join(f"{found[source]:.4f}" for source in SHARES)
            print(f"| {config.packing} | {strategy} | {name} | {rows:,} | {shown} | {off:.2%} |", flush=True)
            results.append({"packing": config.packing, "strategy": strategy, "documents": name, "rows": rows, **found})
    print(f"\nRequested: a 0.5, b 0.3, c 0.2; rows of {format_size(args.seq_len)} tokens.")
    if args.save:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def write_corpus(out: Path, mean: float, tokens: float, number: int) -> None:
    rng = rng_for(0, "shares", out.parent.name, out.name)
    partial = out.with_name(out.name + ".partial")
    partial.mkdir(parents=True)
    with CorpusWriter(partial / "docs-00000.arrow") as writer:
        written = 0
        while written < tokens:
            size = max(2, int(mean * rng.lognormal(-0.125, 0.5)))
            words = rng.integers(SPAN * (1 + number), SPAN * (2 + number), size=size)
            writer.append(f"{out.name}:{written}", words.astype(np.uint32))
            written += size
    seal(partial, out, kind="corpus", inputs={}, settings={}, counts={})


def count_labels(folder: Path) -> tuple[int, dict[str, float]]:
    """Number of rows of a dataset, and each source's share of their labels."""
    rows = open_rows(folder)
    found = np.zeros(1 + len(SHARES), dtype=np.int64)
    for row in (rows[index] for index in range(len(rows))):
        targets = labels(row.tokens, row.doc_lens, row.loss_mask)
        found += np.bincount(targets[targets != IGNORE] // SPAN, minlength=len(found))
    return len(rows), dict(zip(SHARES, (found[1:] / found[1:].sum()).tolist(), strict=True))


if __name__ == "__main__":
    main()
