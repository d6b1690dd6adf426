"""Attention distillation: fit queries and keys so that each layer attends as before its RoPE settings changed.

In a step, the unchanged model (the teacher) runs one forward pass. Each layer of the student gets the teacher's input
of that layer and is fitted to the teacher's attention. The loss is the KL divergence: the mean over heads and queries,
summed over layers. So no backward pass runs through several layers, and MLPs and the head are not used. `before` and
`after` training, distillation has its own steps. `during` training, it adds to the gradients of training steps, so that
queries and keys learn new data and keep their original attention.

The result depends only on weights, rows and seed: repeated after a kill, it is bit-identical. Distillation does not
change training's optimizer state or random generators. It needs memory for the teacher, and for an fp32 copy and two
moments of the fitted parameters.
"""

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from unspool.core.artifacts import file_digest, write_atomic
from unspool.core.errors import ConfigError, UnspoolError
from unspool.core.progress import long_bar
from unspool.core.sizes import format_count, format_size
from unspool.data.mixture import Mix
from unspool.data.packing.store import RowSet
from unspool.models.config import NewModel, original_context
from unspool.models.fuse import compute_in_bf16
from unspool.training.batch import Batch, build_batch
from unspool.training.config import ROWS_PER_STEP, AttentionDistillationConfig, StageConfig
from unspool.training.distill.layers import QueryKey, compare_layers, divergence, fitted_parameters
from unspool.training.metrics.logger import JsonlLog
from unspool.training.metrics.validation import eval_mode
from unspool.training.optim.updater import Updater
from unspool.training.schedule import StoppedError, catch_stop_signals

logger = logging.getLogger(__name__)

# Adds to the gradient of the training step with this number; returns the loss.
AuxLoss = Callable[[int], float]

FILE = "attention_distillation.jsonl"
# File in the work folder with the result of the steps before training, so that a resumed stage skips them.
WEIGHTS = "attention_distillation.safetensors"
SUMS = f"{WEIGHTS}.sums"
BETAS = (0.9, 0.95)
WARMUP_STEPS = 4
# Tokens per forward pass of the teacher; one row, if the row is longer.
TOKENS_AT_ONCE = 1 << 14


def check_distillation(
    stage: StageConfig, model: str | NewModel | None, row_lens: Mapping[str, int], *, world_size: int
) -> None:
    """Refuse impossible settings before any work. `model` is the stage's starting model, None if it is missing."""
    config = stage.attention_distillation
    if config is None:
        return
    if world_size > 1:
        raise ConfigError(
            f"stage {stage.name}: attention_distillation is not supported on several ranks (here {world_size}) yet; "
            "run the stage on one, or remove attention_distillation."
        )
    if config.during and stage.optimizer.step == "in-backward":
        raise ConfigError(
            f"stage {stage.name}: attention_distillation.during cannot be combined with optimizer.step in-backward, "
            "which uses up the gradients; set optimizer.step to after, or remove during."
        )
    if isinstance(model, NewModel):
        raise ConfigError(
            f"stage {stage.name}: attention_distillation needs a trained model, but this model is new; remove it from "
            "the first stage."
        )
    if model is None:
        return
    own = original_context(model)
    for name, length in row_lens.items():
        if length > own:
            raise ConfigError(
                f"stage {stage.name}: attention_distillation.datasets {name} has rows of {format_size(length)}, longer "
                f"than the context length {format_size(own)} of the model that the stage starts from; use rows of at "
                f"most {format_size(own)}."
            )


