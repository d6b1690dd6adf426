"""A run folder as a real one looks: base, abf and utk, scored at four lengths and five depths."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

from unspool.core.artifacts import publish
from unspool.core.rng import rng_for

LENGTHS = (256, 512, 1024, 2048)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
BUCKETS = ((0, 64), (64, 128), (128, 256), (256, 512), (512, 1024), (1024, 2048))
MODELS = ("base", "abf", "utk")
PER_DEPTH = 8
NUM_STEPS = 60
STEP_TOKENS = 16384
SCRIPT = "<script>document.title='x'</script>"

LOSSES = {
    "base": (4.02, 3.74, 3.61, 4.81, 5.72, 6.21),
    "abf": (4.01, 3.73, 3.60, 3.66, 3.74, 3.81),
    "utk": (4.03, 3.75, 3.62, 3.67, 3.72, 3.78),
}
# Share of needles found, by length; the base model knows nothing beyond its context.
RECALLS = {"base": (0.95, 0.08, 0.0, 0.0), "abf": (0.95, 0.92, 0.88, 0.8), "utk": (0.96, 0.95, 0.93, 0.92)}

CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 200000.0},
}
BAD_RECORD = {"file": "books.jsonl", "record": "line 7", "reason": "not JSON", "detail": "Expecting value: '<b>'"}

RECIPE = """\
name: tiny
seed: 0
model: asset:tiny-base
out: runs/tiny
engine: {kind: local, workers: 2}
sources:
  books: {kind: jsonl, path: "asset:books.jsonl.zst", text: text}   # <b>escaped</b> & shown as it is
  recall: {kind: recall, tokens: 512K, length: [256, 2K], prose: "asset:books.jsonl.zst"}
datasets:
  books-2k: {from: books, seq_len: 2K, packing: single_doc}
  books-utk: {from: books, seq_len: 2K, packing: single_doc, utk: {min_split: 128}}
  short: {from: {books: 0.5, recall: 0.5}, seq_len: 2K, packing: concat}
stages:
  - {name: abf, init: base, context_length: 2K, rope: {method: abf, base: 2e5}, mix: {books-2k: 0.6, short: 0.4},
     tokens: 960K, batch_tokens: 16K, lr: 4e-4}
  - {name: utk, init: base, context_length: 2K, rope: {method: abf, base: 2e5}, mix: {books-utk: 0.6, short: 0.4},
     tokens: 960K, batch_tokens: 16K, lr: 4e-4}
evals:
  - {suite: niah, lengths: [256, 512, 1K, 2K], samples: 40, depths: 5}
  - {suite: key_value, lengths: [256, 512, 1K, 2K], samples: 40}
  - {suite: perplexity, length: 2K, samples: 8}
