"""Correct the cost model by measured steps of a few layers on the local GPU or CPU.

Two models with 2 and 4 layers of the true shape run whole steps with the trainer's own code and the stage's settings.
The difference is the cost of layers; the rest is head, loss and update. Both are divided by the computed cost of the
same models, and the factors apply to the full model. It takes six steps of a few seconds each. Long contexts are
measured at the longest length whose steps take a few seconds.
"""

import gc
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig

from unspool.core.artifacts import write_atomic
from unspool.data.packing.row import Row
from unspool.models.attention.interface import NAME, register
from unspool.models.fuse import fuse_parts
from unspool.models.memory.checkpointing import apply_memory
from unspool.models.memory.policy import MemoryPolicy
from unspool.planning.cost import Gpu, Shape
from unspool.planning.footprint import Footprint, StepSetup, footprint
from unspool.planning.step_time import DeviceSpeed, Documents, StepSeconds, device_speed, documents, step_seconds
from unspool.training.config import StageConfig
from unspool.training.loader import build_step
from unspool.training.optim.updater import build_updater
from unspool.training.step import train_step

FILE = "calibration.json"
# Factors outside this range mean that another program uses the GPU, or that the run is too short.
MIN_FACTOR, MAX_FACTOR = 0.5, 3.0


@dataclass(frozen=True, kw_only=True)
class Calibration:
    device: str  # name from the driver
    gpu: str  # name for `--gpu`
    versions: str
    shape: Shape
    tokens: int  # per measured micro-batch
    document_len: int
    layers: float  # measured ÷ computed seconds
    rest: float
    activations: float  # measured ÷ computed bytes
    seconds: tuple[float, float]  # per step, with fewer and with more layers
    num_layers: tuple[int, int]
    # Only for a CPU: the rates that the factors belong to, since every plan measures a CPU's rates again.
    compute: float | None = None
    memory: float | None = None

    @property
    def summary(self) -> str:
        few, many = self.num_layers
        return (
            f"{few} and {many} layers, {self.tokens} tokens on {self.device} ({self.versions}); measured ÷ computed: "
            f"layers {self.layers:.2f}, the rest {self.rest:.2f}, activations {self.activations:.2f}"
        )

    def correct(self, speed: DeviceSpeed) -> DeviceSpeed:
        compute = speed.compute if self.compute is None else self.compute
        memory = speed.memory if self.memory is None else self.memory
        return replace(speed, compute=compute, memory=memory, layers=self.layers, rest=self.rest)

    def matches(self, gpu: str, shape: Shape) -> bool:
        return (self.gpu, self.shape) == (gpu, shape)


def _bound(factor: float, *, on_cpu: bool) -> float:
    # CPU kernels differ far more than GPU kernels.
    wider = 10 if on_cpu else 1
    return min(wider * MAX_FACTOR, max(MIN_FACTOR / wider, factor))


