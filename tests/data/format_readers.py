"""Reads packed rows with the formats' own libraries and prints them as JSON. Runs without Unspool.

python format_readers.py arrow|parquet|mds|megatron FOLDER
"""

import json
import sys
from itertools import pairwise
from pathlib import Path


def read_arrow(folder):
    import datasets

    return [dict(row) for row in datasets.load_from_disk(folder)]


def read_parquet(folder):
    import datasets

    return [dict(row) for row in datasets.load_dataset(folder, split="train")]


def read_mds(folder):
    from streaming import StreamingDataset

    samples = StreamingDataset(local=folder, batch_size=1, shuffle=False)
    return [{name: value.tolist() for name, value in sample.items()} for sample in samples]


def read_megatron(folder):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    found = IndexedDataset(str(Path(folder) / "data"))
    borders = found.document_indices.tolist()
    return [[found[index].tolist() for index in range(first, last)] for first, last in pairwise(borders)]


if __name__ == "__main__":
    name, path = sys.argv[1:]
    rows = globals()[f"read_{name}"](path)
    print("\n" + json.dumps(rows))
