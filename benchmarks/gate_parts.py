"""The parts of the GPU gate (gate.py). Training goes through `unspool train`, export through `unspool export`, RULER
through `unspool eval`; a part raises FailedError or returns what it measured.
"""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from cases import CASES, NEVER, Case, write_model_files, write_recipe

ROOT = Path(__file__).resolve().parents[1]
UNSPOOL = [sys.executable, "-m", "unspool.cli.main"]
LAYERS = 8  # of the 8B shape
STEPS = 3
# Cases that run to the end of their stage, with checkpoint and export. The others are stopped after a step.
WHOLE_STAGES = ("135m-32k", "8b-64k")
RESUME_STEPS, STOP_AFTER = 8, 2
# Difference of weights between a resumed and an uninterrupted run, as a share of what training changed. A GPU does not
# add in the same order twice: 0.012 on an H200. Without the optimizer state the share was 0.38 (tiny shapes, CPU).
RESUME_TOLERANCE = 0.1
FP8_STEPS = 6
# Difference of a step's loss in FP8 and in bf16. The losses fall from 10.8; a wrong gradient is off by more.
FP8_TOLERANCE = 0.1
LOGIT_TOLERANCE = 0.25  # bf16 logits of standard deviation 1
TEST_WORKERS = 10
VERIFIED_MODELS = ("llama",)  # the tests verify all
VERIFIED_CHECKS: tuple[str, ...] = ()  # all of them


class FailedError(Exception):
    """Raised by a part that did not pass; the text says why."""


class Gate:
    """Settings that the parts share: the work folder, and whether to use shapes for a CPU."""

    def __init__(self, work: Path, *, small: bool) -> None:
        self.work, self.small = work, small
        self.device = "cpu" if small else "cuda"

    def case(self, name: str, **changes: Any) -> Case:
        """The headline case `name`; the 8B shape has fewer layers."""
        case = replace(CASES[name], **changes)
        if case.shape["hidden_size"] == 4096:
            case = case.with_layers(LAYERS)
        return case.as_small() if self.small else case

    def model(self, name: str) -> Path:
        """The folder of a case's model, such as `8b`."""
        return self.work / name.partition("-")[0]

    def write_recipe(self, case: Case, name: str, *, model: str, steps: int, **settings: Any) -> Path:
        settings = {"checkpoint_every": NEVER} | settings  # but for the last step's
        return write_recipe(case, self.work / "runs", name, model=self.model(model), steps=steps, **settings)

    def stage(self, name: str) -> Path:
        return self.work / "runs" / name / "stages" / "stage"


def unspool(*arguments: str | Path, codes: tuple[int, ...] = (0,)) -> str:
    """Run a command of the product and return its standard output; its exit code must be one of `codes`."""
    done = subprocess.run([*UNSPOOL, *map(str, arguments)], capture_output=True, text=True, check=False)
    sys.stderr.write(done.stderr)
    if done.returncode not in codes:
        raise FailedError(_ended(arguments[0], done.returncode, done.stderr))
    return done.stdout


class Started:
    """Start `unspool train` as a child process."""

    def __init__(self, recipe: Path, stage: Path) -> None:
        self._log = recipe.with_suffix(".log")
        self._work = stage.with_name(f"{stage.name}.work")
        with self._log.open("w") as log:
            self._process = subprocess.Popen([*UNSPOOL, "train", str(recipe)], stdout=log, stderr=log)

    def wait(self, *, code: int = 0) -> None:
        self._process.wait()
        text = self._log.read_text()
        sys.stderr.write(text)
        if self._process.returncode != code:
            raise FailedError(_ended("train", self._process.returncode, text))

    def stop_after(self, steps: int, how: signal.Signals, *, code: int) -> list[dict[str, Any]]:
        """Send a signal once the metrics hold this many steps; return the metrics."""
        while self._process.poll() is None and len(read_metrics(self._work)) < steps:
            time.sleep(0.01)
        if self._process.poll() is None:
            self._process.send_signal(how)
        self.wait(code=code)
        return read_metrics(self._work)


