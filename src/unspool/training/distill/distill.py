"""Queries and keys, fitted so that each layer attends as it did before its positions were changed.

In: the model of a stage, the model that the stage starts from, rows within that one's context. Out: the same model
with other queries and keys; `attention_distillation.jsonl`. Beside training (`during`) it only adds to the
gradients of training's own steps, so that queries and keys learn what is new and keep what was at once.
Per step: one pass of the untouched model (the teacher); each layer of the student gets the teacher's own input of that
layer and is moved towards the teacher's attention (KL, mean over heads and queries, summed over layers). So there is no
backward pass through depth, and neither MLPs nor the head take part.
Promise: a function of weights, rows and seed alone: done again after a kill, it ends with the same bits. Moments of
training and random generators are left as they are.
Price: the teacher beside the model while it lasts; of the parameters that are fitted, an fp32 copy and two moments.
Elsewhere: the distance and the layers (layers.py), what a recipe may say (training/config.py).
"""

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from unspool.core.artifacts import write_atomic
from unspool.core.errors import ConfigError, UnspoolError
from unspool.core.progress import long_bar
from unspool.core.sizes import format_count, format_size
from unspool.data.mixture import Mix
from unspool.data.packing.store import RowSet
from unspool.models.config import NewModel, original_context
from unspool.models.fuse import compute_in_bf16
from unspool.training.batch import Batch, build_batch
from unspool.training.config import ROWS_PER_STEP, AttentionDistillationConfig, StageConfig
from unspool.training.distill.layers import Attended, compare_layers, divergence, fitted_parameters
from unspool.training.interrupt import StoppedError, listen
from unspool.training.metrics.logger import GrowingFile
from unspool.training.metrics.validation import looking_at
from unspool.training.optim.base import Updater

logger = logging.getLogger(__name__)

# Called with the number of a step of training.
AuxLoss = Callable[[int], float]

FILE = "attention_distillation.jsonl"
# What the steps before training made, in the work folder: a stage that goes on need not make it again.
WEIGHTS = "attention_distillation.safetensors"
BETAS = (0.9, 0.95)
WARMUP_STEPS = 4
# Tokens that the teacher reads in one pass; one row, if that is longer.
TOKENS_AT_ONCE = 1 << 14


def check_refit(
    stage: StageConfig, model: str | NewModel | None, row_lens: Mapping[str, int], *, world_size: int
) -> None:
    """Refuse what cannot be, before any work; `model` is what the stage starts from, None while that is not there."""
    if stage.attention_distillation is None:
        return
    if world_size > 1:
        raise ConfigError(
            f"stage {stage.name}: attention_distillation is not supported on several ranks (here {world_size}) yet; "
            "run the stage on "
            "one, or leave attention_distillation out."
        )
    if stage.attention_distillation.during and stage.optimizer.step == "in-backward":
        raise ConfigError(
            f"stage {stage.name}: attention_distillation.during adds to gradients that optimizer.step in-backward "
            "has used already; set "
            "that to after, or leave during out."
        )
    if isinstance(model, NewModel):
        raise ConfigError(
            f"stage {stage.name}: attention_distillation keeps what a model attends to, and a new model attends to "
            "nothing yet; leave "
            "attention_distillation out of its first stage."
        )
    if model is None:
        return
    own = original_context(model)
    for name, length in row_lens.items():
        if length > own:
            raise ConfigError(
                f"stage {stage.name}: attention_distillation.datasets {name} have {format_size(length)} tokens, and "
                "the model that the "
                f"stage starts from has a context of {format_size(own)}; use rows of at most {format_size(own)}."
            )


