"""Compare the answers of servers with those of the same model in this process.

    python benchmarks/servers.py MODEL OUT --server NAME=URL=MODEL_NAME [--server …] [--lengths 1K] [--samples 2]

MODEL is the folder whose weights the servers run. OUT gets one JSONL file per server and endpoint, with the answers of
both sides, and `replies-*.jsonl`, so that an interrupted run repeats no question. Prints a line per suite and endpoint.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from unspool.core.sizes import parse_size
from unspool.evals.backends.base import Backend, BackendOptions, build_backend
from unspool.evals.backends.transformers import ModelBackend
from unspool.evals.config import eval_adapter
from unspool.evals.eval_plan import EvalPlan
from unspool.evals.run import as_local_prompt

SUITES: list[dict[str, Any]] = [
    {"suite": "niah", "samples": 4},
    {"suite": "key_value", "value": "words", "samples": 4},
    {"suite": "ruler", "tasks": ["niah_single_1", "vt"]},
    {"suite": "helmet", "tasks": ["json_kv", "trec_coarse"]},
]
ENDPOINTS = ("text", "chat")


class Remembered:
    """Answers of the local model by prompt; servers with equal templates share them."""

    def __init__(self, model: str, path: Path) -> None:
        self._backend = ModelBackend(model, device=torch.device("cpu"), dtype=torch.float32)
        self._path = path
        self._known: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}

    def answers(self, prompt: Any, server: Backend) -> list[str]:
        keys = [prompt.hash(question) for question in prompt.questions]
        if not set(keys) <= self._known.keys():
            found = self._backend.answers(as_local_prompt(prompt, server))
            self._known |= dict(zip(keys, found, strict=True))
            self._path.write_text(json.dumps(self._known))
        return [self._known[key] for key in keys]


def compare(name: str, server: Backend, local: Remembered, lengths: list[int], samples: int, out: Path) -> None:
    entries = [eval_adapter().validate_python({"samples": samples, **suite, "lengths": lengths}) for suite in SUITES]
    plan = EvalPlan(entries, server.tokenizer, seed=0, root=Path(), form=server.form)
    rows: dict[tuple[str, int], list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    with (out / f"{name}.jsonl").open("w") as file, server.keeping_replies(out / f"replies-{name}.jsonl"):
        for unit in plan.units:
            prompt = unit.planned.prepare(unit)
            theirs = unit.planned.samples(unit, prompt, server.answers(prompt))
            ours = unit.planned.samples(unit, prompt, local.answers(prompt, server))
            for one, other in zip(theirs, ours, strict=True):
                rows.setdefault((one["suite"], one["length"]), []).append((one, other))
                beside = {"local_output": other["output"], "local_score": other["score"]}
                file.write(json.dumps({**one, **beside}) + "\n")
                file.flush()
    for (suite, length), pairs in rows.items():
        scores = [sum(sample["score"] for sample in side) / len(side) for side in zip(*pairs, strict=True)]
        same = sum(one["output"] == other["output"] for one, other in pairs)
        differs = sum(one["score"] != other["score"] for one, other in pairs)
        shown = f"{scores[0]:.0%} | {scores[1]:.0%} | {same} of {len(pairs)} | {differs}"
        print(f"| {name} | {suite} | {length} | {shown} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--server", action="append", required=True, metavar="NAME=URL=MODEL_NAME")
    parser.add_argument("--endpoints", default=",".join(ENDPOINTS))
    parser.add_argument("--lengths", default="1K")
    parser.add_argument("--samples", type=int, default=2, help="per task of RULER and HELMET")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    local = Remembered(options.model, options.out / "local.json")
    lengths = [parse_size(length) for length in options.lengths.split(",")]
    print("| server | suite | length | score | local score | equal answers | other score |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for endpoint in options.endpoints.split(","):
        for given in options.server:
            name, url, model_name = given.split("=", 2)
            wanted = BackendOptions(
                kind="openai", model=options.model, url=url, model_name=model_name, endpoint=endpoint, requests=1
            )
            server = build_backend(wanted)
            server.connect()
            compare(f"{name}-{endpoint}", server, local, lengths, options.samples, options.out)


if __name__ == "__main__":
    main()
