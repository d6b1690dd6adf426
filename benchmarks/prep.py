"""Speed and memory of `unspool tokenize`, and of tokenization against `tokenizers`.

    python benchmarks/prep.py [--tokenizers FOLDER...] [--texts BOOKS.jsonl.zst...] [--sizes 64M 256M] [--save]

For each tokenizer: speed of the selected tokenizer library against `tokenizers` in this process, then `unspool
tokenize` with two workers over as much text as each size (texts are repeated and cut at different places). Speed is
text over wall-clock time of the command, imports included. Memory is the largest sum of the resident sets of all its
processes, sampled 20 times a second; file pages that two of them map count twice.
Targets: 15 MB/s, 15 times `tokenizers`, below 1.5 GiB and flat in the size. Packing speed: benchmarks/packing.py.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import zstandard
from tokenising import ASSETS, at_least, measure_tokenising, read_texts
from transformers import AutoTokenizer

from unspool.core.sizes import format_size, parse_size
from unspool.data.tokenize.encoder import build_encoder

FILE_CHARS = 16_000_000
RESULTS = Path(__file__).parent / "results" / "prep.json"


def write_corpus(texts: list[str], folder: Path, num_bytes: int) -> int:
    """Write JSONL files with about `num_bytes` of text; return the exact number of bytes of text."""
    written, turn, part = 0, 0, 0
    while written < num_bytes:
        lines: list[str] = []
        chars = 0
        while chars < FILE_CHARS and written < num_bytes:
            text = texts[turn % len(texts)]
            cut = 1000 * (turn // len(texts)) % max(1, len(text))
            text = text[cut:] + text[:cut]
            lines.append(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            chars += len(text)
            written += len(text.encode())
            turn += 1
        data = zstandard.ZstdCompressor(level=3).compress("".join(lines).encode())
        (folder / f"part-{part:04d}.jsonl.zst").write_bytes(data)
        part += 1
    return written


def tree_memory(pid: int) -> int:
    """Resident bytes of a process and its descendants."""
    total = 0
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        children = [
            child for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
        ]
    except OSError:
        return 0
    total = pages * 4096
    return total + sum(tree_memory(int(child)) for child in children)


def timed(command: list[str]) -> tuple[float, int]:
    """Seconds and peak resident memory of the command with its children."""
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    peak = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.05):
            peak = max(peak, tree_memory(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    _, said = process.communicate()
    done.set()
    watcher.join()
    if process.returncode:
        sys.exit(said)
    return time.perf_counter() - begun, peak


def measure_build(texts: list[str], tokenizer: str, size: int) -> dict[str, float | str]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        num_bytes = write_corpus(texts, folder, size)
        recipe = {
            "name": "prep",
            "model": {"size": "4M", "tokenizer": tokenizer, "context": "8K"},
            "out": str(folder / "run"),
            "engine": {"workers": 2},
            "sources": {"books": {"kind": "jsonl", "path": str(folder / "*.jsonl.zst")}},
            "rows": {"r": {"from": "books", "length": "8K", "packing": "concat"}},
            "stages": [{"name": "s", "context": "8K", "mix": {"r": 1.0}, "tokens": "8K", "batch": "8K", "lr": 1e-4}],
        }
        (folder / "recipe.yaml").write_text(json.dumps(recipe))
        unspool = [str(Path(sys.executable).with_name("unspool"))]
        seconds, memory = timed([*unspool, "corpus", str(folder / "recipe.yaml")])
        row_seconds, row_memory = timed([*unspool, "rows", str(folder / "recipe.yaml")])
        counts = json.loads((folder / "run/corpus/books/manifest.json").read_text())["counts"]
    return {
        "text": f"{num_bytes / 1e6:.0f} MB",
        "tokens": counts["tokens"],
        "route": counts["tokenized_with"],
        "corpus_seconds": round(seconds, 1),
        "corpus_megabytes_per_second": round(num_bytes / 1e6 / seconds, 1),
        "corpus_peak_mib": memory >> 20,
        "rows_seconds": round(row_seconds, 1),
        "rows_peak_mib": row_memory >> 20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed and memory from text to rows.")
    parser.add_argument("--tokenizers", nargs="+", default=[str(ASSETS / "tiny-base")], help="folders")
    parser.add_argument("--texts", nargs="+", type=Path, default=[ASSETS / "demo/train.jsonl.zst"], help="JSONL files")
    parser.add_argument("--sizes", nargs="+", default=["64M", "256M"], help="bytes of text")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args()
    texts = [text for path in options.texts for text in read_texts(path)]
    sizes = [parse_size(size.replace("G", "B")) for size in options.sizes]
    result: dict[str, object] = {
        "machine": f"{platform.processor() or platform.machine()}, Python {platform.python_version()}",
        "versions": {name: version(name) for name in ("tokenizers", "gigatoken", "tiktoken", "datatrove", "pyarrow")},
    }
    for number, folder in enumerate(options.tokenizers):
        encoder = build_encoder(AutoTokenizer.from_pretrained(folder))
        speed = measure_tokenising(encoder, at_least(texts, 30_000_000))
        print(
            f"{Path(folder).name}: tokenising with {speed.route} {speed.megabytes_per_second:.1f} MB/s, tokenizers "
            f"{speed.tokenizers_megabytes_per_second:.2f} MB/s: {speed.ratio:.1f} times; equal {speed.equal_documents}"
        )
        builds = []
        for size in sizes if number == 0 else sizes[:1]:
            builds.append(measure_build(texts, str(Path(folder).resolve()), size))
            print(f"  {format_size(size)} bytes: {builds[-1]}")
        result[Path(folder).name] = {"tokenising": asdict(speed), "builds": builds}
    if options.save:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
