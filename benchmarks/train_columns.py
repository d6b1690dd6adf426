"""The columns of train.py, each in its own process: the product, its bare loop (also in FP8), and the peer.

A column prints its measurements as a line of JSON after every step, so that a column stopped early still counts.
"""

import argparse
import json
import os
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cases import (
    CASES,
    LENGTHS,
    LLAMA_8B,
    PLANNED,
    Case,
    plan_steps,
    tokens_per_second,
    write_model_files,
    write_recipe,
)
from gpu import machine, require_gpu
from transformers import AutoModelForCausalLM, LlamaConfig

from unspool.core.artifacts import digest
from unspool.data.mixture import Mix
from unspool.data.packing.store import open_rows
from unspool.models.fp8.linear import use_fp8
from unspool.models.fuse import fuse_parts
from unspool.models.load import load_model
from unspool.models.memory.checkpointing import apply_memory
from unspool.models.rotary import apply_rope
from unspool.recipe import prepare
from unspool.recipe.load import load_recipe
from unspool.training import loop as product_loop
from unspool.training import stage as product_stage
from unspool.training.config import StageConfig
from unspool.training.loader import build_step, pinned, step_picks
from unspool.training.metrics.flops import FlopCount, count_flops, peak_flops
from unspool.training.optim.updater import build_updater
from unspool.training.step import train_step

STAGE_STEPS = 100  # more than are run: the stage is stopped before it saves and exports
STARTED = time.perf_counter()
KINDS = {
    "attention": ("sdpa", "flash", "fmha", "cudnn::fusion"),
    "matrix products": ("nvjet", "gemm", "cutlass", "cublas"),
    "copies": ("Memcpy", "Memset"),
}


class Report:
    """Seconds of the measured steps, by kind of row."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.samples: list[tuple[str, float]] = []
        where = machine() if torch.cuda.is_available() else {"gpu": None, "torch": torch.__version__}
        layers = case.shape["num_hidden_layers"]
        self.facts: dict[str, Any] = {"layers": layers, "settings": case.settings, "machine": where}

    def add(self, kind: str, seconds: float, **facts: Any) -> None:
        self.samples.append((kind, seconds))
        self.show(**facts)

    def show(self, **facts: Any) -> None:
        self.facts |= facts
        kinds, seconds = zip(*self.samples, strict=True)
        rate = {"tokens_per_second": round(tokens_per_second(self.case, self.samples), 1)}
        steps = {"step_seconds": [round(one, 4) for one in seconds], "kinds": kinds}
        print(json.dumps(rate | steps | self.facts), flush=True)


# The product


def write_case(case: Case, folder: Path) -> Path:
    """Write the recipe of a case, and a model whose weights are a sparse file."""
    write_model_files(case, folder / "model", context=case.length // 8)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(folder / "model"))
    header, size = {}, 0
    for name, tensor in model.named_parameters():  # count tied weights once
        begin, size = size, size + 2 * tensor.numel()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, size]}
    text = json.dumps(header).encode()
    with (folder / "model" / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size)
    return write_recipe(case, folder, "run", model=folder / "model", steps=STAGE_STEPS)


def draw_weights(device: str) -> None:
    """Initialize weights on the device from here on, so that reading and hashing 16 GB is not measured."""

    def draw(
        pretrained_model_name_or_path: str, *, dtype: torch.dtype, attn_implementation: str, **options: Any
    ) -> tuple[Any, dict[str, Any]]:
        config = LlamaConfig.from_pretrained(pretrained_model_name_or_path)
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attn_implementation)
        return model, {"missing_keys": [], "mismatched_keys": [], "unexpected_keys": []}

    AutoModelForCausalLM.from_pretrained = staticmethod(draw)
    assert hasattr(product_stage, "model_digest")
    product_stage.model_digest = digest


def product(case: Case, folder: Path, *, profile: bool) -> None:
    """Run `unspool train` and stop it after the last measured step."""
    from unspool.cli.main import main

    recipe = write_case(case, folder)
    shutil.rmtree(folder / "run" / "stages", ignore_errors=True)
    draw_weights(case.device)
    watched = Watched(case)
    work = folder / "run" / "stages" / "stage.work"
    threading.Thread(target=watch, args=(case, watched, work, profile), daemon=True).start()
    sys.argv = ["unspool", "train", str(recipe)]
    main()


class Watched:
    """Times at which the product's steps begin, and at which the device finishes them."""

    def __init__(self, case: Case) -> None:
        self.began: list[float] = []
        self._ends: list[Any] = []
        self._small = case.small
        for name in ("start_step", "train_step"):
            if hasattr(product_loop, name):
                setattr(product_loop, name, self._watched(getattr(product_loop, name)))

    def _watched(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **options: Any) -> Any:
            self.began.append(time.perf_counter())
            found = step(*args, **options)
            end = None if self._small else torch.cuda.Event()
            if end is not None:
                end.record()
            self._ends.append(end)
            return found

        return watched

    def wait(self, step: int) -> float:
        """End times of steps 1, 2, …"""
        while len(self._ends) < step or (self._ends[step - 1] is not None and not self._ends[step - 1].query()):
            time.sleep(0.001)
        return time.perf_counter()


