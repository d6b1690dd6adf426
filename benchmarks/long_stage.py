"""One optimizer step on one very long row through `unspool train`: speed, and memory of device and host.

    python benchmarks/long_stage.py [--length 512K] [--layers 4 12] [--seconds 550] [--folder DIR] [--save]

Llama-3-8B's shape with random weights and `--layers` layers: bf16 weights with 8-bit moments, two layers per
activation checkpoint, their inputs in host memory, norms and MLPs in tiles, two KV heads at a time. A row of the demo's
books is one document. Packing, loader, step, checkpoint and export are the product's. `unspool plan` prints the
expectation first. With several numbers of layers it prints time and memory per layer, and an estimate for 32.

Attention grows with the square of the length: expect 22 s per layer of 512K on an H200. The folder holds the model,
its checkpoint and its export, each about 4 GB for 8 layers; on a RAM disk they count as host memory. A run longer
than `--seconds` is stopped, and its progress is printed. `--small` is a tiny model with a sliding window on a CPU; it
reads 512K tokens in minutes.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unspool.core.host_memory import measure_host_memory
from unspool.core.process_environment import set_process_environment
from unspool.core.sizes import parse_size

RESULTS = Path(__file__).parent / "results" / "long_stage.json"
GIB = 1 << 30
WHOLE = 32  # layers
SHAPE = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
SMALL = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": 256,
}
STAGE = {
    "optimizer": {"weights": "bf16", "states": "8bit"},
    "activation_checkpointing": "full",
    "layers_per_checkpoint": 2,
    "offload": True,
    "mlp_tiles": "16K",
    "attention_heads_at_once": 2,
}
COLUMNS = ("step_seconds", "device_gib", "host_rss_gib", "host_taken_gib")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=parse_size, default=512 << 10, help="tokens of the row")
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 12], help="numbers of layers, one run each")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=550, help="for all runs together")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the stage, as JSON")
    parser.add_argument("--folder", type=Path, help="where models and runs are written; default: a temporary one")
    parser.add_argument("--small", action="store_true", help="a tiny model on a CPU, to test the script")
    parser.add_argument("--save", action="store_true", help=f"write results/{RESULTS.name}")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.make:
        make_model(args.make, args.layers[0], small=args.small)
        return
    set_process_environment()
    if not args.small:
        from gpu import require_gpu

        require_gpu()
    deadline = time.monotonic() + args.seconds
    with tempfile.TemporaryDirectory(prefix="long-stage-", dir=args.folder) as folder:
        results = [run(args, layers, Path(folder), deadline) for layers in args.layers]
    for line in scaling(results):
        print(line)
    if args.save:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps({"machine": machine(), "runs": results}, indent=1) + "\n")


def run(args: argparse.Namespace, layers: int, folder: Path, deadline: float) -> dict[str, Any]:
    """Write the model, train, and delete everything, because disks are small."""
    began = time.monotonic()
    model, out = folder / f"model-{layers}", folder / f"run-{layers}"
    making = [sys.executable, __file__, "--make", str(model), "--layers", str(layers), *["--small"] * args.small]
    subprocess.run(making, check=True)
    made = time.monotonic() - began
    recipe = write_recipe(args, model, out)
    planned = None if args.small else plan(recipe)
    print(f"{layers} layers: model written in {made:.0f} s; planned {planned}", flush=True)
    watched = train(recipe, deadline - time.monotonic())
    result = {"layers": layers, "length": args.length, "planned": planned} | watched.facts | read_metrics(out)
    print(f"{layers} layers: {describe(result)}", flush=True)
    for path in (model, out):
        shutil.rmtree(path, ignore_errors=True)
    return result


def make_model(folder: Path, layers: int, *, small: bool) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, MistralConfig

    import unspool

    tokenizer = AutoTokenizer.from_pretrained(Path(unspool.__file__).parent / "assets" / "tiny-base")
    own = {
        "num_hidden_layers": layers,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config = MistralConfig(**SMALL, **own) if small else LlamaConfig(**SHAPE, **own)
    torch.manual_seed(0)
    with torch.device("cpu" if small else "cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_recipe(args: argparse.Namespace, model: Path, out: Path) -> Path:
    own = {key: json.loads(value) for key, _, value in (text.partition("=") for text in args.set)}
    stage = {
        "name": "long",
        "context_length": args.length,
        "rope": {"method": "abf", "base": 1.28e8},
        "mix": {"books": 1},
        "tokens": args.steps * args.length,
        "batch_tokens": args.length,
        "lr": 1e-5,
        **STAGE,
    }
    path = out.with_suffix(".yaml")
    recipe = {
        "name": out.name,
        "model": str(model),
        "out": str(out),
        "device": "cpu" if args.small else "cuda",
        "sources": {"books": {"kind": "jsonl", "path": "asset:demo/train.jsonl.zst"}},
        "datasets": {"books": {"from": "books", "seq_len": args.length, "attention": "full"}},
        "stages": [stage | own],
    }
    path.write_text(json.dumps(recipe))
    return path


def plan(recipe: Path) -> dict[str, float] | None:
    memory = measure_host_memory()
    host = ["--host-mem", f"{memory.total / GIB:.1f}G"] if memory else []
    done = subprocess.run(unspool("plan", recipe, "--json", *host), capture_output=True, text=True, check=False)
    (stage,) = json.loads(done.stdout)["stages"]
    if stage["written"] is None:
        return None
    held = stage["written"]["memory"]
    return {
        "device_gib": round(held["device"] / GIB, 1),
        "host_gib": round(held["host"] / GIB, 1),
        "checkpoint_copy_gib": round(held["host_parts"]["copy"] / GIB, 1),
        "step_seconds": round(stage["written"]["seconds"]["step"], 1),
    }


def unspool(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "unspool.cli.main", *map(str, arguments)]


@dataclass
class Watched:
    """Peak memory of a running process: its own, and with its files on the machine and in the container."""

    before: int = 0
    facts: dict[str, Any] = field(default_factory=dict)

    def sample(self, pid: int) -> None:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        memory = measure_host_memory()
        self._peak("host_rss_gib", int(status.get("VmHWM", status.get("VmRSS", "0")).split()[0]) << 10)
        if memory is not None:
            self._peak("host_taken_gib", self.before - memory.available)
        for name in ("memory.peak", "memory/memory.max_usage_in_bytes"):
            path = Path("/sys/fs/cgroup") / name
            if path.is_file():
                self._peak("container_peak_gib", int(path.read_text()))

    def _peak(self, name: str, size: int) -> None:
        self.facts[name] = max(self.facts.get(name, 0.0), round(size / GIB, 2))


def train(recipe: Path, seconds: float) -> Watched:
    memory = measure_host_memory()
    watched = Watched(before=memory.available if memory else 0)
    began = time.monotonic()
    process = subprocess.Popen(unspool("train", recipe), start_new_session=True)
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.5):
            try:
                watched.sample(process.pid)
            except (OSError, ValueError):
                return

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        code: int | str = process.wait(timeout=max(1.0, seconds))
    except subprocess.TimeoutExpired:
        code = "out of time"
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    stop.set()
    thread.join()
    watched.facts |= {"outcome": "done" if code == 0 else code, "command_seconds": round(time.monotonic() - began, 1)}
    return watched


def read_metrics(out: Path) -> dict[str, Any]:
    """Read the results of a stage that finished, or was stopped after its first steps."""
    for folder in (out / "stages" / "long", out / "stages" / "long.work"):
        path = folder / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
        if lines:
            last = lines[-1]
            return {
                "steps": len(lines),
                "step_seconds": last["seconds"],
                "tokens_per_second": last["tokens_per_second"],
                "loss": last["loss"],
                "device_gib": last["memory_gib"],
            }
    return {"steps": 0}


def describe(result: dict[str, Any]) -> str:
    words = [f"{result['outcome']} after {result['command_seconds']} s"]
    if result["steps"]:
        words.append(f"step {result['step_seconds']:.1f} s, {result['tokens_per_second']:,.0f} tokens/s")
        words.append(f"loss {result['loss']:.3f}, {result['device_gib']:.1f} GiB on the device")
    names = {"host_rss_gib": "resident", "host_taken_gib": "taken from the machine", "container_peak_gib": "container"}
    words += [f"host {names[key]} {result[key]:.1f} GiB" for key in names if key in result]
    return ", ".join(words)


def scaling(results: list[dict[str, Any]]) -> list[str]:
    """Cost per layer, from the smallest and the largest finished run, and an estimate for all layers."""
    done = sorted((one for one in results if one["steps"]), key=lambda one: one["layers"])
    if len(done) < 2:
        return []
    first, last = done[0], done[-1]
    apart = last["layers"] - first["layers"]
    lines = []
    for name in COLUMNS:
        each = (last.get(name, 0) - first.get(name, 0)) / apart
        whole = last.get(name, 0) + each * (WHOLE - last["layers"])
        lines.append(f"{name}: {each:.2f} per layer, {whole:.1f} for {WHOLE} layers")
        if name == "step_seconds":
            lines.append(f"tokens_per_second: {last['length'] / whole:,.0f} for {WHOLE} layers")
    return lines


def machine() -> dict[str, Any]:
    import torch

    memory = measure_host_memory()
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "host_gib": None if memory is None else round(memory.total / GIB, 1),
    }


if __name__ == "__main__":
    main()
