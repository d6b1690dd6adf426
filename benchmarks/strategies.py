"""Speed of each strategy against plain packing of the same documents in the same process.

    python benchmarks/strategies.py [--tokens 32M] [--save]

Generated documents: short ones of about 600 tokens, long ones of about 100K, word frequencies by Zipf's law. `alone`
fills rows from documents in memory; `build` is everything that `unspool pack` does with the corpus. Both are million
tokens of rows per second of processor time, the best of several runs, and `×` is the time per token over that of plain
packing. NExtLong is measured on fewer tokens, with index and retrieval timed separately. `--save` writes
benchmarks/results/strategies.json.
"""

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from packing import LONG, SHORT, draw_lens
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import unspool
from unspool.core.artifacts import seal
from unspool.core.rng import rng_for
from unspool.core.sizes import format_size, parse_size
from unspool.data.corpus.store import CorpusReader, CorpusWriter, open_corpus
from unspool.data.packing.build import build_rows
from unspool.data.packing.config import DatasetConfig
from unspool.data.packing.pack import Doc, RowStream, Tally
from unspool.data.packing.row import BATCH_TOKENS
from unspool.data.strategies.base import PackingInputs, build_strategy, finish_rows
from unspool.data.strategies.nextlong import build_negatives
from unspool.data.strategies.upsample import draw_uses, spread

RESULTS = Path(__file__).parent / "results" / "strategies.json"
ASSETS = Path(unspool.__file__).parent / "assets"
PLAIN = "plain"
STRATEGIES: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "utk": {"utk": {}},
    "tangle, per row": {"utk": {"per": "row", "split": "equal"}},
    "interleave 2": {"cip": {"pieces": 2, "split": "equal"}},
    "interleave 8": {"cip": {"pieces": 8, "split": "equal"}},
    "upsample ×5": {"upsample": {"above": "32K", "times": 5}},
    "upsample, Fu": {"upsample": {"above": "4K", "times": 1, "keep": 0.1}},
    "pose": {"pose": {"target": "256K"}},
    "attention full": {"attention": "full"},
}
REPEATS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=parse_size, default=parse_size("32M"), help="tokens of each corpus")
    parser.add_argument("--retrieval-tokens", type=parse_size, default=parse_size("2M"), help="the same for NExtLong")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    args = parser.parse_args()
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(ASSETS / "tiny-base")
    with tempfile.TemporaryDirectory() as folder:
        results: dict[str, Any] = {
            "machine": platform.machine(),
            "strategies": list(measure_strategies(Path(folder), args.tokens, tokenizer)),
            "nextlong": list(measure_negatives(Path(folder), args.retrieval_tokens, tokenizer)),
        }
    if args.save:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def measure_strategies(folder: Path, tokens: int, tokenizer: PreTrainedTokenizerFast) -> Iterator[dict[str, Any]]:
    corpora = {name: folder / name for name in ("short", "long")}
    for name, mean in (("short", SHORT), ("long", LONG)):
        write_corpus(corpora[name], draw_lens(mean, tokens, rng_for(0, "strategies", name)))
    print(f"{'strategy':18}{'rows':>6}  {'documents':12}{'alone':>8}{'×':>6}{'build':>8}{'×':>6}")
    for row_len in (4 << 10, 32 << 10):
        for sources in (["short"], ["short", "long"]):
            used = {name: corpora[name] for name in sources}
            plain: dict[str, float] = {}
            for name, config in STRATEGIES.items():
                if name == "upsample ×5" and "long" not in used:
                    continue  # nothing to repeat
                line = measure(name, config, row_len, used, folder / "rows", tokenizer)
                plain = plain or line
                line |= {f"{kind}_ratio": plain[kind] / line[kind] for kind in ("alone", "build")}
                print(
                    f"{name:18}{format_size(row_len):>6}  {line['documents']:12}{line['alone'] / 1e6:8.0f}"
                    f"{line['alone_ratio']:6.2f}{line['build'] / 1e6:8.1f}{line['build_ratio']:6.2f}"
                )
                yield line