def watch(case: Case, watched: Watched, work: Path, profile: bool) -> None:
    try:
        watch_steps(case, watched, work, profile=profile)
    except BaseException as error:
        print(f"cannot watch the stage: {error!r}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def watch_steps(case: Case, watched: Watched, work: Path, *, profile: bool) -> None:
    """Seconds per step, from the end of the previous step, so that everything between two steps counts."""
    report = Report(case)
    before = STARTED
    for step, (kind, counts) in enumerate(plan_steps(case), start=1):
        now = watched.wait(step)
        if step == 1:
            first = now - watched.began[0]
            report.facts |= {"start_seconds": round(now - STARTED, 1), "first_step_seconds": round(first, 2)}
        if counts:
            report.add(kind, now - before, **logged_facts(work))
        before = now
    if profile:
        with Recorded() as recorded:
            now = watched.wait(step + case.profiled)
        report.show(profile=recorded.describe(now - before, case.profiled))


def logged_facts(work: Path) -> dict[str, Any]:
    """Read the metrics that the stage logged; the last step may be missing."""
    lines = (work / "metrics.jsonl").read_text().splitlines()[1:]
    steps = [json.loads(line) for line in lines]
    last = {key: steps[-1][key] if steps else None for key in ("mfu", "memory_gib", "loss")}
    return last | {"logged": [{key: step[key] for key in ("seconds", "data_seconds")} for step in steps]}


# The bare loop


@dataclass(frozen=True)
class OpenStage:
    """A stage of the product that is ready for its first step."""

    config: StageConfig
    model: Any
    updater: Any
    rows: dict[str, Any]
    mix: Mix


def open_stage(case: Case, folder: Path, *, fp8: bool = False) -> OpenStage:
    loaded = load_recipe(write_case(case, folder))
    context = prepare.open_data_run(loaded)
    prepare.tokenize(context)
    prepare.pack(context)
    [stage] = loaded.recipe.stages
    draw_weights(case.device)
    model = load_model(context.model, device=torch.device(case.device), dtype=torch.float32)
    apply_rope(model, stage.rope, stage.context_length)
    if stage.compile:
        fuse_parts(model)
    if fp8:
        use_fp8(model)
    apply_memory(model, stage.memory)
    updater = build_updater(stage, model, seed=loaded.recipe.seed)
    model.train()
    rows = {name: open_rows(context.out / "datasets" / name) for name in stage.mix}
    sizes = {name: len(found) for name, found in rows.items()}
    mix = Mix(stage.mix, sizes, dict.fromkeys(sizes, case.length), case.length, loaded.recipe.seed)
    return OpenStage(stage, model, updater, rows, mix)


def loop(case: Case, folder: Path, *, profile: bool, fp8: bool = False) -> None:
    """Run optimizer steps on the product's rows, without loader, metrics, log or checkpoint."""
    stage = open_stage(case, folder, fp8=fp8)

    def step(number: int) -> Callable[[], float]:
        batches = build_step(stage.config, stage.rows, step_picks(stage.config, stage.mix, number))
        batches = batches if case.small else pinned(batches)
        return lambda: train_step(stage.model, stage.updater, batches, lr=stage.config.lr).loss

    time_steps(case, count_flops(stage.model), step, profile=profile)


# The peer


def peer(case: Case, folder: Path, *, profile: bool, checkpointing: bool = True) -> None:
    """Run stock `transformers` with Liger's kernels."""
    if not case.small:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    write_model_files(case, folder / "model", context=case.length)
    config = LlamaConfig.from_pretrained(folder / "model", attn_implementation="sdpa", use_cache=False)
    torch.manual_seed(0)
    with torch.device(case.device):
        dtype = torch.float32 if case.small else torch.bfloat16
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").train()
    if checkpointing and case.settings.get("activation_checkpointing"):
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(number: int) -> Callable[[], float]:
        rng = np.random.default_rng(number)
        tokens = torch.from_numpy(rng.integers(case.shape["vocab_size"], size=(case.rows_per_step, case.length)))
        batches = tokens.to(case.device)[:, None]

        def run() -> float:
            total = 0.0
            for batch in batches:
                loss = model(input_ids=batch, labels=batch).loss / len(batches)
                loss.backward()
                total += float(loss.detach())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return total

        return run

    time_steps(case, count_flops(model), step, profile=profile)


# Timing


def time_steps(case: Case, flops: FlopCount, step: Callable[[int], Callable[[], float]], *, profile: bool) -> None:
    """Run the steps of `plan_steps` one after another, with prepared rows."""
    report, used = Report(case), set[str]()
    for number, (kind, counts) in enumerate(plan_steps(case), start=1):
        run = step(number)
        began = synchronized_time()
        if counts:
            loss = run()
        else:
            with Recorded() as recorded:
                loss = run()
            used |= {name[:80] for name in recorded.times if _kind_of(name) == "attention"}
        seconds = synchronized_time() - began
        if not counts and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()  # loading and compiling are over
        if number == 1:
            report.facts |= {"start_seconds": round(began + seconds - STARTED, 1), "first_step_seconds": seconds}
        if counts:
            report.add(kind, seconds, loss=loss, attention_kernels=sorted(used), **_use(case, flops, seconds))
    if profile:
        runs = [step(number + 1 + extra) for extra in range(case.profiled)]
        began = synchronized_time()
        with Recorded() as recorded:
            for run in runs:
                run()
            seconds = synchronized_time() - began
        report.show(profile=recorded.describe(seconds, case.profiled))


def synchronized_time() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _use(case: Case, flops: FlopCount, seconds: float) -> dict[str, Any]:
    peak = peak_flops(torch.device(case.device))
    work = case.rows_per_step * flops.step((case.length,))
    whole = set(case.mix) == {"whole"}
    memory = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    return {"mfu": work / seconds / peak if peak and whole else None, "memory_gib": memory}


class Recorded:
    """Device time by kernel over all threads; empty without a GPU."""

    def __enter__(self) -> "Recorded":
        self.times: Counter[str] = Counter()
        self._profiler = None
        if torch.cuda.is_available():
            self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._profiler.start()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._profiler is not None:
            torch.cuda.synchronize()
            self._profiler.stop()
            for event in self._profiler.key_averages():
                self.times[event.key] += event.self_device_time_total

    def describe(self, seconds: float, steps: int) -> dict[str, Any]:
        """Seconds per step: wall clock, each kind of kernel, and the slowest kernels."""
        kinds: Counter[str] = Counter()
        for name, microseconds in self.times.items():
            kinds[_kind_of(name)] += microseconds
        share = 1e-6 / steps
        return {
            "step": round(seconds / steps, 4),
            "kinds": {kind: round(value * share, 4) for kind, value in kinds.most_common()},
            "kernels": {name[:100]: round(value * share, 4) for name, value in self.times.most_common(25)},
        }


def _kind_of(kernel: str) -> str:
    return next((kind for kind, words in KINDS.items() if any(word in kernel for word in words)), "all else")


COLUMNS = {
    "product": product,
    "loop": loop,
    "fp8": partial(loop, fp8=True),
    "peer": peer,
    "peer-plain": partial(peer, checkpointing=False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("column", choices=COLUMNS)
    parser.add_argument("case", choices=CASES | LENGTHS | PLANNED)
    parser.add_argument("folder", type=Path, help="folder for recipe and run; columns of one case share it")
    parser.add_argument("--layers", type=int, help="of the 8B shape")
    parser.add_argument("--small", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--profile", action="store_true", help="also record kernels, after the measured steps")
    args = parser.parse_args()
    case = (CASES | LENGTHS | PLANNED)[args.case]
    if args.layers and case.shape is LLAMA_8B:
        case = case.with_layers(args.layers)
    if args.small:
        case = case.as_small()
    else:
        require_gpu()
    args.folder.mkdir(parents=True, exist_ok=True)
    COLUMNS[args.column](case, args.folder, profile=args.profile)


if __name__ == "__main__":
    main()
