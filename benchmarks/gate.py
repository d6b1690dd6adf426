"""The GPU gate: does everything that runs on a GPU still work? It needs one GPU and installs nothing.

    python benchmarks/gate.py --commit HASH    run all parts and write results/gate.json
    python benchmarks/gate.py --only verify    run some parts, write nothing
    python benchmarks/gate.py --check          say whether the code changed since the gate passed; needs no GPU

Each part is a process of its own, so that nothing one part has cached hides a fault from the next. Training goes
through `unspool train`, export through `unspool export`, RULER through `unspool eval`.
"""

import argparse
import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "gate.json"
# What runs on a GPU; the rest of the package is tested on CPUs.
GPU_SOURCES = ("rope", "models", "training", "verification", "evals/backends")
ALLOCATOR = "expandable_segments:True,pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
LARGE = {
    "optimizer": {"weights": "bf16", "states": "8bit"},
    "activation_checkpointing": "keep-attention",
    "compile": True,
    "offload": True,
}
STEPS = 3
# Name: model, context length, settings of the stage. The mixes are `benchmarks/train.py`'s, on the demo's books.
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "8b-64k": ("8b", 64, LARGE | {"keep_products": 8, "keep_on_host": 4, "mix": {"whole": 1}}),
    "8b-prolong": ("8b", 64, LARGE | {"keep_products": 8, "keep_on_host": 4, "mix": {"whole": 0.5, "short": 0.5}}),
    "8b-128k": ("8b", 128, LARGE | {"keep_products": 2, "keep_on_host": 1, "mix": {"whole": 1}}),
    "135m-32k": ("135m", 32, {"compile": True, "mix": {"whole": 1}, "lr": 1e-3}),
}
ROWS_PER_STEP = {"135m-32k": 4}
RESUME_STEPS, STOP_AFTER = 8, 2
# Weights after a resume, against those of an uninterrupted run, as a share of what training changed. A GPU does not
# add in the same order twice; without the optimizer's state the share was 0.38 (tiny shapes on a CPU).
RESUME_TOLERANCE = 0.1
LOGIT_TOLERANCE = 0.25  # bf16 logits of standard deviation 1


class FailedError(Exception):
    """A part did not pass; the text says why."""


