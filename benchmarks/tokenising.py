"""Tokenization speed of the selected library against `tokenizers`, in one process, on the same texts.

`tokenizers` uses all cores of the process, a fast library one. The ratio compares one worker with the whole machine.
Loading is not timed, and caches are empty.

    python benchmarks/tokenising.py [TOKENIZER_JSON...] [--texts BOOKS.jsonl.zst...] [--megabytes 20]
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path

import zstandard

from unspool.data.tokenize.encoder import Encoder, choose_route, load_checked

# Bytes compared and timed with `tokenizers`, which would take minutes for all texts.
_REFERENCE_BYTES = 6_000_000
_SAMPLE_CHARS = 1_000_000
ASSETS = Path(str(files("unspool"))) / "assets"


@dataclass(frozen=True)
class TokenisingSpeed:
    route: str
    why: str
    megabytes: float
    tokens: int
    choosing_seconds: float
    megabytes_per_second: float
    tokenizers_megabytes_per_second: float
    ratio: float
    equal_documents: str  # of the texts that both tokenized


def measure_tokenising(encoder: Encoder, texts: Sequence[str]) -> TokenisingSpeed:
    """Time the library that `choose_route` selects, on an evenly spread sample of `texts`."""
    begun = time.perf_counter()
    chosen = choose_route(encoder, _spread_sample(texts))
    choosing = time.perf_counter() - begun

    load_checked.cache_clear()
    gc.collect()
    chosen.encode(["a"])
    begun = time.perf_counter()
    arrays = chosen.encode(texts)
    seconds = time.perf_counter() - begun

    plain = replace(encoder, route="tokenizers")
    plain.encode(["a"])
    some = at_least(texts, _REFERENCE_BYTES)
    begun = time.perf_counter()
    expected = plain.encode(some)
    plain_seconds = time.perf_counter() - begun

    equal = sum(ids.tobytes() == true.tobytes() for ids, true in zip(arrays, expected, strict=False))
    speed, plain_speed = _megabytes(texts) / seconds, _megabytes(some) / plain_seconds
    return TokenisingSpeed(
        route=chosen.route,
        why=chosen.why,
        megabytes=_megabytes(texts),
        tokens=sum(map(len, arrays)),
        choosing_seconds=choosing,
        megabytes_per_second=speed,
        tokenizers_megabytes_per_second=plain_speed,
        ratio=speed / plain_speed,
        equal_documents=f"{equal} of {len(some)}",
    )


def _spread_sample(texts: Sequence[str]) -> list[str]:
    """Return the same share of every text, from its middle."""
    share = min(1.0, _SAMPLE_CHARS / max(1, sum(map(len, texts))))
    return [text[(start := int(len(text) * (1 - share) / 2)) : start + int(len(text) * share)] for text in texts]


def at_least(texts: Sequence[str], num_bytes: int) -> list[str]:
    taken: list[str] = []
    for text in texts:
        if _megabytes(taken) * 1e6 >= num_bytes:
            break
        taken.append(text)
    return taken


def _megabytes(texts: Sequence[str]) -> float:
    return sum(len(text.encode()) for text in texts) / 1e6


def read_texts(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        stream = zstandard.ZstdDecompressor().stream_reader(file) if path.suffix == ".zst" else file
        for line in io.TextIOWrapper(stream, encoding="utf-8"):
            yield str(json.loads(line)["text"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokenization speed of the selected library against `tokenizers`.")
    parser.add_argument("tokenizers", nargs="*", type=Path, default=[ASSETS / "tiny-base/tokenizer.json"], help="files")
    parser.add_argument("--texts", nargs="+", type=Path, default=[ASSETS / "demo/train.jsonl.zst"], help="JSONL files")
    parser.add_argument("--megabytes", type=float, default=20)
    options = parser.parse_args()
    texts = at_least([text for path in options.texts for text in read_texts(path)], int(options.megabytes * 1e6))
    for path in options.tokenizers:
        # BOS and EOS cost no measurable time, so any ids will do.
        speed = measure_tokenising(Encoder(path.read_text(encoding="utf-8"), (), 0), texts)
        print(json.dumps({"tokenizer": str(path), **asdict(speed)}, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