def measure(
    name: str,
    options: dict[str, Any],
    row_len: int,
    corpora: dict[str, Path],
    out: Path,
    tokenizer: PreTrainedTokenizerFast,
) -> dict[str, Any]:
    readers = {source: open_corpus(path) for source, path in corpora.items()}
    shares = {source: float(reader.num_tokens) for source, reader in readers.items()}
    config = DatasetConfig.model_validate({"from": shares, "length": row_len, **options})
    means = PackingInputs(readers=readers, tokenizer=tokenizer, pad=0, seed=0, name=out.name)
    alone = best(lambda: run_alone(config, means) * row_len)

    def build() -> int:
        (out / "manifest.json").unlink(missing_ok=True)
        return int(build_rows(config, corpora, out, tokenizer=tokenizer, seed=0)["tokens"])

    return {
        "strategy": name,
        "row_len": row_len,
        "documents": "+".join(corpora),
        "alone": alone,
        "build": best(build),
    }


def run_alone(config: DatasetConfig, means: PackingInputs) -> int:
    """Fill rows from documents in memory and count the rows."""
    strategy = build_strategy(config, means)
    rng = rng_for(0, "skips")
    rows = strategy.pack(documents(config, means.readers), config.seq_len, Tally())
    count = 0
    while batch := list(islice(rows, max(1, BATCH_TOKENS // config.seq_len))):
        count += len(finish_rows(batch, config, rng))
    return count


def documents(config: DatasetConfig, readers: dict[str, CorpusReader]) -> Iterator[Doc]:
    for source, reader in readers.items():
        if config.upsample is None:
            yield from (Doc(tokens, source, number) for number, tokens in enumerate(reader))
        else:
            uses = draw_uses(reader.lens, config.upsample, rng_for(0, "uses"))
            for number in spread(uses, rng_for(0, "spread")).tolist():
                yield Doc(reader[number], source, number)


def measure_negatives(folder: Path, tokens: int, tokenizer: PreTrainedTokenizerFast) -> Iterator[dict[str, Any]]:
    """Print the time of index, retrieval and the rest; compare the rest with plain packing."""
    for row_len in (4 << 10, 32 << 10):
        name = f"negatives-{row_len}"
        write_corpus(folder / name, draw_lens(row_len, tokens, rng_for(0, "strategies", name)))
        readers = {name: open_corpus(folder / name)}
        config = DatasetConfig.model_validate({"from": name, "length": row_len, "nextlong": {}})
        assert config.nextlong is not None
        began = time.process_time()
        negatives = build_negatives(config.nextlong, readers, keep_rest=True, embed=None)
        index_seconds = time.process_time() - began
        timed = Timed(negatives._retriever.search)
        negatives._retriever.search = timed
        began = time.process_time()
        made = count_rows(negatives.pack(documents(config, readers), row_len, Tally())) * row_len
        seconds = time.process_time() - began
        line = {
            "row_len": row_len,
            "tokens_in": readers[name].num_tokens,
            "tokens": made,
            "index_seconds": index_seconds,
            "search_seconds": timed.seconds,
            "other_seconds": seconds - timed.seconds,
            "tokens_per_second": made / (index_seconds + seconds),
        }
        print(
            f"negatives, {format_size(row_len)} rows, {format_size(tokens)} tokens: index {index_seconds:.1f} s, "
            f"search {timed.seconds:.1f} s, the rest {line['other_seconds']:.1f} s for {made / 1e6:.1f}M tokens "
            f"of rows ({line['tokens_per_second'] / 1e6:.2f}M per second)"
        )
        yield line


class Timed:
    """Wrap a function so that its time is summed."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self.seconds = 0.0

    def __call__(self, *args: Any) -> Any:
        began = time.process_time()
        try:
            return self._call(*args)
        finally:
            self.seconds += time.process_time() - began


def count_rows(rows: RowStream) -> int:
    return sum(1 for _ in rows)


def best(work: Callable[[], int]) -> float:
    """Tokens per second of the fastest of several runs."""
    rates = []
    for _ in range(REPEATS):
        began = time.process_time()
        rates.append(work() / (time.process_time() - began))
    return max(rates)


def write_corpus(out: Path, lens: np.ndarray) -> None:
    partial = out.with_name(out.name + ".making")
    partial.mkdir()
    rng = rng_for(0, "words", out.name)
    with CorpusWriter(partial / "docs-00000.arrow") as writer:
        for number, size in enumerate(lens.tolist()):
            words = np.minimum(rng.zipf(1.2, size=size), 4000).astype(np.uint32)
            writer.append(str(number), words)
    seal(partial, out, kind="corpus", inputs={}, settings={}, counts={})


if __name__ == "__main__":
    main()