class Gate:
    """What the parts share: a work folder, and whether shapes are small enough for a CPU."""

    def __init__(self, work: Path, *, small: bool) -> None:
        self.work, self.small = work, small
        self.unit = 8 if small else 1024  # tokens in a "K"
        self.device = "cpu" if small else "cuda"

    def shapes(self) -> dict[str, dict[str, Any]]:
        from train import LLAMA_8B, SMOLLM2_135M

        large, little = LLAMA_8B | {"num_hidden_layers": 8}, dict(SMOLLM2_135M)
        if self.small:
            cut = {"vocab_size": 4096, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
            large, little = large | cut, little | cut | {"num_attention_heads": 4, "num_key_value_heads": 2}
        return {"8b": large, "135m": little}

    def write_recipe(self, name: str, *, model: str, length: int, steps: int, batch_rows: int, **stage: Any) -> Path:
        """A recipe of one stage. JSON is YAML."""
        length *= self.unit
        if self.small:
            few = {key: min(stage[key], 2) for key in ("keep_products", "keep_on_host") if key in stage}
            stage |= few | {"compile": False, "lr": 1e-2}
        kinds = {"whole": {"attention": "full"}, "short": {}}
        tokens = batch_rows * length
        recipe = {
            "name": name,
            "model": str(self.work / model),
            "out": str(self.work / "runs" / name),
            "device": self.device,
            "sources": {"books": {"kind": "jsonl", "path": "asset:demo/train.jsonl.zst"}},
            "datasets": {kind: {"from": "books", "seq_len": length} | kinds[kind] for kind in stage["mix"]},
            "stages": [
                {
                    "name": "stage",
                    "context_length": length,
                    "rope": {"method": "abf", "base": 8e6},
                    "tokens": steps * tokens,
                    "batch_tokens": tokens,
                    "lr": 1e-4,
                    "checkpoint_every": 1000,
                    **stage,
                }
            ],
        }
        path = self.work / f"{name}.yaml"
        path.write_text(json.dumps(recipe))
        return path

    def stage(self, name: str) -> Path:
        return self.work / "runs" / name / "stages" / "stage"


def unspool(*arguments: str | Path) -> str:
    """Run a command of the product; its standard output."""
    done = subprocess.run(
        [sys.executable, "-m", "unspool.cli.main", *map(str, arguments)], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise FailedError(f"`unspool {arguments[0]}` ended with code {done.returncode}")
    return done.stdout


def read_metrics(stage: Path) -> list[dict[str, Any]]:
    path = stage / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


# Parts


def make_models(gate: Gate) -> dict[str, Any]:
    """Write the models that the other parts train: the 8B shape with 8 layers and the 135M shape, random weights."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    import unspool as package

    tokenizer = AutoTokenizer.from_pretrained(Path(package.__file__).parent / "assets" / "tiny-base")
    for name, shape in gate.shapes().items():
        torch.manual_seed(0)
        config = LlamaConfig(
            **shape,
            max_position_embeddings=8 * gate.unit,
            rope_parameters={"rope_type": "default", "rope_theta": 5e5},
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        with torch.device(gate.device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(gate.work / name)
        tokenizer.save_pretrained(gate.work / name)
    return {}


def run_tests(gate: Gate) -> dict[str, Any]:
    """Run the tests marked `gpu`."""
    import importlib.util
    import xml.etree.ElementTree as ElementTree

    report = gate.work / "junit.xml"
    workers = ["-n", "3", "--dist", "loadfile"] if importlib.util.find_spec("xdist") else []
    files = sorted(str(path) for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text())
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={report}"]
    code = subprocess.run([*command, *workers, *files], cwd=ROOT, stdout=sys.stderr, check=False).returncode
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    counts = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
    if code or (counts["tests"] == counts["skipped"] and not gate.small):
        raise FailedError(f"pytest ended with code {code}: {counts}")
    return counts


def run_verify(gate: Gate) -> dict[str, Any]:
    """Visit every promise of `unspool verify` on models of five kinds."""
    models = [f"--model={name}" for name in ("llama", "gemma2", "phi3", "llama+dynamic", "llama+harpe")]
    few = ["--only=packing", "--only=export"] if gate.small else []
    found = json.loads(unspool("verify", "--device", gate.device, "--kills", "1", "--json", *models, *few))
    bad = [f"{one['check']} on {one['model']}" for one in found if one["status"] == "failed"]
    promises = {one["promise"] for one in found if one["status"] == "passed"}
    if bad or (promises != {1, 2, 3, 4, 5} and not gate.small):
        raise FailedError(f"failed: {', '.join(bad) or 'nothing'}; promises that passed: {sorted(promises)}")
    return {"checks": len(found)}


def run_case(gate: Gate, name: str) -> dict[str, Any]:
    """Train three steps of a headline case."""
    model, length, settings = CASES[name]
    recipe = gate.write_recipe(
        name, model=model, length=length, steps=STEPS, batch_rows=ROWS_PER_STEP.get(name, 1), **settings
    )
    unspool("train", recipe)
    steps = read_metrics(gate.stage(name))
    losses = [step["loss"] for step in steps]
    expected = math.log(gate.shapes()[model]["vocab_size"])
    # Random weights know nothing: the first loss is that of a guess, and it falls.
    if len(losses) != STEPS or abs(losses[0] - expected) > 1.5 or not losses[-1] < losses[0]:
        raise FailedError(
            f"losses {losses} over {STEPS} steps; the first should be near {expected:.2f}, the last lower"
        )
    measured = {"loss": losses, "first_step_seconds": steps[0]["seconds"]}
    if not gate.small:
        measured |= {
            "tokens_per_second": max(step["tokens_per_second"] for step in steps[1:]),
            "peak_gib": max(step["memory_gib"] for step in steps),
        }
    if name != "135m-32k":
        shutil.rmtree(gate.work / "runs" / name)  # gigabytes, perhaps in memory
    return measured


def run_resume(gate: Gate) -> dict[str, Any]:
    """Stop a stage by SIGTERM, resume it from its checkpoint, and compare its weights with an uninterrupted stage's."""
    from safetensors.torch import load_file

    # A constant learning rate, so that what follows the resume weighs as much as what precedes it.
    settings = {"mix": {"whole": 1}, "lr": 1e-3, "warmup_ratio": 0, "min_lr_ratio": 1}
    settings |= {"model": "135m", "length": 4, "steps": RESUME_STEPS, "batch_rows": 4}
    unspool("train", gate.write_recipe("whole-run", **settings))
    recipe = gate.write_recipe("resumed", **settings)
    process = subprocess.Popen([sys.executable, "-m", "unspool.cli.main", "train", recipe], stdout=sys.stderr)
    work = gate.stage("resumed").with_name("stage.work")
    while process.poll() is None and len(read_metrics(work)) < STOP_AFTER:
        time.sleep(0.01)
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    if process.wait() != 128 + signal.SIGTERM:
        raise FailedError(f"`unspool train` ended with code {process.returncode} instead of 143 after SIGTERM")
    stopped_at = len(read_metrics(work))
    unspool("train", recipe)
    start, right, resumed = (
        load_file(folder / "model.safetensors")
        for folder in (gate.work / "135m", gate.stage("whole-run") / "model", gate.stage("resumed") / "model")
    )
    names = [name for name in right if name in start]
    changed = sum(float((right[name].float() - start[name].float()).norm() ** 2) for name in names)
    apart = sum(float((right[name].float() - resumed[name].float()).norm() ** 2) for name in names)
    share = math.sqrt(apart / changed)
    if not share < RESUME_TOLERANCE:
        raise FailedError(f"weights after a resume are off by {share:.3f} of what training changed")
    return {"stopped_after_step": stopped_at, "difference": share}


def run_export(gate: Gate) -> dict[str, Any]:
    """Export the 135M model; `unspool export` compares its logits in plain transformers."""
    found = json.loads(
        unspool("export", gate.work / "runs" / "135m-32k", gate.work / "exported", "--json", "--device", gate.device)
    )
    return {"logits": found.get("checks") or found.get("compared") or found}


def run_generation(gate: Gate) -> dict[str, Any]:
    """Generate after 32K tokens; every token must be plain transformers' best one, up to rounding."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    from unspool.models.generation.greedy import answer
    from unspool.models.load import load_model

    folder, device = gate.work / "exported", torch.device(gate.device)
    dtype = torch.float32 if gate.small else torch.bfloat16
    ids = np.random.default_rng(0).integers(10, 1000, size=32 * gate.unit - 16)
    began = time.perf_counter()
    model = load_model(str(folder), device=device, dtype=dtype)
    [tokens] = answer(model, ids[:-20], [ids[-20:]], max_new_tokens=16, stop_ids=())
    seconds = time.perf_counter() - began
    del model
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
    row = torch.tensor([[*ids.tolist(), *tokens]], device=device)
    with torch.inference_mode():
        logits = plain(row, logits_to_keep=len(tokens) + 1).logits[0, :-1].float()
    chosen = logits.gather(1, torch.tensor(tokens, device=device)[:, None])[:, 0]
    short = float((logits.max(1).values - chosen).max())
    if not short < LOGIT_TOLERANCE * float(logits.std()) or len(tokens) != 16:
        raise FailedError(f"{len(tokens)} tokens; one is {short:.3f} below plain transformers' best logit")
    return {"below_best_logit": short, "seconds": round(seconds, 1)}


def run_ruler(gate: Gate) -> dict[str, Any]:
    """Answer one batch of RULER prompts."""
    length = 512 if gate.small else 4096
    tasks = ["--suite", "ruler", "--tasks", "niah_single_1", "--lengths", str(length), "--samples", "8"]
    out = gate.work / "ruler"
    unspool("eval", gate.work / "exported", *tasks, "--device", gate.device, "--out", out, "--json")
    samples = (out / "samples.jsonl").read_text().splitlines()
    if len(samples) != 8:
        raise FailedError(f"{len(samples)} answers instead of 8")
    return {"answers": len(samples)}


PARTS: dict[str, Callable[[Gate], dict[str, Any]]] = {
    "tests": run_tests,
    "verify": run_verify,
    "models": make_models,
    "135m-32k": partial(run_case, name="135m-32k"),
    "resume": run_resume,
    "export": run_export,
    "generation": run_generation,
    "ruler": run_ruler,
    **{name: partial(run_case, name=name) for name in CASES if name != "135m-32k"},
}
NEEDS = {"generation": "export", "ruler": "export", "export": "135m-32k"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--commit", help="hash of the commit under test, written into gate.json")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="run these parts and those they need; write no file")
    parser.add_argument("--check", action="store_true", help="compare gate.json with the code, run nothing")
    parser.add_argument("--small", action="store_true", help="tiny shapes on the CPU, to try the gate itself")
    parser.add_argument("--work", type=Path, help="folder for models and runs; default: memory if there is enough")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.check:
        print(freshness())
        return
    if args.part:
        run_part(Gate(args.work, small=args.small), args.part)
        return
    if not args.small:
        from gpu import require_gpu

        require_gpu()
    sys.exit(run_all(args))


def run_part(gate: Gate, name: str) -> None:
    """In the part's own process: its result as the last line of standard output."""
    try:
        print(json.dumps({"passed": True, **PARTS[name](gate)}))
    except FailedError as reason:
        print(json.dumps({"passed": False, "reason": str(reason)}))


def run_all(args: argparse.Namespace) -> int:
    began = time.monotonic()
    wanted = with_needed(args.only) if args.only else list(PARTS)
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="gate-", dir=args.work or _roomy_folder()) as folder:
        for name in wanted:
            missing = next((need for need in needed(name) if not results[need]["passed"]), None)
            if missing:
                results[name] = {"passed": False, "reason": f"{missing} failed, which it needs", "seconds": 0.0}
            else:
                results[name] = _in_own_process(name, folder, small=args.small)
            print(describe(name, results[name]), flush=True)
            if not args.only and not args.small:  # after each part, so that a gate that is stopped leaves what it saw
                _write_result(args.commit, results, seconds=round(time.monotonic() - began, 1))
    passed = all(result["passed"] for result in results.values())
    print(f"gate {'passed' if passed else 'FAILED'} in {time.monotonic() - began:.0f} s")
    return 0 if passed else 1


def _write_result(commit: str | None, results: dict[str, dict[str, Any]], *, seconds: float) -> None:
    from gpu import machine

    passed = len(results) == len(PARTS) and all(result["passed"] for result in results.values())
    # The digest counts, not the commit: notes and pages may be committed later.
    facts = {"commit": commit, "sources": digest_sources(), "passed": passed, "seconds": seconds}
    not_run = [name for name in PARTS if name not in results]
    content = {**facts, "machine": machine(), "parts": results, "not_run": not_run}
    RESULT.write_text(json.dumps(content, indent=1) + "\n")


def needed(name: str) -> list[str]:
    """The parts whose files this part reads."""
    chain = []
    while name in NEEDS:
        name = NEEDS[name]
        chain.append(name)
    return chain + ([] if name in ("models", "verify", "tests") else ["models"])


def with_needed(names: list[str]) -> list[str]:
    chosen = set(names).union(*(needed(name) for name in names))
    return [name for name in PARTS if name in chosen]


def _in_own_process(name: str, work: str, *, small: bool) -> dict[str, Any]:
    began = time.monotonic()
    command = [sys.executable, __file__, "--part", name, "--work", work, *(["--small"] if small else [])]
    paths = [str(ROOT / "src"), str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTORCH_CUDA_ALLOC_CONF": ALLOCATOR}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    lines = done.stdout.splitlines()
    if done.returncode or not lines or not lines[-1].startswith("{"):
        result: dict[str, Any] = {"passed": False, "reason": f"its process ended with code {done.returncode}"}
    else:
        result = json.loads(lines[-1])
    return result | {"seconds": round(time.monotonic() - began, 1)}


def _roomy_folder() -> str | None:
    """Memory, if it has room for the largest part; its files are written and read at once."""
    shared = Path("/dev/shm")
    return str(shared) if shared.is_dir() and shutil.disk_usage(shared).free > 48 * 2**30 else None


def describe(name: str, result: dict[str, Any]) -> str:
    shown = {
        "tokens_per_second": "{:,.0f} tokens/s",
        "peak_gib": "{:.1f} GiB",
        "first_step_seconds": "first step {:.0f} s",
        "difference": "difference {:.1e}",
        "below_best_logit": "{:.3f} below the best logit",
        "tests": "{} tests",
        "failures": "{} failed",
        "skipped": "{} skipped",
        "checks": "{} checks",
        "answers": "{} answers",
        "reason": "{}",
    }
    facts = [text.format(result[key]) for key, text in shown.items() if key in result]
    return f"{'passed' if result['passed'] else 'FAILED'}  {name:<11} {result['seconds']:5.0f} s  {', '.join(facts)}"


# Whether the gate is older than the code


def digest_sources(root: Path = ROOT) -> str:
    """One digest over the source files that run on a GPU."""
    found = hashlib.sha256()
    base = root / "src" / "unspool"
    for path in sorted(path for folder in GPU_SOURCES for path in (base / folder).rglob("*.py")):
        found.update(f"{path.relative_to(base).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()


def freshness(root: Path = ROOT) -> str:
    """One line: whether the gate has passed on the code as it is."""
    path = root / RESULT.relative_to(ROOT)
    run = "run `make gpu` on a machine with a GPU"
    if not path.is_file():
        return f"GPU gate: never run on this tree; {run}."
    found = json.loads(path.read_text())
    seen = f"commit {(found.get('commit') or 'unknown')[:12]}"
    if found["sources"] != digest_sources(root):
        return f"GPU gate: WARNING: files that run on a GPU changed since it ran ({seen}); {run}."
    if not found["passed"]:
        return f"GPU gate: WARNING: it failed or did not end on this code ({seen}); see {RESULT.relative_to(ROOT)}."
    return f"GPU gate: passed on this code ({seen})."


if __name__ == "__main__":
    main()
