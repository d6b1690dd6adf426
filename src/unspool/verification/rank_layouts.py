"""Promise 2 on several ranks: loss and gradient of a step do not depend on the number or layout of ranks.

Layouts are FSDP, replicated weights, Ulysses, ring, and combinations. Rows of several documents with masked tokens are
compared with plain `transformers`. Rows of one document, which a ring requires, are compared with one rank.

Each rank runs `python -m unspool.verification.rank_layouts FOLDER RANK WORLD_SIZE DEVICE` is one rank.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from unspool.core.errors import ConfigError
from unspool.models.fuse import keep_tables
from unspool.training.loader import build_step, model_shape
from unspool.training.parallel.apply import parallelize
from unspool.training.parallel.config import ParallelConfig, Work, check_layout, settle_layout
from unspool.training.parallel.dtensor import full_tensor
from unspool.training.parallel.mesh import build_mesh, rank_coords
from unspool.training.parallel.ranks import RankEnv, pick_backend
from unspool.training.step import train_step
from unspool.verification.case import Case, Check, Measured, SkippedError, error_line, step_stage, train_outcome
from unspool.verification.fixtures import FAMILIES, NUM_ROWS, ModelSpec, Step, build_steps
from unspool.verification.ground_truth import STEP, Outcome, compare

PACKED, SINGLE = "several", "single"  # the step of promise 2; the same step with one document per row
TIMEOUT_SECONDS = 300
DONE = "done\n"
Results = dict[str, tuple[float, dict[str, Tensor]]]  # layout: loss and gradient


class RankGroup(Protocol):
    """Ranks that together compute a request."""

    world_size: int

    def compute(self, request: dict[str, Any]) -> Results: ...


@dataclass(frozen=True)
class RankLayout:
    """Sizes of the mesh axes, and the step to compute."""

    step: str
    replicate: int
    shard: int
    ring: int
    ulysses: int

    @property
    def name(self) -> str:
        axes = {name: getattr(self, name) for name in ("replicate", "shard", "ulysses", "ring")}
        sizes = " × ".join(f"{name} {size}" for name, size in axes.items() if size > 1)
        return f"{sizes}{', single documents' if self.step == SINGLE else ''}"


def rank_check(ranks: RankGroup) -> Check:
    what = "one step on several ranks (FSDP, Ulysses, ring, combinations) vs. one rank"
    return Check("ranks", 2, what, partial(check_ranks, ranks=ranks))


def check_ranks(case: Case, ranks: RankGroup) -> list[Measured]:
    config, length = case.model.config, case.steps[PACKED].row_len
    layouts = list(possible_layouts(ranks.world_size, config.num_attention_heads, config.num_key_value_heads, length))
    request = {
        "name": case.spec.name,
        "ref": case.spec.ref,
        "device": case.device.type,
        "seed": case.seed,
        "length": case.steps["unequal"].row_len,
        "layouts": [asdict(layout) for layout in layouts],
    }
    found = ranks.compute(request)
    if not found:
        raise SkippedError(f"no layout of {ranks.world_size} ranks fits this model's heads and layer types")
    wanted = {
        PACKED: case.truths[PACKED],
        SINGLE: train_outcome(case.model, single_documents(case.steps[PACKED])),
    }
    results = []
    for layout in (layout for layout in layouts if layout.name in found):
        loss, grads = found[layout.name]
        difference = compare(Outcome({STEP: loss}, {STEP: grads}), wanted[layout.step])
        for measured in case.measure([(PACKED, difference)]):
            results.append(replace(measured, quantity=f"{layout.name} {measured.quantity}"))
    return results


def possible_layouts(world_size: int, num_heads: int, num_kv_heads: int, length: int) -> Iterator[RankLayout]:
    """All layouts of `world_size` ranks for a model with these heads, with and without document masks."""
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    for step, replicate, ring, ulysses in product((PACKED, SINGLE), sizes, sizes, sizes):
        work = Work(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            context_length=length,
            batch_tokens=length * NUM_ROWS,
            micro_batch_tokens=length,
            document_masks=step == PACKED,
        )
        try:
            layout = settle_layout(ParallelConfig(replicate=replicate, ring=ring, ulysses=ulysses), world_size)
            check_layout(layout, work)
        except ConfigError:
            continue
        # Test replicas of FSDP, Ulysses and single ranks. Replicas of combinations would test nothing new.
        if replicate == 1 or (ring == 1 and 1 in (layout.shard, ulysses)):
            yield RankLayout(step, **asdict(layout))


def single_documents(step: Step) -> Step:
    """The same tokens and masks, but each row is one document."""
    return Step(SINGLE, tuple(replace(row, doc_lens=np.array([len(row.tokens)], dtype=np.int32)) for row in step.rows))


# On every rank


def compute_layouts(request: dict[str, Any], *, world_size: int) -> Results:
    """Loss and full gradient by layout. Skips layouts that cannot run the model, such as windows on a ring."""
    device = torch.device(request["device"])
    family = FAMILIES.get(request["name"])
    spec = ModelSpec(name=request["name"], ref=request["ref"], rope=family.rope if family else None)
    found = {}
    for fields in request["layouts"]:
        layout = RankLayout(**fields)
        model = spec.load_ours(device, bf16=False)
        step = build_steps(request["length"], vocabulary=model.config.vocab_size, seed=request["seed"])[PACKED]
        if layout.step == SINGLE:
            step = single_documents(step)
        try:
            found[layout.name] = _train_on_ranks(model, step, layout, world_size=world_size)
        except ConfigError:
            continue
    return found


def _train_on_ranks(model: Any, step: Step, layout: RankLayout, *, world_size: int) -> tuple[float, dict[str, Tensor]]:
    """One step as in a stage on several ranks, but gather the gradient instead of applying it."""
    config = ParallelConfig(replicate=layout.replicate, ring=layout.ring, ulysses=layout.ulysses)
    device_type = next(model.parameters()).device.type
    mesh = build_mesh(config, world_size, device_type)
    shape = model_shape(model)
    if device_type == "cuda":
        keep_tables(model)
    model = parallelize(model, mesh, config).train()
    stage = step_stage(step.row_len, NUM_ROWS)
    rows: Any = {"rows": step.rows}
    picks = [[("rows", index)] for index in range(NUM_ROWS)]
    work = build_step(stage, rows, picks, coords=rank_coords(mesh), shape=shape)
    gatherer = _GradientGatherer(model)
    loss = train_step(model, gatherer, work, lr=stage.lr, mesh=mesh).loss
    return loss, gatherer.grads


class _GradientGatherer:
    """Replaces the updater. Gathering is a collective over all ranks."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.grads: dict[str, Tensor] = {}

    def begin(self, lr: float) -> None:
        self._model.zero_grad(set_to_none=True)

    def finish(self, *, is_good: bool, max_norm: float) -> float:
        for name, weight in self._model.named_parameters():
            grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            self.grads[name] = full_tensor(grad).float().cpu()
        return 0.0


