"""Plant faults and check that a part of the GPU gate fails because of each.

    python benchmarks/gate_faults.py [--only kept-region mask optimizer-state fp8-gradient]

The product is unchanged: the part calls this file instead of `unspool`; it replaces a function of the product and then
runs the command. The faults run in parallel. Exit code 1 if the gate misses one.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gate_parts
from gate import describe, in_own_process, needed, roomy_folder


def call_sdpa_in_kept_region() -> None:
    """Call SDPA once more in the first attention whose result is kept, as a warm-up did (commit 7d8bb82)."""
    import torch
    import torch.nn.functional as F

    from unspool.models.memory import kept

    right = kept.call
    called: list[bool] = []

    def call(kernel: Callable[..., Any], *args: Any, **options: Any) -> Any:
        def warmed_up(query: Any, *others: Any, **options: Any) -> Any:
            some = torch.zeros(1, 1, 8, 8, dtype=query.dtype, device=query.device)
            F.scaled_dot_product_attention(some, some, some)
            return kernel(query, *others, **options)

        is_attention = len(args) >= 3
        if kept._mode.get() is None or not is_attention or called:
            return right(kernel, *args, **options)
        called.append(True)
        return right(warmed_up, *args, **options)

    kept.call = call


def forget_documents() -> None:
    """Let documents of a packed row attend to earlier documents."""
    from dataclasses import replace

    from unspool.models.attention import cuda, interface

    def merged(right: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def attend(inputs: Any) -> Any:
            return right(replace(inputs, doc_lens=inputs.doc_lens and (sum(inputs.doc_lens),)))

        return attend

    cuda.cuda_attention = merged(cuda.cuda_attention)
    interface.reference_attention = merged(interface.reference_attention)


def lose_optimizer_state() -> None:
    """Resume with the weights but without the optimizer state."""
    from unspool.training.optim.updater import Updater

    right = Updater.load_optimizer

    def load(self: Any, saved: Any) -> None:
        right(self, {})

    Updater.load_optimizer = load  # type: ignore[method-assign]


def swap_fp8_gradients() -> None:
    """Return gradients of FP8 products with their rows in reverse order; scales alone would not matter to AdamW."""
    from unspool.models.fp8 import linear

    right = linear.multiply
    linear.multiply = lambda *args, **options: right(*args, **options).flip(0)


@dataclass(frozen=True, kw_only=True)
class Fault:
    plant: Callable[[], None]
    part: str
    reason: str  # must occur in the part's reason


FAULTS = {
    "kept-region": Fault(plant=call_sdpa_in_kept_region, part="8b-64k", reason="kept result"),
    "mask": Fault(plant=forget_documents, part="verify", reason="packing on"),
    "optimizer-state": Fault(plant=lose_optimizer_state, part="resume", reason="weights after a resume are off by"),
    "fp8-gradient": Fault(plant=swap_fp8_gradients, part="fp8", reason="differ by up to"),
}


def main() -> None:
    if sys.argv[1:2] == ["--run"]:
        run_with_fault(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--small", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--fault", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        if args.part == FAULTS[args.fault].part:
            gate_parts.UNSPOOL = [sys.executable, __file__, "--run", args.fault]
            gate_parts.VERIFIED_MODELS, gate_parts.VERIFIED_CHECKS = (
                ("llama",),
                ("packing",),
            )  # these detect it
        gate_parts.run_part(gate_parts.Gate(args.work, small=args.small), args.part)
        return
    if not args.small:
        from gpu import require_gpu

        require_gpu()
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="gate-faults-", dir=roomy_folder()) as folder,
        ThreadPoolExecutor(len(args.only)) as pool,
    ):
        seen = list(pool.map(lambda name: is_seen(name, Path(folder) / name, small=args.small), args.only))
    print(f"{sum(seen)} of {len(seen)} faults seen in {time.monotonic() - began:.0f} s")
    sys.exit(0 if all(seen) else 1)


def run_with_fault(name: str, *arguments: str) -> None:
    from unspool.cli.main import main as unspool

    FAULTS[name].plant()
    sys.argv = ["unspool", *arguments]
    unspool()


def is_seen(name: str, work: Path, *, small: bool) -> bool:
    """Run the part with the fault; run the parts that it needs without it."""
    fault = FAULTS[name]
    work.mkdir(parents=True)
    for part in [*reversed(needed(fault.part)), fault.part]:
        result = in_own_process(Path(__file__), part, work, "--fault", name, small=small)
        if part != fault.part and not result["passed"]:
            break
    seen = not result["passed"] and part == fault.part and fault.reason in result["reason"]
    print(f"{'seen' if seen else 'NOT SEEN'}  {name}: {describe(part, result)}", flush=True)
    return seen


if __name__ == "__main__":
    main()
