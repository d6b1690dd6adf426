"""Longest sequence that fits an 8B model on one GPU: forward and backward, with memory settings.

    python benchmarks/long_sequence.py [--lengths 256K 512K 1M] [--layers 32] [--seconds 600] [--save]

Llama-3-8B's shape with random bf16 weights, no optimizer: weights and gradients take 30 GiB. Layers are recomputed,
their inputs wait in host memory, norms and MLPs run over tiles, attention over a few heads at a time. How many layers
share a checkpoint follows from the available host memory. Each length runs in its own process. A length that runs out
of memory or time is recorded with the layer that it reached.
Attention grows with the square of the length. At 600 TFLOP/s (550 backward) and full recomputation expect 3 minutes
for 256K, 10 for 512K and 40 for 1M; `--layers 8` takes a quarter of that and of the weights' memory.
`--dry`, or a machine without a GPU, runs a toy model through the same code.
"""

import argparse
import json
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from cases import LLAMA_8B
from processes import in_own_process
from transformers import AutoModelForCausalLM, LlamaConfig

from unspool.core.host_memory import measure_host_memory
from unspool.core.sizes import format_size, parse_size
from unspool.models.attention.interface import NAME, register
from unspool.models.checks import layers_of
from unspool.models.loss import summed_loss
from unspool.models.memory.checkpointing import apply_memory
from unspool.models.memory.policy import MemoryPolicy

RESULTS = Path(__file__).parent / "results" / "long_sequence.json"
TOY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 224,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
GIB = 1 << 30
# Share of the available host memory; the rest is for the process itself and the file cache.
HOST_SHARE = 0.7
TILE = 16 << 10
# Of 8: a quarter of attention's workspace, and far from 2³¹ elements up to 2M tokens.
KV_HEADS_AT_ONCE = 2
FORWARD_FLOPS, BACKWARD_FLOPS, MATMUL_FLOPS = 600e12, 550e12, 700e12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=parse_size, nargs="+", help="tokens of one sequence")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--seconds", type=float, default=600, help="for each length, without building the model")
    parser.add_argument("--dry", action="store_true", help="a toy model, to test the script")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    dry = args.dry or not torch.cuda.is_available()
    if dry and not args.dry:
        print("no GPU: running a toy model")
    shape = (TOY if dry else LLAMA_8B) | ({"num_hidden_layers": args.layers} if args.layers else {})
    lengths = args.lengths or ([256, 512] if dry else [256 << 10, 512 << 10, 1 << 20])
    if dry or args.one:
        device = torch.device("cuda" if torch.cuda.is_available() and not dry else "cpu")
        results = [measure(shape, length, device, args.seconds) for length in lengths]
    else:
        results = [in_process(length, args.layers, args.seconds) for length in lengths]
    if args.one:
        print(json.dumps(results[0]))
        return
    if args.save:
        RESULTS.parent.mkdir(exist_ok=True)
        device_name = "CPU" if dry else torch.cuda.get_device_name()
        about = {"device": device_name, "torch": torch.__version__, "shape": LLAMA_8B if not dry else TOY}
        RESULTS.write_text(json.dumps(about | {"lengths": merged(about, results)}, indent=1) + "\n")


