"""Measure what the cost model computes: steps of a few layers of the true shape, on this machine's GPU.

In: a stage, its model's shape, how long its documents are. Out: a `Calibration`.
Two models, of few and of some more layers, take whole steps with the trainer's own code under the stage's settings.
The difference is what layers cost, the rest is head, loss and update; both are compared with what is computed for the
same models, so that the factors hold for the whole one.
Price: six steps of some seconds each. Long contexts are measured at the longest length whose steps take few seconds.
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
from unspool.planning.footprint import Footprint, Held, footprint
from unspool.planning.step_time import Documents, Pace, StepSeconds, documents, pace_of, step_seconds
from unspool.training.config import StageConfig
from unspool.training.loader import build_step
from unspool.training.optim.updater import build_updater
from unspool.training.step import train_step

# What a short measured run says about the cost model: factors for one GPU and one model's shape, in a small file.


FILE = "calibration.json"
# Beyond these a measurement is of something else: another program on the GPU, or too short a run.
LEAST, MOST = 0.5, 3.0


@dataclass(frozen=True, kw_only=True)
class Calibration:
    device: str  # as its driver calls it
    gpu: str  # as `--gpu` does
    versions: str
    shape: Shape
    tokens: int  # of a micro-batch that was measured
    document_len: int
    layers: float  # measured seconds ÷ computed ones
    rest: float
    activations: float  # likewise of bytes
    seconds: tuple[float, float]  # of a step with the fewer and with the more layers
    num_layers: tuple[int, int]

    @property
    def told(self) -> str:
        few, many = self.num_layers
        return (
            f"{few} and {many} layers, {self.tokens} tokens on {self.device} ({self.versions}); layers take "
            f"{self.layers:.2f}, the rest {self.rest:.2f} and activations {self.activations:.2f} times what is computed"
        )

    def correct(self, pace: Pace) -> Pace:
        return replace(pace, layers=self.layers, rest=self.rest)

    def is_for(self, gpu: str, shape: Shape) -> bool:
        return (self.gpu, self.shape) == (gpu, shape)


def bounded(factor: float) -> float:
    return min(MOST, max(LEAST, factor))


def save_calibration(found: Calibration, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    write_atomic(path, json.dumps(asdict(found), indent=1) + "\n")
    return path


def load_calibration(folder: Path) -> Calibration | None:
    """None where there is none, or one that cannot be read: it is only a help."""
    try:
        content = json.loads((folder / FILE).read_text())
        pairs = {name: tuple(content[name]) for name in ("seconds", "num_layers")}
        return Calibration(**content | pairs | {"shape": Shape(**content["shape"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


LAYERS = (2, 4)
# Seconds that a step with more layers may take.
MOST_SECONDS = 6.0
STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One small model, measured and computed."""

    seconds: float
    peak: float | None  # bytes; None where the device does not count them
    computed: StepSeconds
    held: Footprint


def measure(shape: Shape, stage: StageConfig, docs: Documents, gpu: Gpu, device: torch.device) -> Calibration:
    """Takes the GPU for itself: nothing else should run on it."""
    tokens = measured_tokens(shape, stage, docs, gpu)
    document_len = max(1, min(tokens, round(docs.mean)))
    lens = [document_len] * (tokens // document_len) + [tokens % document_len] * bool(tokens % document_len)
    few, many = (
        _trial(replace(shape, num_layers=n), _small(stage, tokens, shape.num_layers, n), lens, gpu, device)
        for n in LAYERS
    )
    layers = bounded((many.seconds - few.seconds) / max(1e-9, layer_seconds(many) - layer_seconds(few)))
    rest = (few.seconds - layers * layer_seconds(few)) / max(1e-9, few.computed.step - layer_seconds(few))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Calibration(
        device=name,
        gpu=gpu.name,
        versions=f"torch {torch.__version__}, transformers {transformers.__version__}",
        shape=shape,
        tokens=tokens,
        document_len=document_len,
        layers=layers,
        rest=bounded(rest),
        activations=1.0 if many.peak is None else bounded((many.peak - fixed(many)) / (many.held.device - fixed(many))),
        seconds=(few.seconds, many.seconds),
        num_layers=LAYERS,
    )


def measured_tokens(shape: Shape, stage: StageConfig, docs: Documents, gpu: Gpu) -> int:
    """A micro-batch of the stage, or half of it, or half of that …"""
    small = replace(shape, num_layers=LAYERS[1])
    tokens = stage.micro_batch_tokens or stage.context_length
    while tokens > 1024:
        held = Held(tokens=tokens, policy=few_layers(stage.memory, shape.num_layers, LAYERS[1]))
        shorter = Documents(tokens=tokens, squares=tokens * min(docs.mean, tokens))
        if step_seconds(small, held, shorter, pace_of(gpu)).step <= MOST_SECONDS:
            break
        tokens //= 2
    return tokens


def few_layers(policy: MemoryPolicy, of: int, layers: int) -> MemoryPolicy:
    """The same settings for fewer layers."""
    keep = round(policy.keep_products * layers / of)
    return replace(
        policy,
        keep_products=keep,
        keep_on_host=min(keep, round(policy.keep_on_host * layers / of)),
        layers_per_checkpoint=min(policy.layers_per_checkpoint, layers),
    )


def layer_seconds(trial: Trial) -> float:
    return trial.computed.step - trial.computed.loss - trial.computed.update


def fixed(trial: Trial) -> float:
    """Bytes that do not grow with tokens."""
    held = trial.held
    return held.weights + held.optimizer + held.gradients + held.loss


def _small(stage: StageConfig, tokens: int, of: int, layers: int) -> StageConfig:
    """The stage for one micro-batch and few layers."""
    sizes = {"context_length": tokens, "micro_batch_tokens": None, "batch_tokens": tokens, "tokens": tokens}
    policy = few_layers(stage.memory, of, layers)
    return stage.model_copy(update={**sizes, "mix": {"rows": 1.0}, "lr_overrides": {}, **vars(policy)})


def _trial(shape: Shape, small: StageConfig, lens: list[int], gpu: Gpu, device: torch.device) -> Trial:
    seconds, peak = _measured(shape, small, lens, device)
    held = Held(
        tokens=small.context_length,
        policy=small.memory,
        optimizer=small.optimizer,
        compiled=small.compile,
    )
    computed = step_seconds(shape, held, documents(lens), pace_of(gpu))
    return Trial(seconds=seconds, peak=peak, computed=computed, held=footprint(shape, held))


def _measured(shape: Shape, stage: StageConfig, lens: list[int], device: torch.device) -> tuple[float, float | None]:
    """Seconds of a step, the best of some; bytes at its fullest."""
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
    """Made on the device itself, in the precision that the stage loads it in."""
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