def save_calibration(found: Calibration, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    write_atomic(path, json.dumps(asdict(found), indent=1) + "\n")
    return path


def load_calibration(folder: Path) -> Calibration | None:
    """Load a calibration; None without a readable file, because it is optional."""
    try:
        content = json.loads((folder / FILE).read_text())
        pairs = {name: tuple(content[name]) for name in ("seconds", "num_layers")}
        return Calibration(**content | pairs | {"shape": Shape(**content["shape"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


LAYERS = (2, 4)
# Maximum seconds of a step with more layers.
MAX_SECONDS = 6.0
STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One small model, measured and computed."""

    seconds: float
    peak: float | None  # bytes; None if the device does not count them
    computed: StepSeconds
    held: Footprint


def measure(shape: Shape, stage: StageConfig, docs: Documents, gpu: Gpu, device: torch.device) -> Calibration:
    """Measure on `device`; no other program should use it."""
    tokens = measured_tokens(shape, stage, docs, gpu)
    document_len = max(1, min(tokens, round(docs.mean)))
    lens = [document_len] * (tokens // document_len) + [tokens % document_len] * bool(tokens % document_len)
    few, many = (
        _trial(replace(shape, num_layers=n), _small(stage, tokens, shape.num_layers, n), lens, gpu, device)
        for n in LAYERS
    )
    computed = max(1e-9, _layer_seconds(many) - _layer_seconds(few))
    layers = _bound((many.seconds - few.seconds) / computed, on_cpu=gpu.is_cpu)
    rest = (few.seconds - layers * _layer_seconds(few)) / max(1e-9, few.computed.step - _layer_seconds(few))
    speed = device_speed(gpu) if gpu.is_cpu else None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Calibration(
        device=name,
        gpu=gpu.name,
        versions=f"torch {torch.__version__}, transformers {transformers.__version__}",
        shape=shape,
        tokens=tokens,
        document_len=document_len,
        layers=layers,
        rest=_bound(rest, on_cpu=gpu.is_cpu),
        activations=1.0
        if many.peak is None
        else _bound((many.peak - _fixed_bytes(many)) / (many.held.device - _fixed_bytes(many)), on_cpu=False),
        seconds=(few.seconds, many.seconds),
        num_layers=LAYERS,
        compute=speed.compute if speed else None,
        memory=speed.memory if speed else None,
    )


def measured_tokens(shape: Shape, stage: StageConfig, docs: Documents, gpu: Gpu) -> int:
    """Return the tokens of the stage's micro-batch, halved until a step is short enough."""
    small = replace(shape, num_layers=LAYERS[1])
    tokens = stage.tokens_per_pass
    while tokens > 1024:
        setup = StepSetup(
            tokens=tokens, on_cpu=gpu.is_cpu, policy=few_layers(stage.memory, shape.num_layers, LAYERS[1])
        )
        shorter = Documents(tokens=tokens, squares=tokens * min(docs.mean, tokens))
        if step_seconds(small, setup, shorter, device_speed(gpu)).step <= MAX_SECONDS:
            break
        tokens //= 2
    return tokens


def few_layers(policy: MemoryPolicy, of: int, layers: int) -> MemoryPolicy:
    """Scale the memory settings to fewer layers."""
    keep = round(policy.keep_products * layers / of)
    return replace(
        policy,
        keep_products=keep,
        keep_on_host=min(keep, round(policy.keep_on_host * layers / of)),
        layers_per_checkpoint=min(policy.layers_per_checkpoint, layers),
    )


def _layer_seconds(trial: Trial) -> float:
    return trial.computed.step - trial.computed.loss - trial.computed.update


def _fixed_bytes(trial: Trial) -> float:
    """Return the bytes that do not depend on the number of tokens."""
    held = trial.held
    return held.weights + held.optimizer + held.gradients + held.loss


def _small(stage: StageConfig, tokens: int, of: int, layers: int) -> StageConfig:
    """Return the stage with one micro-batch and few layers, in bf16."""
    sizes = {"context_length": tokens, "micro_batch_tokens": None, "batch_tokens": tokens, "tokens": tokens}
    policy = few_layers(stage.memory, of, layers)
    return stage.model_copy(
        update={
            **sizes,
            "mix": {"rows": 1.0},
            "lr_overrides": {},
            "precision": "bf16",
            "bf16_layers": 0,
            **vars(policy),
        }
    )


def _trial(shape: Shape, small: StageConfig, lens: list[int], gpu: Gpu, device: torch.device) -> Trial:
    seconds, peak = _measured(shape, small, lens, device)
    setup = StepSetup(
        tokens=small.context_length,
        policy=small.memory,
        optimizer=small.optimizer,
        compiled=small.compile,
        on_cpu=gpu.is_cpu,
    )
    computed = step_seconds(shape, setup, documents(lens), device_speed(gpu))
    return Trial(seconds=seconds, peak=peak, computed=computed, held=footprint(shape, setup))


def _measured(shape: Shape, stage: StageConfig, lens: list[int], device: torch.device) -> tuple[float, float | None]:
    """Return the seconds of the fastest step, and peak bytes."""
    run = _step(shape, stage, lens, device)
    run()
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    times = []
    for _ in range(STEPS):
        began = time.perf_counter()
        run()
        if on_cuda:
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    peak = float(torch.cuda.max_memory_allocated(device)) if on_cuda else None
    del run
    gc.collect()
    if on_cuda:
        torch.cuda.empty_cache()
    return min(times), peak


def _step(shape: Shape, stage: StageConfig, lens: list[int], device: torch.device) -> Callable[[], Any]:
    model = _random_model(shape, stage, device)
    updater = build_updater(stage, model)
    if stage.compile:
        fuse_parts(model)
    apply_memory(model, stage.memory)
    rng = np.random.default_rng(0)
    tokens = rng.integers(shape.vocabulary, size=stage.context_length, dtype=np.uint32)
    row = Row(tokens, np.array(lens, dtype=np.int32), None, "random", "intra_document")
    rows: Any = {"rows": [row]}
    work = build_step(stage, rows, [[("rows", 0)]])
    return lambda: train_step(model, updater, work, lr=stage.lr)


def _random_model(shape: Shape, stage: StageConfig, device: torch.device) -> Any:
    """Create a model with random weights on the device in fp32, as a stage loads it."""
    register()
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=stage.context_length,
        rope_parameters={"rope_type": "default", "rope_theta": 8e6},
        attn_implementation=NAME,
    )
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=NAME)
    model.config.use_cache = False
    return model.train()
