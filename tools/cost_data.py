"""Points of the page on cost: measured steps of the 8B shape, the roof of its kernels, and published speeds."""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from result_data import RESULTS
from scaling_tables import MODELS, Rates, attention_flops
from unspool.core.sizes import parse_size
from unspool.planning.step_time import Documents, documents, flops_per_token

MEASURED = Path(__file__).parents[1] / "benchmarks" / "results"
SHAPE = MODELS["8B"]
PEAK = 989e12  # dense bf16 of an H100 or H200, from the data sheet
# Documents of ProLong's short rows in benchmarks/cases.py: log-normal with this mean and σ = 1, so that their summed
# squares are e times their mean. They cost attention as documents of this length do.
SHORT = 600 * 2.718


@dataclass(frozen=True, kw_only=True)
class CostPoint:
    """A measured or computed speed at one length, on one GPU."""

    tokens: int
    tokens_per_second: float
    peak_gib: float | None = None

    @property
    def mfu(self) -> float:
        return mfu(self.tokens_per_second, documents([self.tokens]))

    @property
    def hours_per_billion(self) -> float:
        return 1e9 / self.tokens_per_second / 3600


def mfu(tokens_per_second: float, docs: Documents) -> float:
    return tokens_per_second * flops_per_token(SHAPE, docs) / PEAK


def roof(docs: Documents) -> float:
    """Tokens per second if only matrix products and attention took time, each at its measured rate."""
    rates = Rates()
    attention = attention_flops(SHAPE, 1) * docs.mean  # forward, per token
    products = 6 * SHAPE.matmul_params / rates.matmul
    return 1 / (products + attention / rates.attention_forward + 2.5 * attention / rates.attention_backward)


def read(name: str) -> Any:
    path = MEASURED / name
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def ours() -> list[CostPoint]:
    """Measured steps of the 8B shape: whole rows, all layers. `unspool train` counts before its bare loop."""
    found = {}
    planned = read("plan.json")["cases"]["8b-8k"]["measured"]
    found[8192] = CostPoint(tokens=8192, tokens_per_second=8192 / planned["step_seconds"], peak_gib=planned["peak_gib"])
    found |= {point.tokens: point for point in _columns("product", "loop")}
    for run in read("long_stage.json")["runs"]:
        if run["layers"] == SHAPE.num_layers:
            found[run["length"]] = CostPoint(
                tokens=run["length"], tokens_per_second=run["tokens_per_second"], peak_gib=run["device_gib"]
            )
    return [found[tokens] for tokens in sorted(found)]


def peer() -> list[CostPoint]:
    return sorted(_columns("peer"), key=lambda point: point.tokens)


def _columns(*names: str) -> Iterator[CostPoint]:
    """Points of train.json: of each case of one row length, the first column that was measured."""
    for case, columns in read("train.json")["cases"].items():
        model, _, length = case.partition("-")
        found = next((columns[name] for name in names if "step_seconds" in columns.get(name, {})), None)
        if model == "8b" and length != "prolong" and found is not None:
            tokens = parse_size(length.rpartition("x")[2].upper())  # 8x8k: eight rows of 8K
            yield CostPoint(tokens=tokens, tokens_per_second=found["tokens_per_second"], peak_gib=found["memory_gib"])


@dataclass(frozen=True, kw_only=True)
class MixPoint:
    """Rows of 64K of which a share is one document, and the others hold short documents."""

    share: float
    ours: float
    peer: float | None
    docs: Documents


def mixes() -> list[MixPoint]:
    """Shares 0, that of ProLong's mix, and 1, from the steps of one run."""
    cases = read("train.json")["cases"]
    found, tokens = cases["8b-prolong"]["product"], 65536
    peer_rate = cases["8b-64k"]["peer"]["tokens_per_second"]
    seconds = {
        kind: [one for own, one in zip(found["kinds"], found["step_seconds"], strict=True) if own == kind]
        for kind in ("short", "whole")
    }
    rates = {kind: tokens * len(some) / sum(some) for kind, some in seconds.items()}
    by_share = {0.0: rates["short"], 5 / 8: found["tokens_per_second"], 1.0: rates["whole"]}
    return [
        MixPoint(
            share=share,
            ours=rate,
            peer=peer_rate,
            docs=Documents(tokens=1, squares=share * tokens + (1 - share) * SHORT),
        )
        for share, rate in by_share.items()
    ]


@dataclass(frozen=True, kw_only=True)
class Published:
    system: str
    gpus: str
    point: CostPoint


def published() -> list[Published]:
    with (RESULTS / "data" / "published-speed.csv").open(encoding="utf-8", newline="") as file:
        return [
            Published(
                system=row["system"],
                gpus=row["gpus"],
                point=CostPoint(tokens=int(row["tokens"]), tokens_per_second=float(row["tokens_per_second"])),
            )
            for row in csv.DictReader(file)
        ]
