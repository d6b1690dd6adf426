"""Run a user's step and record what the model computes: inputs, hidden states and gradients.

The step may be any code that computes gradients, with or without an optimizer. Weights are restored afterwards.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from unspool.core.errors import ConfigError, UnspoolError
from unspool.models.location import first_line
from unspool.verification.audits.spans import Batch, token_ids

# Computes one optimizer step over these micro-batches. May return its loss.
StepFn = Callable[[Any, list[Any]], Any]
CONTRACT = (
    "step_fn(model, micro_batches) gets a list of micro-batches (dicts) and may return the loss; "
    "`unspool -v audit` shows the traceback"
)


@dataclass(kw_only=True)
class Pass:
    """Record of one forward pass of the model, [B, T, …]."""

    tokens: Tensor
    positions: Tensor | None = None  # input of the rotary module
    tables: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  # (cos, sin) by layer type; "" if only one
    hidden: Tensor  # output of the last layer
    is_coarse: bool = False  # computed in lower precision than fp32
    hidden_grad: Tensor | None = None  # None: the loss does not depend on this pass


@dataclass(kw_only=True)
class StepRun:
    passes: list[Pass]
    loss: float | None  # what the step returned
    grads: dict[str, Tensor]  # at the first optimizer update, else at the end
    num_updates: int  # calls of an optimizer's `step`


def unwrap(model: Any) -> Any:
    """The `transformers` model inside DDP, PEFT or a compiled model."""
    for name in ("module", "_orig_mod"):
        while isinstance(getattr(model, name, None), nn.Module):
            model = getattr(model, name)
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    if not all(hasattr(model, name) for name in ("base_model", "get_output_embeddings", "config")):
        raise ConfigError(
            f"audit: {type(model).__name__} is not a causal language model of transformers; pass the model itself."
        )
    return model


def run_step(model: Any, step_fn: StepFn, batches: Sequence[Batch], *, probe: str) -> StepRun:
    """Run one step with fixed random numbers on copies of `batches`, because trainers modify batches.

    Errors in the step become a ConfigError that names the `probe`.
    """
    saved = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    was_training = model.training
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(without_dropout(model))
        torch.manual_seed(0)
        model.zero_grad(set_to_none=True)
        passes = stack.enter_context(_record(model, [token_ids(batch) for batch in batches]))
        updates = stack.enter_context(_record_updates(model))
        own = copy.deepcopy(list(batches))
        try:
            found = step_fn(model, own)
        except UnspoolError:
            raise
        except Exception as error:  # any type: this is the user's code
            raise ConfigError(
                f"audit: the training step raised {_describe(error)} (probe: {probe}); {CONTRACT}."
            ) from error
    grads = updates[0] if updates else _gradients(model)
    model.zero_grad(set_to_none=True)
    model.train(was_training)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(saved[name])
    try:
        loss = None if found is None else float(found)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = type(found).__name__
        raise ConfigError(
            f"audit: the training step returned a {kind}; return the loss as one number, or nothing."
        ) from error
    return StepRun(passes=passes, loss=loss, grads=grads, num_updates=len(updates))


def _describe(error: Exception) -> str:
    """Type and text of an error. Of a long text, such as one that begins with the model, the first and last line."""
    text, kind, lines = first_line(error), type(error).__name__, str(error).strip().splitlines()
    if len(lines) > 2:
        text = f"{lines[0]} … {lines[-1].strip()}"
    return text if text.startswith(kind) else f"{kind}: {text}"


def _gradients(model: Any) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
            found[name] = grad.detach().clone()
    return found


@contextmanager
def _record_updates(model: Any) -> Iterator[list[dict[str, Tensor]]]:
    """Record gradients whenever an optimizer of this model updates weights."""
    own = {id(parameter) for parameter in model.parameters()}
    found: list[dict[str, Tensor]] = []

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            found.append(_gradients(model))

    handle = register_optimizer_step_pre_hook(before)
    try:
        yield found
    finally:
        handle.remove()


@contextmanager
def _record(model: Any, batch_tokens: Sequence[Tensor]) -> Iterator[list[Pass]]:
    """Record passes with gradients. If the model gets embeddings, take the tokens from the current micro-batch."""
    backbone = model.base_model
    passes: list[Pass] = []
    current: dict[str, Any] = {"tables": {}, "positions": None}

    def note_tables(_: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        positions = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
        layer_type = kwargs.get("layer_type", args[2] if len(args) > 2 else None)
        current["positions"] = positions
        if isinstance(out, tuple) and len(out) == 2 and all(isinstance(table, Tensor) for table in out):
            current["tables"][layer_type or ""] = tuple(table.detach() for table in out)

    def note_pass(_: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        hidden = out[0] if isinstance(out, tuple) else out.last_hidden_state
        tokens = kwargs.get("input_ids", args[0] if args else None)
        if tokens is None:
            tokens = batch_tokens[min(len(passes), len(batch_tokens) - 1)]
        seen = Pass(
            tokens=tokens,
            positions=current["positions"],
            tables=current["tables"],
            hidden=hidden.detach(),
            is_coarse=hidden.dtype != torch.float32 or torch.is_autocast_enabled(hidden.device.type),
        )
        current.update(tables={}, positions=None)
        if hidden.requires_grad:
            passes.append(seen)

            def note_grad(grad: Tensor) -> None:
                seen.hidden_grad = grad.detach().clone()

            hidden.register_hook(note_grad)

    rotary = getattr(backbone, "rotary_emb", None)
    handles = [backbone.register_forward_hook(note_pass, with_kwargs=True)]
    if rotary is not None:
        handles.append(rotary.register_forward_hook(note_tables, with_kwargs=True))
    try:
        yield passes
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def without_dropout(model: Any) -> Iterator[None]:
    changed = []
    for module in model.modules():
        for name in ("p", "attention_dropout"):
            value = getattr(module, name, None)
            if isinstance(value, float) and value > 0 and (name != "p" or isinstance(module, nn.Dropout)):
                changed.append((module, name, value))
                setattr(module, name, 0.0)
    try:
        yield
    finally:
        for module, name, value in changed:
            setattr(module, name, value)