@dataclass(frozen=True, kw_only=True)
class AttentionDistillation:
    """Distillation before, during and after the training of one stage."""

    stage: StageConfig
    config: AttentionDistillationConfig
    model: Any
    updater: Updater
    rows: Mapping[str, RowSet]
    mix: Mix  # in slots of the longest row
    slot: int  # tokens per slot
    work: Path
    load_teacher: Callable[[], Any]
    layers: list[dict[str, nn.Parameter]]  # fitted parameters of each layer

    def before(self) -> None:
        """Run the steps before training, or load their result. Call it before `resume`, whose checkpoint is newer."""
        if not self.config.before:
            return
        kept = self._read_before()
        if kept is None:
            kept = self._run("before", self.config.before, lr=self.config.lr_before, first=0)
            aside = self.work / f"{WEIGHTS}.partial"
            save_file({name: weight.cpu().contiguous() for name, weight in kept.items()}, aside)
            log = (self.work / FILE).read_bytes()
            sums = {"weights": file_digest(aside), "log_bytes": len(log), "log": sha256(log).hexdigest()}
            write_atomic(self.work / SUMS, json.dumps(sums))
            aside.replace(self.work / WEIGHTS)
        self._set_weights(kept)

    def _read_before(self) -> dict[str, Tensor] | None:
        """Return the result of the steps before training; None if it is missing or damaged."""
        path = self.work / WEIGHTS
        if not path.is_file():
            return None
        try:
            sums = json.loads((self.work / SUMS).read_text())
            log = (self.work / FILE).read_bytes()[: sums["log_bytes"]]
            if (sums["weights"], sums["log"]) == (file_digest(path), sha256(log).hexdigest()):
                return load_file(path)
        except (OSError, ValueError, KeyError, TypeError):
            pass
        logger.warning(f"stage {self.stage.name}: the result of distillation before training is damaged; repeating it")
        return None

    def during(self) -> AuxLoss | None:
        """Return the auxiliary loss of training steps; None if its weight is 0."""
        if not self.config.during:
            return None
        teacher, weight = self._teacher(), self.config.during
        first, batch = self.config.before * (self._batch // self.slot), self._during_batch
        count = batch // self.slot

        def add(step: int) -> float:
            slots = range(first + (step - 1) * count, first + step * count)
            with eval_mode(self.model):
                loss, grads = self._gradient(teacher, self._batches(slots), batch)
            self.updater.add({name: grad * weight for name, grad in grads.items()})
            return loss

        return add

    def after(self) -> None:
        """Run the steps after training, from its final weights."""
        if self.config.after:
            first = self.config.before * self._batch
            first += self.stage.steps * self._during_batch if self.config.during else 0
            self._set_weights(self._run("after", self.config.after, lr=self.config.lr_after, first=first // self.slot))

    @property
    def _batch(self) -> int:
        return self.config.batch_tokens or ROWS_PER_STEP * self.slot

    @property
    def _during_batch(self) -> int:
        return self.config.during_batch_tokens or self._batch

    def _run(self, phase: str, steps: int, *, lr: float, first: int) -> dict[str, Tensor]:
        """Fit the model in place and return its weights in fp32. `first` is the first slot of rows."""
        name = f"stage {self.stage.name}"
        logger.info(f"{name}: distillation {phase} training, {steps} steps, {format_count(steps * self._batch)} tokens")
        _drop_lines(self.work / FILE, phase)
        weights = self._masters()
        adam = torch.optim.Adam(list(weights.values()), lr=lr, betas=BETAS)
        teacher, count = self._teacher(), self._batch // self.slot
        with ExitStack() as stack:
            stop = stack.enter_context(catch_stop_signals(name))
            lines = stack.enter_context(JsonlLog(self.work / FILE))
            advance = stack.enter_context(long_bar(f"{name} attention distillation", steps))
            stack.enter_context(eval_mode(self.model))
            for step in range(1, steps + 1):
                began = time.perf_counter()
                now = lr * _lr_ratio(step, steps)
                slots = range(first + (step - 1) * count, first + step * count)
                loss, grads = self._gradient(teacher, self._batches(slots), self._batch)
                if not math.isfinite(loss):
                    key = "lr" if phase == "before" else "after_lr"
                    rate = f"stages.{self.stage.name}.attention_distillation.{key}"
                    raise UnspoolError(f"{name}: distillation step {step}: the loss is not finite; lower {rate}.")
                for key, weight in weights.items():
                    weight.grad = grads[key]
                adam.param_groups[0]["lr"] = now
                adam.step()
                self._set_parameters(weights)
                line = {"phase": phase, "step": step, "tokens": step * self._batch, "loss": loss, "lr": now}
                lines.append(json.dumps(line | {"seconds": round(time.perf_counter() - began, 4)}) + "\n")
                advance(1, f"attention KL {loss:.4f}")
                if stop.signal is not None:
                    logger.warning(
                        f"{name}: stopped by {stop.signal.name}; rerunning the same command restarts this distillation"
                    )
                    raise StoppedError(stop.signal)
        return {key: weight.detach() for key, weight in weights.items()}

    def _teacher(self) -> Any:
        teacher = self.load_teacher()
        if next(self.model.parameters()).dtype == torch.bfloat16:
            compute_in_bf16(teacher)
        return teacher.eval().requires_grad_(False)

    def _batches(self, slots: range) -> Iterator[Batch]:
        """Yield the rows of one step in micro-batches."""
        at_once = max(1, TOKENS_AT_ONCE // self.slot)
        for start in range(slots.start, slots.stop, at_once):
            picks = [pick for slot in slots[start - slots.start :][:at_once] for pick in self.mix.slot(slot)]
            yield build_batch([self.rows[name][index] for name, index in picks], attention=self.stage.attention)

    def _gradient(self, teacher: Any, batches: Iterator[Batch], tokens: int) -> tuple[float, dict[str, Tensor]]:
        """Compute loss and gradients of one step of `tokens` tokens."""
        device = next(self.model.parameters()).device
        total = torch.zeros((), dtype=torch.float64, device=device)
        sums = {
            name: torch.zeros_like(parameter, dtype=torch.float32)
            for layer in self.layers
            for name, parameter in layer.items()
        }
        for batch in batches:
            use = partial(self._add_layer, total, sums, batch.doc_lens, tokens)
            compare_layers(teacher, self.model, batch.to(device).model_inputs, use)
        return float(total), sums

    def _add_layer(
        self,
        total: Tensor,
        sums: dict[str, Tensor],
        doc_lens: tuple[int, ...],
        tokens: int,
        number: int,
        wanted: QueryKey,
        found: QueryKey,
    ) -> None:
        """Add one layer's loss and gradients: the mean over the step's queries and over heads."""
        share = 1 / (tokens * len(found.query))
        apart, *by = divergence(wanted, found, doc_lens)
        total += apart * share
        outputs, layer = (found.query, found.key), self.layers[number]
        pulls = [(one * share).to(output.dtype) for one, output in zip(by, outputs, strict=True)]
        grads = torch.autograd.grad(outputs, list(layer.values()), pulls)
        for name, grad in zip(layer, grads, strict=True):
            sums[name] += grad

    def _masters(self) -> dict[str, Tensor]:
        trained = dict(self.updater.named_masters())
        return {
            name: trained.get(name, parameter).detach().float().clone()
            for layer in self.layers
            for name, parameter in layer.items()
        }

    @torch.no_grad()
    def _set_parameters(self, weights: Mapping[str, Tensor]) -> None:
        for layer in self.layers:
            for name, parameter in layer.items():
                parameter.copy_(weights[name])

    @torch.no_grad()
    def _set_weights(self, weights: Mapping[str, Tensor]) -> None:
        self._set_parameters(weights)
        for name, master in self.updater.named_masters():
            if name in weights:
                master.copy_(weights[name])


def build_distillation(
    stage: StageConfig,
    model: Any,
    updater: Updater,
    rows: Mapping[str, RowSet],
    work: Path,
    *,
    seed: int,
    order: str,
    load_teacher: Callable[[], Any],
) -> AttentionDistillation | None:
    """Build the distillation of a stage; `order` and `seed` together seed the order of rows."""
    config = stage.attention_distillation
    if config is None:
        return None
    row_lens = {name: rows[name].row_len for name in config.shares}
    slot = max(row_lens.values())
    for key in ("batch_tokens", "during_batch_tokens"):
        batch = getattr(config, key)
        if batch and batch % slot:
            raise ConfigError(
                f"stage {stage.name}: attention_distillation.{key} {format_size(batch)} is not a multiple of the row "
                f"length {format_size(slot)}; change one of them."
            )
    sizes = {name: len(rows[name]) for name in row_lens}
    # Stage names contain no space, so this order differs from that of every mix. The word is a seed: do not change it.
    mix = Mix(config.shares, sizes, row_lens, slot, seed, f"{order} refit")
    with eval_mode(model):
        layers = fitted_parameters(model)
    trained = {name for name, _ in updater.named_masters()}
    if config.during and not any(name in trained for layer in layers for name in layer):
        raise ConfigError(
            f"stage {stage.name}: attention_distillation.during needs trained queries and keys, but lr_overrides sets "
            "them to 0; set an lr above 0, or remove during."
        )
    return AttentionDistillation(
        stage=stage,
        config=config,
        model=model,
        updater=updater,
        rows=rows,
        mix=mix,
        slot=slot,
        work=work,
        load_teacher=load_teacher,
        layers=layers,
    )


def _lr_ratio(step: int, steps: int) -> float:
    """Return learning rate ÷ peak: a short warm-up times a cosine that ends at 0."""
    return min(1.0, step / WARMUP_STEPS) * 0.5 * (1 + math.cos(math.pi * (step - 1) / steps))


def _drop_lines(path: Path, phase: str) -> None:
    """Drop lines of an earlier attempt, and truncated or damaged lines."""
    if path.is_file():
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        write_atomic(path, "".join(line for line in lines if _phase(line) not in (phase, None)))


def _phase(line: str) -> str | None:
    try:
        return str(json.loads(line)["phase"]) if line.endswith("\n") else None
    except (ValueError, KeyError, TypeError):
        return None
