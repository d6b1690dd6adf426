"""One rank of a stage on many GPUs, in a process of its own: see simulated_ranks.py, which starts it.

The stage is built by the functions of `unspool train`: mesh, FSDP2, Ulysses, ring, memory settings, optimizer, rows and
step. Weights are drawn on the device instead of read. Prints a line of JSON after every step.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from collectives import Simulated, simulated_ranks
from gpu import machine, require_gpu
from train_columns import draw_weights

from unspool.data.packing.row import Row
from unspool.recipe.load import load_recipe
from unspool.training import stage as product_stage
from unspool.training.config import StageConfig
from unspool.training.loader import build_step, model_shape, pinned
from unspool.training.optim.updater import build_updater
from unspool.training.parallel import apply, fsdp
from unspool.training.parallel.mesh import DistContext, build_dist_context
from unspool.training.parallel.ranks import Ranks
from unspool.training.stage import StageInputs
from unspool.training.step import train_step

GIB = 1 << 30
SCALE = 0.02  # standard deviation of drawn weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", type=Path, help="recipe of one stage, whose model folder has a config")
    parser.add_argument("world_size", type=int)
    parser.add_argument("--steps", type=int, default=1, help="measured steps, after one that compiles")
    parser.add_argument("--small", action="store_true", help="on the CPU")
    args = parser.parse_args()
    if not args.small:
        require_gpu()
        torch.cuda.set_device(0)
    device = torch.device("cpu" if args.small else "cuda", None if args.small else 0)
    recipe = load_recipe(args.recipe).recipe
    [stage] = recipe.stages
    with simulated_ranks(args.world_size) as counts:
        run_rank(stage, str(recipe.model), args.world_size, device, counts, steps=args.steps)


def run_rank(
    stage: StageConfig, model: str, world_size: int, device: torch.device, counts: Simulated, *, steps: int
) -> dict[str, Any]:
    """Run a first step, which compiles and allocates, and `steps` measured steps; return and print what they took."""
    began = time.perf_counter()
    ranks = Ranks(rank=0, world_size=world_size, local_rank=0, device=device)
    context = build_dist_context(stage.parallel, ranks)
    draw_on(device)
    built = build_model(stage, model, device, context)
    updater = build_updater(stage, built)
    built.train()
    batches = own_rows(stage, built, context)
    if device.type == "cuda":
        batches = pinned(batches)
    found: dict[str, Any] = {
        "machine": machine() if device.type == "cuda" else {"gpu": None, "torch": torch.__version__},
        "sharded_load": not apply.needs_full_weights(stage, {}),
        "start_seconds": round(time.perf_counter() - began, 1),
        "step_seconds": [],
    }
    for number in range(steps + 1):
        counts.clear()
        if number == 1 and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()  # loading and compiling are over
        seconds, result = timed(lambda: train_step(built, updater, batches, lr=stage.lr, mesh=context.mesh), device)
        found |= {"loss": result.loss, "grad_norm": result.grad_norm, "updated": result.finite}
        if number == 0:
            found |= {"first_step_seconds": round(seconds, 2)}
            continue
        found["step_seconds"].append(round(seconds, 4))
        found |= {
            "collectives": counts.as_plain(),
            "memory_gib": torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else None,
            "reserved_gib": torch.cuda.max_memory_reserved() / GIB if device.type == "cuda" else None,
        }
        print(json.dumps(found), flush=True)
    return found


def build_model(stage: StageConfig, model: str, device: torch.device, context: DistContext) -> Any:
    inputs = StageInputs(model=model, datasets={})
    built, _ = product_stage._build(stage, inputs, {}, seed=0, device=device, dist_context=context)
    return built


def draw_on(device: torch.device) -> None:
    """Draw weights on the device from here on: those of full models, and those that ranks read shard by shard."""
    draw_weights(device.type)

    def drawn_rows(piece: Any, rows: slice) -> torch.Tensor:
        shape = [len(range(*rows.indices(piece.get_shape()[0]))), *piece.get_shape()[1:]]
        # Norms are the only vectors.
        return torch.randn(shape, device=device) * SCALE if len(shape) > 1 else torch.ones(shape, device=device)

    fsdp.read_rows = drawn_rows
    # The full model is only checked there, and a shape of many billion weights does not fit.
    apply._can_load_sharded = lambda folder: fsdp.sharded_load_problem(apply._config(folder), folder) is None


def own_rows(stage: StageConfig, model: Any, context: DistContext) -> Any:
    """This rank's part of a step, in which every row is one document of random tokens."""
    shape = model_shape(model)
    tokens = np.random.default_rng(0).integers(shape.num_embeddings, size=stage.context_length, dtype=np.uint32)
    row = Row(tokens, np.array([len(tokens)], dtype=np.int32), None, "random", "full")
    picks = [[("rows", 0)]] * (stage.batch_tokens // stage.context_length)
    rows: Any = {"rows": [row]}
    return build_step(stage, rows, picks, coords=context.coords, shape=shape)


def timed(step: Any, device: torch.device) -> tuple[float, Any]:
    """Seconds on the device's clock; on the wall clock of a CPU."""
    if device.type == "cpu":
        began = time.perf_counter()
        found = step()
        return time.perf_counter() - began, found
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    found = step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3, found


if __name__ == "__main__":
    main()