def _ended(command: str | Path, code: int, log: str) -> str:
    """Describe the end of a command: exit code and last line of its error output."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return f"`unspool {command}` ended with code {code}: {lines[-1] if lines else 'no error output'}"


def read_metrics(stage: Path) -> list[dict[str, Any]]:
    path = stage / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


# Parts


def make_model(gate: Gate, name: str) -> dict[str, Any]:
    """Write the model that a case starts from, with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    case, folder = gate.case(name), gate.model(name)
    write_model_files(case, folder, context=case.length // 4)
    torch.manual_seed(0)
    with torch.device(gate.device):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return {}


def run_tests(gate: Gate) -> dict[str, Any]:
    """Run the tests marked `gpu`."""
    import importlib.util
    import xml.etree.ElementTree as ElementTree

    report = gate.work / "junit.xml"
    parallel = ["-n", str(TEST_WORKERS), "--dist", "worksteal"]
    workers = parallel if importlib.util.find_spec("xdist") else []
    files = sorted(str(path) for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text())
    short = ["-v", "--tb=short", "--show-capture=no"]  # the gate prints the last lines
    command = [sys.executable, "-m", "pytest", "-m", "gpu", *short, "-p", "no:cacheprovider", f"--junitxml={report}"]
    with subprocess.Popen([*command, *workers, *files], cwd=ROOT, stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout is not None
        for line in tests.stdout:  # at once, so that a gate that is stopped has printed what failed
            if "::" not in line or "FAILED" in line or "ERROR" in line:
                sys.stderr.write(line)
    code = tests.returncode
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    counts = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
    if code or (counts["tests"] == counts["skipped"] and not gate.small):
        raise FailedError(f"pytest ended with code {code}: {counts}")
    return counts


def run_verify(gate: Gate) -> dict[str, Any]:
    """Run every check of `unspool verify`."""
    models = [f"--model={name}" for name in VERIFIED_MODELS]
    few = [f"--only={name}" for name in VERIFIED_CHECKS or (("packing", "export") if gate.small else ())]
    options = ["--device", gate.device, "--kills", "1", "--json", *models, *few]
    found = json.loads(unspool("verify", *options, codes=(0, 1)))  # 1: a check failed
    bad = dict.fromkeys(f"{one['check']} on {one['model']}" for one in found if one["status"] == "failed")
    promises = {one["promise"] for one in found if one["status"] == "passed"}
    if bad or (promises != {1, 2, 3, 4, 5, 6} and not gate.small):
        raise FailedError(f"failed: {', '.join(bad) or 'nothing'}; checks that passed: {sorted(promises)}")
    return {"checks": len(found)}


def run_case(gate: Gate, name: str) -> dict[str, Any]:
    """Train three steps of a headline case."""
    case, stage = gate.case(name), gate.stage(name)
    ends = name in WHOLE_STAGES
    recipe = gate.write_recipe(case, name, model=name, steps=STEPS if ends else 8 * STEPS)
    if ends:
        unspool("train", recipe)
        steps = read_metrics(stage)
    else:
        steps = Started(recipe, stage).stop_after(STEPS, signal.SIGKILL, code=-signal.SIGKILL)
    losses = [step["loss"] for step in steps]
    expected = math.log(case.shape["vocab_size"])
    # With random weights the first loss is that of a uniform guess; then it must fall.
    if len(losses) < STEPS or abs(losses[0] - expected) > 1.5 or not losses[-1] < losses[0]:
        raise FailedError(
            f"losses {losses} over {STEPS} steps; the first should be near {expected:.2f}, the last lower"
        )
    measured = {"loss": losses, "first_step_seconds": steps[0]["seconds"]}
    if not gate.small:
        measured |= {
            "tokens_per_second": max(step["tokens_per_second"] for step in steps[1:]),
            "peak_gib": max(step["memory_gib"] for step in steps),
        }
    if name not in NEEDS.values():
        shutil.rmtree(gate.work / "runs" / name)  # gigabytes, possibly on a RAM disk
    return measured


def run_resume(gate: Gate) -> dict[str, Any]:
    """Stop a stage by SIGTERM, resume it from its checkpoint, and compare its weights with an uninterrupted stage's."""
    from safetensors.torch import load_file

    case = gate.case("135m-32k", length=4 << 10)
    # A constant learning rate, so that steps after the resume weigh as much as steps before it.
    settings = {"model": "135m", "steps": RESUME_STEPS, "compile": False, "warmup_ratio": 0, "min_lr_ratio": 1}
    whole, cut = (gate.write_recipe(case, name, **settings) for name in ("whole-run", "resumed"))
    uninterrupted = Started(whole, gate.stage("whole-run"))
    stopped = Started(cut, gate.stage("resumed"))
    steps = stopped.stop_after(STOP_AFTER, signal.SIGTERM, code=128 + signal.SIGTERM)
    unspool("train", cut)
    uninterrupted.wait()
    start, right, resumed = (
        load_file(folder / "model.safetensors")
        for folder in (gate.model("135m"), gate.stage("whole-run") / "model", gate.stage("resumed") / "model")
    )
    names = [name for name in right if name in start]
    changed = sum(float((right[name].float() - start[name].float()).norm() ** 2) for name in names)
    apart = sum(float((right[name].float() - resumed[name].float()).norm() ** 2) for name in names)
    share = math.sqrt(apart / changed)
    if not share < RESUME_TOLERANCE:
        raise FailedError(f"weights after a resume are off by {share:.3f} of what training changed")
    return {"stopped_after_step": len(steps), "difference": share}


def run_fp8(gate: Gate) -> dict[str, Any]:
    """Train in FP8, with recomputed layers of which some keep their products, and compare the losses with bf16."""
    case = gate.case("135m-32k", length=4 << 10)
    kept = {"activation_checkpointing": "keep-attention", "keep_products": 2}
    settings = {"model": "135m", "steps": FP8_STEPS, "compile": False, "warmup_ratio": 0, **kept}
    recipes = {name: gate.write_recipe(case, name, precision=name, **settings) for name in ("bf16", "fp8")}
    os.environ["UNSPOOL_EXPERIMENTAL"] = "fp8"
    started = [Started(recipe, gate.stage(name)) for name, recipe in recipes.items()]
    for one in started:
        one.wait()
    losses = {name: [step["loss"] for step in read_metrics(gate.stage(name))] for name in recipes}
    apart = [abs(one - other) for one, other in zip(*losses.values(), strict=True)]
    finite = all(map(math.isfinite, losses["fp8"])) and len(apart) == FP8_STEPS
    if not finite or losses["bf16"] == losses["fp8"] or max(apart) > FP8_TOLERANCE:
        raise FailedError(f"losses {losses} differ by up to {max(apart):.3f}; the limit is {FP8_TOLERANCE}, and not 0")
    return {"losses": losses, "largest_difference": max(apart)}


def run_export(gate: Gate) -> dict[str, Any]:
    """Export the 135M model; `unspool export` compares its logits in plain transformers."""
    found = json.loads(
        unspool("export", gate.work / "runs" / "135m-32k", gate.work / "exported", "--json", "--device", gate.device)
    )
    return {"logits": found.get("checks") or found.get("compared") or found}


def run_generation(gate: Gate) -> dict[str, Any]:
    """Generate after 32K tokens; every token must have plain transformers' best logit, up to rounding."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    from unspool.models.generation.greedy import answer
    from unspool.models.load import load_model

    folder, device = gate.work / "exported", torch.device(gate.device)
    dtype = torch.float32 if gate.small else torch.bfloat16
    ids = np.random.default_rng(0).integers(10, 1000, size=gate.case("135m-32k").length - 16)
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
    "model-135m": partial(make_model, name="135m-32k"),
    "model-8b": partial(make_model, name="8b-64k"),
    "135m-32k": partial(run_case, name="135m-32k"),
    "tests": run_tests,
    "verify": run_verify,
    "resume": run_resume,
    "fp8": run_fp8,
    "export": run_export,
    "generation": run_generation,
    "ruler": run_ruler,
    "8b-64k": partial(run_case, name="8b-64k"),
    "8b-prolong": partial(run_case, name="8b-prolong"),
    "8b-128k": partial(run_case, name="8b-128k"),
}
# Measured parts run alone.
ALONE = ("135m-32k", "8b-64k", "8b-prolong", "8b-128k")
NEEDS = {
    "135m-32k": "model-135m",
    "resume": "model-135m",
    "fp8": "model-135m",
    "export": "135m-32k",
    "generation": "export",
    "ruler": "export",
    "8b-64k": "model-8b",
    "8b-prolong": "model-8b",
    "8b-128k": "model-8b",
}


def run_part(gate: Gate, name: str) -> None:
    """Run a part in this process and print its result as the last line of standard output."""
    try:
        print(json.dumps({"passed": True, **PARTS[name](gate)}))
    except FailedError as reason:
        print(json.dumps({"passed": False, "reason": str(reason)}))