@dataclass(frozen=True, kw_only=True)
class AttentionDistillation:
    """Before, during and after the training of one stage."""

    stage: StageConfig
    config: AttentionDistillationConfig
    model: Any
    updater: Updater
    rows: Mapping[str, RowSet]
    mix: Mix  # in slots of the longest rows
    slot: int  # tokens
    work: Path
    load_teacher: Callable[[], Any]
    layers: list[dict[str, nn.Parameter]]  # what is fitted

    def before(self) -> None:
        """Unless it is done: then what it made is taken. Before a checkpoint is, which may hold what came of it."""
        if not self.config.before:
            return
        kept = _read(self.work / WEIGHTS)
        if kept is None:
            kept = self._run("before", self.config.before, lr=self.config.lr_before, first=0)
            aside = self.work / f"{WEIGHTS}.partial"
            save_file({name: weight.cpu().contiguous() for name, weight in kept.items()}, aside)
            aside.replace(self.work / WEIGHTS)
        self._set(kept)

    def during(self) -> AuxLoss | None:
        """What adds this distance's gradient to a step of training, and returns the distance; None if nothing does."""
        if not self.config.during:
            return None
        teacher, weight = self._teacher(), self.config.during
        first, batch = self.config.before * (self._batch // self.slot), self._during_batch
        count = batch // self.slot

        def add(step: int) -> float:
            slots = range(first + (step - 1) * count, first + step * count)
            with looking_at(self.model):
                loss, grads = self._gradient(teacher, self._batches(slots), batch)
            self.updater.add({name: grad * weight for name, grad in grads.items()})
            return loss

        return add

    def after(self) -> None:
        """From the weights of the last step of training."""
        if self.config.after:
            first = self.config.before * self._batch
            first += self.stage.steps * self._during_batch if self.config.during else 0
            self._set(self._run("after", self.config.after, lr=self.config.lr_after, first=first // self.slot))

    @property
    def _batch(self) -> int:
        return self.config.batch_tokens or ROWS_PER_STEP * self.slot

    @property
    def _during_batch(self) -> int:
        return self.config.during_batch_tokens or self._batch

    def _run(self, phase: str, steps: int, *, lr: float, first: int) -> dict[str, Tensor]:
        """The fitted weights in fp32, which the model already computes with; `first` is the first slot of rows."""
        name = f"stage {self.stage.name}"
        logger.info(f"{name}: distillation {phase} training, {steps} steps, {format_count(steps * self._batch)} tokens")
        _drop_lines(self.work / FILE, phase)
        weights = self._masters()
        adam = torch.optim.Adam(list(weights.values()), lr=lr, betas=BETAS)
        teacher, count = self._teacher(), self._batch // self.slot
        with ExitStack() as stack:
            stop = stack.enter_context(listen(name))
            lines = stack.enter_context(GrowingFile(self.work / FILE))
            advance = stack.enter_context(long_bar(f"{name} attention distillation", steps))
            stack.enter_context(looking_at(self.model))
            for step in range(1, steps + 1):
                began = time.perf_counter()
                now = lr * _share(step, steps)
                slots = range(first + (step - 1) * count, first + step * count)
                loss, grads = self._gradient(teacher, self._batches(slots), self._batch)
                if not math.isfinite(loss):
                    key = "lr" if phase == "before" else "after_lr"
                    rate = f"stages.{self.stage.name}.attention_distillation.{key}"
                    raise UnspoolError(f"{name}: distillation step {step}: the loss is not a number; lower {rate}.")
                for key, weight in weights.items():
                    weight.grad = grads[key]
                adam.param_groups[0]["lr"] = now
                adam.step()
                self._show(weights)
                line = {"phase": phase, "step": step, "tokens": step * self._batch, "loss": loss, "lr": now}
                lines.append(json.dumps(line | {"seconds": round(time.perf_counter() - began, 4)}) + "\n")
                advance(1, f"attention KL {loss:.4f}")
                if stop.signal is not None:
                    logger.warning(
                        f"{name}: stopped by {stop.signal.name}; the same command begins this distillation anew"
                    )
                    raise StoppedError(stop.signal)
        return {key: weight.detach() for key, weight in weights.items()}

    def _teacher(self) -> Any:
        teacher = self.load_teacher()
        if next(self.model.parameters()).dtype == torch.bfloat16:
            compute_in_bf16(teacher)
        return teacher.eval().requires_grad_(False)

    def _batches(self, slots: range) -> Iterator[Batch]:
        """The rows of one step, some at a time."""
        at_once = max(1, TOKENS_AT_ONCE // self.slot)
        for start in range(slots.start, slots.stop, at_once):
            picks = [pick for slot in slots[start - slots.start :][:at_once] for pick in self.mix.slot(slot)]
            yield build_batch([self.rows[name][index] for name, index in picks], attention=self.stage.attention)

    def _gradient(self, teacher: Any, batches: Iterator[Batch], tokens: int) -> tuple[float, dict[str, Tensor]]:
        """`tokens`: of the whole step."""
        device = next(self.model.parameters()).device
        total = torch.zeros((), dtype=torch.float64, device=device)
        sums = {
            name: torch.zeros_like(parameter, dtype=torch.float32)
            for layer in self.layers
            for name, parameter in layer.items()
        }
        for batch in batches:
            use = partial(self._add, total, sums, batch.doc_lens, tokens)
            compare_layers(teacher, self.model, batch.to(device).model_inputs, use)
        return float(total), sums

    def _add(
        self,
        total: Tensor,
        sums: dict[str, Tensor],
        doc_lens: tuple[int, ...],
        tokens: int,
        number: int,
        wanted: Attended,
        found: Attended,
    ) -> None:
        """One layer's part of a step's loss and gradients: the mean over the step's queries, and over heads."""
        share = 1 / (tokens * len(found.query))
        apart, *by = divergence(wanted, found, doc_lens)
        total += apart * share
        outputs, layer = (found.query, found.key), self.layers[number]
        pulls = [(one * share).to(output.dtype) for one, output in zip(by, outputs, strict=True)]
        grads = torch.autograd.grad(outputs, list(layer.values()), pulls)
        for name, grad in zip(layer, grads, strict=True):
            sums[name] += grad

    # The weights: those that training updates, in fp32, and those that the model computes with

    def _masters(self) -> dict[str, Tensor]:
        trained = dict(self.updater.named_masters())
        return {
            name: trained.get(name, parameter).detach().float().clone()
            for layer in self.layers
            for name, parameter in layer.items()
        }

    @torch.no_grad()
    def _show(self, weights: Mapping[str, Tensor]) -> None:
        for layer in self.layers:
            for name, parameter in layer.items():
                parameter.copy_(weights[name])

    @torch.no_grad()
    def _set(self, weights: Mapping[str, Tensor]) -> None:
        self._show(weights)
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
    """`order` names the stage where its rows are to come in another order than those of other stages."""
    if stage.attention_distillation is None:
        return None
    row_lens = {name: rows[name].row_len for name in stage.attention_distillation.shares}
    slot = max(row_lens.values())
    for key, batch in (
        ("batch_tokens", stage.attention_distillation.batch_tokens),
        ("during_batch_tokens", stage.attention_distillation.during_batch_tokens),
    ):
        if batch and batch % slot:
            raise ConfigError(
                f"stage {stage.name}: attention_distillation.{key} {format_size(batch)} is not a multiple of its "
                "rows' length of "
                f"{format_size(slot)}; change one of them."
            )
    sizes = {name: len(rows[name]) for name in row_lens}
    # No stage's name holds a space, so this is the order of no mix. The word seeds the order: it stays as it is.
    mix = Mix(stage.attention_distillation.shares, sizes, row_lens, slot, seed, f"{order} refit")
    with looking_at(model):
        layers = fitted_parameters(model)
    trained = {name for name, _ in updater.named_masters()}
    if stage.attention_distillation.during and not any(name in trained for layer in layers for name in layer):
        raise ConfigError(
            f"stage {stage.name}: attention_distillation.during works through training's own steps, and lr_overrides "
            "sets queries and keys to "
            "0; give them a rate, or leave during out."
        )
    return AttentionDistillation(
        stage=stage,
        config=stage.attention_distillation,
        model=model,
        updater=updater,
        rows=rows,
        mix=mix,
        slot=slot,
        work=work,
        load_teacher=load_teacher,
        layers=layers,
    )


def _share(step: int, steps: int) -> float:
    """Of the highest rate: a short warm-up under a cosine that ends at 0."""
    return min(1.0, step / WARMUP_STEPS) * 0.5 * (1 + math.cos(math.pi * (step - 1) / steps))


def _read(path: Path) -> dict[str, Tensor] | None:
    try:
        return load_file(path) if path.is_file() else None
    except SafetensorError:  # cut short by a machine that went down: it is made again
        return None


def _drop_lines(path: Path, phase: str) -> None:
    """Lines of an earlier try, and one that a kill cut short."""
    if path.is_file():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]
        write_atomic(path, "".join(line for line in whole if json.loads(line)["phase"] != phase))