# Processes


class RankProcesses(AbstractContextManager["RankProcesses"]):
    """Local rank processes that wait for requests: `with RankProcesses(2) as ranks: ranks.compute(…)`.

    They start once, because each process needs seconds to import torch. Ranks that share a GPU use gloo. If a rank
    fails or times out, all ranks are killed and the error message contains the rank's error.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._scratch = tempfile.TemporaryDirectory()
        self._folder = Path(self._scratch.name)
        self._children: list[subprocess.Popen[str]] = []
        self._device = ""

    def compute(self, request: dict[str, Any]) -> Results:
        if request["device"] != self._device:
            self._stop()
            self._start(request["device"])
        try:
            for child in self._children:
                assert child.stdin is not None
                child.stdin.write(json.dumps(request) + "\n")
                child.stdin.flush()
            self._wait()
        except (BrokenPipeError, TimeoutError) as error:
            problem = self._problem()
            self._stop()
            raise RuntimeError(problem or str(error)) from None
        results: Results = torch.load(self._folder / "answer", weights_only=True)
        return results

    def _start(self, device: str) -> None:
        self._device = device
        (self._folder / "store").unlink(missing_ok=True)
        for rank in range(self.world_size):
            command = [sys.executable, "-m", __spec__.name, str(self._folder), str(rank), str(self.world_size), device]
            with (self._folder / f"errors-{rank}").open("w") as errors:
                child = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                )
            self._children.append(child)

    def _wait(self) -> None:
        """Wait for a line from every rank, or for the first rank to exit."""
        with selectors.DefaultSelector() as selector:
            for child in self._children:
                assert child.stdout is not None
                selector.register(child.stdout, selectors.EVENT_READ)
            while selector.get_map():
                ready = selector.select(timeout=TIMEOUT_SECONDS)
                if not ready:
                    raise TimeoutError(f"ranks did not answer within {TIMEOUT_SECONDS} s")
                for key, _ in ready:
                    # Gloo also prints to this stream when it connects.
                    while (line := key.fileobj.readline()) != DONE:  # type: ignore[union-attr]
                        if not line:
                            raise BrokenPipeError("a rank exited")
                    selector.unregister(key.fileobj)

    def _problem(self) -> str:
        """First error of an exited rank that is not a lost connection, else the signals that killed ranks."""
        killed = []
        for rank, child in enumerate(self._children):
            try:
                code = child.wait(timeout=1)
            except subprocess.TimeoutExpired:
                continue
            error = error_line((self._folder / f"errors-{rank}").read_text())
            # One rank's error may kill other ranks, so report errors before signals.
            if code < 0:
                output = f"; its last output: {error}" if error else ""
                killed.append(f"rank {rank} was killed by {signal.Signals(-code).name}{output}")
            elif error and "onnection" not in error:
                return f"rank {rank}: {error}"
        return "; ".join(killed)

    def _stop(self) -> None:
        for child in self._children:
            child.kill()
            child.communicate()
        self._children, self._device = [], ""

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._scratch.cleanup()


def main() -> None:
    folder, rank, world_size, device_type = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    seat = RankEnv(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        host="",
        port=0,
        agent_hosts_store=False,
    )
    device, backend = pick_backend(device_type, seat, num_devices=torch.cuda.device_count())
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=TIMEOUT_SECONDS),
    )
    for line in sys.stdin:
        found = compute_layouts(json.loads(line), world_size=world_size)
        if rank == 0:
            torch.save(found, folder / "answer")
        print(DONE, end="", flush=True)


if __name__ == "__main__":
    main()