"""


def write_fake_run(run_dir: Path) -> Path:
    """Write everything `unspool run` would leave behind, except the models."""
    run_dir.mkdir(parents=True)
    (run_dir / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    write_facts(run_dir)
    _write_data(run_dir)
    for name in ("abf", "utk"):
        write_stage(run_dir, name)
    for name in MODELS:
        write_scores(run_dir, name, *fake_scores(name))
    return run_dir


def write_facts(run_dir: Path) -> None:
    parts = ("corpus", "datasets", "stages/abf", "stages/utk", "scores/base", "scores/abf", "scores/utk")
    facts = {
        "original_context": 256,
        "base_model": "asset:tiny-base",
        "versions": {"unspool": "0.1.0", "torch": "2.13.0", "transformers": "5.22.0", "python": "3.11.9"},
        "seconds": dict(zip(parts, (1.2, 3.4, 70.1, 71.8, 9.3, 9.6, 9.5), strict=True)),
    }
    (run_dir / "run.json").write_text(json.dumps(facts))


def _write_data(run_dir: Path) -> None:
    corpora = {"books": (212, 1_403_221), "recall": (430, 524_310)}
    for name, (documents, tokens) in corpora.items():
        with publish(run_dir / "corpus" / name, kind="corpus", inputs={"files": "a" * 64}, settings={}) as draft:
            (draft.folder / "docs-00000.arrow").write_bytes(name.encode() * 1000)
            draft.counts |= {"documents": documents, "tokens": tokens, "characters": 4 * tokens, "files": 1}
            draft.counts |= {"records": documents + 3, "quarantined": {"not JSON": 2}, "filtered": {"empty": 1}}
            lengths = {"at_least": [1024, 2048], "documents": [documents - 12, 12], "tokens": [tokens - 40000, 40000]}
            draft.counts |= {"left_out": {}, "lengths": lengths}
            (draft.folder / "quarantine.jsonl").write_text(json.dumps(BAD_RECORD) + "\n")
    for name, rows in {"books-2k": 480, "books-utk": 480, "short": 320}.items():
        with publish(run_dir / "datasets" / name, kind="dataset", inputs={"corpus": "b" * 64}, settings={}) as draft:
            (draft.folder / "rows-00000.arrow").write_bytes(name.encode() * 2000)
            counts = {"rows": rows, "tokens": rows * 2048, "documents": 3 * rows, "tokens_in": rows * 2048 + 1231}
            draft.counts |= {**counts, "tokens_added": 0, "dropped": {"short": 31, "tail": 1200}}


def write_stage(run_dir: Path, name: str) -> None:
    with publish(run_dir / "stages" / name, kind="stage", inputs={"model": "c" * 64}, settings={}) as draft:
        write_ledger(draft.folder / "ledger.jsonl", name)
        (draft.folder / "model").mkdir()
        (draft.folder / "model" / "config.json").write_text(json.dumps(CONFIG))
        lines = "".join(json.dumps(step) + "\n" for step in fake_steps(name))
        (draft.folder / "metrics.jsonl").write_text(lines)
        draft.counts |= {"steps": NUM_STEPS, "tokens": NUM_STEPS * STEP_TOKENS}


def write_ledger(path: Path, name: str) -> None:
    """Three rows of five from the long set: 60%, as the recipe asks."""
    long_rows = "books-utk" if name == "utk" else "books-2k"
    lines = [{"step": step, "rows": {long_rows: [0, 1, 2], "short": [0, 1]}} for step in range(1, NUM_STEPS + 1)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def fake_steps(name: str) -> list[dict[str, Any]]:
    rng = rng_for(0, "steps", name)
    steps = []
    for step in range(1, NUM_STEPS + 1):
        done = step / NUM_STEPS
        loss = 3.72 + 1.6 * math.exp(-7 * done) + 0.05 * rng.standard_normal() + (0.06 if name == "utk" else 0)
        lr = 4e-4 * min(1.0, step / 6) * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))
        long_rows = "books-utk" if name == "utk" else "books-2k"
        steps.append(
            {
                "step": step,
                "tokens": step * STEP_TOKENS,
                "loss": loss,
                "lr": lr,
                "grad_norm": 0.9,
                "seconds": 1.15,
                "tokens_per_second": 14200.0 + 150 * rng.standard_normal(),
                "losses": {long_rows: loss + 0.2, "short": loss - 0.3},
            }
        )
    return steps


def validation_lines(*losses: float) -> str:
    """`validation.jsonl` of a stage whose documents end before position 128."""
    lines = []
    for number, loss in enumerate(losses):
        buckets = [
            {"from": 0, "to": 64, "value": loss + 1, "n": 63},
            {"from": 64, "to": 128, "value": loss - 1, "n": 10},
            {"from": 128, "to": 256, "value": None, "n": 0},
        ]
        line = {"step": 10 * number, "tokens": 10 * number * STEP_TOKENS, "loss": loss, "n": 73, "buckets": buckets}
        lines.append(json.dumps(line) + "\n")
    return "".join(lines)


def fake_scores(name: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(cells, samples) of one model; recall falls towards the middle of the text, as it does."""
    rng = rng_for(0, "scores", name)
    cells, samples = [], []
    for length, recall in zip(LENGTHS, RECALLS[name], strict=True):
        hits = {d: int(rng.binomial(PER_DEPTH, max(0.0, recall - 0.3 * d * (1 - d)))) for d in DEPTHS}
        for depth, found in hits.items():
            cells.append(recall_cell("niah", length, depth, found, PER_DEPTH))
            samples += [fake_sample("niah", length, depth, i, right=i < found) for i in range(PER_DEPTH)]
        cells.append(recall_cell("niah", length, None, sum(hits.values()), PER_DEPTH * len(DEPTHS)))
        found = int(rng.binomial(40, recall * 0.75))
        cells.append(recall_cell("key_value", length, None, found, 40))
        samples += [fake_sample("key_value", length, None, i, right=i < found) for i in range(40)]
    for (start, stop), loss in zip(BUCKETS, LOSSES[name], strict=True):
        half = 0.35 / math.sqrt(stop / 64)
        cell = {"suite": "perplexity", "metric": "loss", "length": 2048, "from": start, "to": stop}
        cells.append({**cell, "value": loss, "n": 8 * (stop - start), "low": loss - half, "high": loss + half})
    if name == "base":
        samples[-40]["output"] = SCRIPT
    # Questions stay first and last, where tests look for them.
    return cells, [*samples[:-40], *fake_windows(name), *samples[-40:]]