def merged(about: dict[str, Any], results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge with saved results of other lengths and layers that had the same settings; one may take half an hour."""
    saved = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    alike = all(saved.get(key) == value for key, value in about.items())
    by_case = {(one["length"], one["layers"]): one for one in [*(saved["lengths"] if alike else []), *results]}
    return [by_case[case] for case in sorted(by_case)]


def in_process(length: int, layers: int | None, seconds: float) -> dict[str, Any]:
    arguments = [__file__, "--one", "--lengths", str(length), "--seconds", str(seconds)]
    found = in_own_process(*arguments, *(["--layers", str(layers)] if layers else []))
    if isinstance(found, dict):
        return found
    print(f"{format_size(length)}: ended with code {found}", flush=True)
    return {"length": length, "layers": layers or LLAMA_8B["num_hidden_layers"], "outcome": f"ended with code {found}"}


def measure(shape: dict[str, Any], length: int, device: torch.device, seconds: float) -> dict[str, Any]:
    """Run one forward and backward pass and print progress."""
    name, num_layers = format_size(length), shape["num_hidden_layers"]
    policy = choose_policy(shape, length, host_available())
    print(f"{name}: {describe(policy)}; expected {expected_seconds(shape, length):.0f} s on an H200", flush=True)
    model = build(shape, length, device)
    apply_memory(model, policy)
    progress = Progress(name, num_layers, device, seconds)
    progress.watch(model)
    result: dict[str, Any] = {"length": length, "layers": num_layers, "policy": describe(policy)}
    try:
        result |= {"loss": step(model, length, device, progress), "outcome": "done"}
    except torch.OutOfMemoryError as error:
        result["outcome"] = f"out of memory in {progress.where}: {str(error).splitlines()[0][:200]}"
    except TimeoutError:
        result["outcome"] = f"out of time in {progress.where}"
    took = time.perf_counter() - progress.began
    result |= {
        "where": progress.where,
        "seconds": round(took, 2),
        "forward_seconds": round(progress.forward_seconds, 2),
        "tokens_per_second": round(length / took, 1) if result["outcome"] == "done" else None,
        "device_peak_gib": round(device_peak(device) / GIB, 2),
        "host_peak_gib": round(progress.host_peak / GIB, 2),
    }
    speed = f", {result['tokens_per_second']} tokens/s" if result["tokens_per_second"] else ""
    print(
        f"{name}: {result['outcome']} after {took:.1f} s (forward {progress.forward_seconds:.1f}){speed}; "
        f"peak {result['device_peak_gib']} GiB on the device, {result['host_peak_gib']} GiB on the host",
        flush=True,
    )
    return result


def step(model: Any, length: int, device: torch.device, progress: "Progress") -> float:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(model.config.vocab_size, (length + 1,), generator=generator).to(device)
    progress.start()
    positions = torch.arange(length, device=device)[None]
    inputs = {"input_ids": numbers[None, :-1], "position_ids": positions, "doc_lens": (length,)}
    hidden = model.base_model(**inputs, use_cache=False).last_hidden_state[0]
    total, _ = summed_loss(hidden, model.get_output_embeddings().weight, numbers[1:])
    del hidden
    progress.forward_done()
    (total / length).backward()
    loss = float(total.detach()) / length
    norm = float(torch.stack([weight.grad.float().norm() for weight in model.parameters()]).norm())
    print(f"{progress.name}: loss {loss:.4f}, gradient norm {norm:.4g}", flush=True)
    assert loss == loss and norm == norm, "the loss or its gradient is not a number"
    return loss


@dataclass
class Progress:
    """Progress of a pass on the device, not of the queued work."""

    name: str
    num_layers: int
    device: torch.device
    seconds: float
    began: float = 0.0
    forward_seconds: float = 0.0
    where: str = "the beginning"
    host_peak: int = 0
    _host_before: int = 0
    _events: deque[Any] = field(default_factory=deque)

    def watch(self, model: Any) -> None:
        for number, layer in enumerate(layers_of(model)):
            layer.register_forward_pre_hook(lambda *_, number=number: self.reach(f"forward, layer {number}"))
            last = next(layer.parameters())
            last.register_post_accumulate_grad_hook(lambda _, number=number: self.reach(f"backward, layer {number}"))

    def start(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self._host_before = host_available()
        self.began = time.perf_counter()

    def forward_done(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.forward_seconds = time.perf_counter() - self.began
        self._say("forward done")

    def reach(self, where: str) -> None:
        """Wait for the layer before the last one, so that the next two are always queued."""
        if self.device.type == "cuda":
            self._events.append(torch.cuda.current_stream().record_event())
            if len(self._events) > 2:
                self._events.popleft().synchronize()
        self.where = f"{where} of {self.num_layers}"
        self.host_peak = max(self.host_peak, self._host_before - host_available())
        if where.endswith(("0", "5")):
            self._say(where)
        if time.perf_counter() - self.began > self.seconds:
            raise TimeoutError

    def _say(self, what: str) -> None:
        peak = f"{device_peak(self.device) / GIB:.1f} GiB"
        print(f"{self.name}: {what}, {time.perf_counter() - self.began:.1f} s, peak {peak}", flush=True)


def choose_policy(shape: dict[str, Any], length: int, host_bytes: int) -> MemoryPolicy:
    """Fewest layers per checkpoint that host memory allows; all layers of a group are held at once."""
    num_layers = shape["num_hidden_layers"]
    checkpoint = length * shape["hidden_size"] * 2
    every = next(
        (
            every
            for every in range(1, num_layers)
            if (-(-num_layers // every) - 1) * checkpoint <= HOST_SHARE * host_bytes
        ),
        num_layers,
    )
    # The toy model also gets tiles and heads to divide.
    return MemoryPolicy(
        activation_checkpointing="full",
        layers_per_checkpoint=every,
        offload=True,
        mlp_tiles=min(TILE, length // 4),
        attention_heads_at_once=min(KV_HEADS_AT_ONCE, shape["num_key_value_heads"]),
    )


def expected_seconds(shape: dict[str, Any], length: int) -> float:
    """Attention forward twice and backward once (2.5 times the work), everything else four times forward."""
    layers, hidden, inner = shape["num_hidden_layers"], shape["hidden_size"], shape["intermediate_size"]
    attention = 2.0 * length**2 * hidden * layers
    grouped = 2 * hidden * hidden * shape["num_key_value_heads"] / shape["num_attention_heads"]
    weights = layers * (2 * hidden * hidden + grouped + 3 * hidden * inner)
    head = shape["vocab_size"] * hidden
    products = 2.0 * length * (4 * weights + 3 * head)
    return attention * 2 / FORWARD_FLOPS + attention * 2.5 / BACKWARD_FLOPS + products / MATMUL_FLOPS


def build(shape: dict[str, Any], length: int, device: torch.device) -> Any:
    """Create the model on the device; on the host it takes minutes."""
    register()
    config = LlamaConfig(**shape, max_position_embeddings=length, rope_parameters={"rope_theta": 5e8})
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=NAME)
    return model.train()


def describe(policy: MemoryPolicy) -> str:
    return (
        f"recompute {policy.activation_checkpointing}, a checkpoint per {policy.layers_per_checkpoint}, offload, "
        "tiles of "
        f"{format_size(policy.mlp_tiles or 0)}, {policy.attention_heads_at_once} KV heads at once"
    )


def device_peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else 0


def host_available() -> int:
    """Host memory in bytes, of the machine or its container."""
    memory = measure_host_memory()
    assert memory is not None, "this benchmark needs /proc/meminfo"
    return memory.available


if __name__ == "__main__":
    main()
