"""Measure loss by position of a model unchanged and with each RoPE method, without training.

    python tools/training_free.py MODEL OUT_DIR BOOKS.jsonl.zst … [--context 32K] [--windows 16]

Writes a table, a picture and numbers. MODEL is a folder, a Hub id or a GGUF file. Books shorter than the context are
skipped; each other book gives one window from its middle. LongRoPE is excluded, because its factors come from a search
for one model. `python tools/training_free.py --draw OUT_DIR` rewrites table and picture from the numbers.
"""

import argparse
import json
import math
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from markupsafe import Markup
from pydantic import TypeAdapter

from unspool.core.charts import MODEL_STYLES, Frame, Point, Series, line_chart, swatch
from unspool.core.sizes import format_size, parse_size
from unspool.core.stats import t_quantile
from unspool.data.sources.base import read_strictly
from unspool.data.sources.jsonl import JsonlSource
from unspool.evals.backends.transformers import window_losses
from unspool.evals.prompts import encode, opening_ids
from unspool.models.load import load_model
from unspool.models.rotary import apply_rope
from unspool.models.tokenizer import load_tokenizer
from unspool.rope.methods import AnyRopeMethod

METHODS: list[dict[str, Any]] = [
    {"method": "unchanged"},
    {"method": "abf", "base": 1.6e6},
    {"method": "ntk"},
    {"method": "pi"},
    {"method": "dynamic"},
    {"method": "ntk-by-parts"},
    {"method": "yarn"},
    {"method": "llama3"},
    {"method": "harpe", "bases": "uniform", "low": 2e5, "high": 3e6},
]
FIRST = 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draw", type=Path, metavar="OUT_DIR", help="draw table and picture from existing numbers")
    parser.add_argument("model", nargs="?")
    parser.add_argument("out_dir", nargs="?", type=Path)
    parser.add_argument("books", nargs="*", type=Path)
    parser.add_argument("--context", type=parse_size, default=32 << 10)
    parser.add_argument("--windows", type=int, default=16)
    args = parser.parse_args()
    if args.draw:
        show(args.draw)
        return
    if not args.books:
        parser.error("MODEL, OUT_DIR and BOOKS are needed")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    windows = middle_windows(args.books, load_tokenizer(args.model), args.context, args.windows)
    results = []
    for method in METHODS:
        model = load_model(args.model, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
        # `unchanged` gets no context length, because it changes nothing.
        if method["method"] != "unchanged":
            apply_rope(model.eval(), TypeAdapter(AnyRopeMethod).validate_python(method), args.context)
        losses = np.stack([window_losses(model, window) for window in windows])
        results.append({"position": method, "buckets": buckets(losses, args.context)})
        print(table([results[-1]]).splitlines()[-1], flush=True)
    args.out_dir.mkdir(parents=True, exist_ok=True)
    content = {"context": args.context, "windows": len(windows), "results": results}
    (args.out_dir / "training-free.json").write_text(json.dumps(content, indent=1) + "\n")
    show(args.out_dir)


def show(out_dir: Path) -> None:
    content = json.loads((out_dir / "training-free.json").read_text())
    (out_dir / "training-free.md").write_text(table(content["results"]) + "\n")
    (out_dir / "training-free.html").write_text(page(content["results"]))


def middle_windows(paths: list[Path], tokenizer: Any, context: int, count: int) -> list[np.ndarray]:
    opening = opening_ids(tokenizer)
    found = []
    for path in paths:
        for document in read_strictly(JsonlSource(kind="jsonl", path=str(path)), [path]):
            # More tokens than needed, at about four characters each.
            start = len(document.text) // 4
            ids = encode(tokenizer, document.text[start : start + 8 * context])
            if len(ids) >= context:
                found.append(np.concatenate([opening, ids[: context - len(opening)]]))
            if len(found) == count:
                return found
    raise SystemExit(f"only {len(found)} books have {context} tokens after their first quarter; give more of them.")


def buckets(losses: np.ndarray, context: int) -> list[dict[str, Any]]:
    """Return means over windows of the mean loss at positions [0, 2K), [2K, 4K), [4K, 8K), …, with 95% intervals."""
    edges = [0, *(FIRST << step for step in range(int(math.log2(context // FIRST)) + 1))]
    out = []
    for start, stop in pairwise(edges):
        means = losses[:, start:stop].mean(axis=1)
        half = t_quantile(len(means) - 1) * float(means.std(ddof=1)) / math.sqrt(len(means))
        out.append({"from": start, "to": stop, "value": float(means.mean()), "half": half, "n": len(means)})
    return out


def table(results: list[dict[str, Any]]) -> str:
    spans = [f"{format_size(b['from']) if b['from'] else 0}–{format_size(b['to'])}" for b in results[0]["buckets"]]
    lines = ["| method | " + " | ".join(spans) + " |", "| --- |" + " --- |" * len(spans)]
    for result in results:
        settings = ", ".join(
            f"{key} {value:g}" for key, value in result["position"].items() if isinstance(value, float)
        )
        name = f"`{result['position']['method']}`" + (f" ({settings})" if settings else "")
        cells = (f"{b['value']:.2f} ±{b['half']:.2f} ({math.exp(b['value']):.0f})" for b in result["buckets"])
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def page(results: list[dict[str, Any]]) -> str:
    """Draw two charts in the report's colors, because an outlier would flatten the other lines in one."""
    last = sorted(result["buckets"][-1]["value"] for result in results)
    middle = last[len(last) // 2]
    apart = [one for one in results if max(b["value"] for b in one["buckets"]) > middle + 0.5]
    near = [one for one in results if one not in apart]
    best = min(near, key=lambda one: one["buckets"][-1]["value"])
    css = (files("unspool") / "report" / "page.css").read_text()
    title = "Loss by position without training (nats per token, 95% intervals)"
    return Markup(
        "<!doctype html><meta charset=utf-8><title>{title}</title><style>{css}</style>"
        "<main><h2>{title}</h2><div class=pair>{apart}{near}</div></main>"
    ).format(title=title, css=Markup(css), apart=figure([*apart, best]), near=figure(near))


def figure(results: list[dict[str, Any]]) -> Markup:
    series = [
        Series(
            label=result["position"]["method"],
            style=number % MODEL_STYLES,
            points=[
                Point(
                    x=math.sqrt(max(b["from"], b["to"] / 2) * b["to"]),
                    y=b["value"],
                    low=b["value"] - b["half"],
                    high=b["value"] + b["half"],
                )
                for b in result["buckets"]
            ],
        )
        for number, result in enumerate(results)
    ]
    frame = Frame(
        label="Loss by position, one line per method; the table has the same numbers.",
        x_title="position in the text (tokens, log scale)",
        x_ticks=[(float(b["to"]), format_size(b["to"])) for b in results[0]["buckets"]],
        show_y=lambda value: f"{value:g}",
        log_x=True,
    )
    legend = Markup("").join(Markup("<li>{}{}</li>").format(swatch(one.style), one.label) for one in series)
    return Markup("<figure><ul class=legend>{}</ul>{}</figure>").format(legend, line_chart(series, frame))


if __name__ == "__main__":
    main()