def fake_windows(name: str) -> list[dict[str, Any]]:
    """Windows differ among themselves far more than models do on one of them."""
    hard, own = rng_for(0, "windows").normal(0, 0.4, 8), rng_for(0, "windows", name).normal(0, 0.005, 8)
    samples = []
    for index, shift in enumerate(hard + own):
        found = zip(BUCKETS, LOSSES[name], strict=True)
        losses = [{"from": a, "to": b, "value": loss + shift, "n": b - a} for (a, b), loss in found]
        sample = {"suite": "perplexity", "length": 2048, "depth": None, "index": index, "hash": f"window {index}"}
        samples.append({**sample, "prompt_tokens": 2048, "score": losses[-1]["value"], "losses": losses})
    return samples


def recall_cell(suite: str, length: int, depth: float | None, found: int, n: int) -> dict[str, Any]:
    low, high = wilson(found, n)
    cell = {"suite": suite, "metric": "accuracy", "length": length, "depth": depth}
    return {**cell, "value": found / n if n else None, "n": n, "low": low, "high": high}


def wilson(found: int, n: int) -> tuple[float | None, float | None]:
    if n == 0:
        return None, None
    z, p = 1.96, found / n
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, middle - half), min(1.0, middle + half)


def fake_sample(suite: str, length: int, depth: float | None, index: int, *, right: bool) -> dict[str, Any]:
    value = ("river", "lantern", "4471903", "harbour", "ember", "orchard", "copper", "meadow")[index % 8]
    wrong = " the old man said , and the\nrain went on over the hills until the evening came"
    return {
        "suite": suite,
        "length": length,
        "depth": depth,
        "index": index,
        "hash": hashlib.sha256(f"{suite}{length}{depth}{index}".encode()).hexdigest(),
        "prompt_tokens": length - 17,
        "reference": value,
        "output": f" {value} ." if right else wrong,
        "score": float(right),
        "prompt": {"start": "Once upon a time", "end": f"The secret word of {index} is", "cut_tokens": length - 40},
    }


def write_scores(run_dir: Path, name: str, cells: list[dict[str, Any]], samples: list[dict[str, Any]]) -> None:
    with publish(run_dir / "scores" / name, kind="scores", inputs={"model": "d" * 64}, settings={}) as draft:
        (draft.folder / "summary.json").write_text(json.dumps({"model": name, "cells": cells}))
        (draft.folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
        draft.counts |= {"samples": len(samples)}
