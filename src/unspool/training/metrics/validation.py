"""Held-out loss by position, and continuations of prompts, while a stage trains.

Validation uses the same rows each time, drawn by the seed, and does not change training. All ranks get the same
numbers: ranks that share rows compute their parts, and data ranks compute the same rows redundantly.
"""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from unspool.core.artifacts import read_manifest
from unspool.core.errors import ConfigError
from unspool.core.rng import rng_for
from unspool.core.sizes import format_size
from unspool.data.packing.row import IGNORE, Row, position_ids
from unspool.data.packing.store import open_rows
from unspool.models.generation.greedy import answer
from unspool.models.loss import bucket_means
from unspool.training.batch import Batch, attended_by, build_batch, sequence_part, split_batch
from unspool.training.config import StageConfig
from unspool.training.parallel.apply import whole_rows
from unspool.training.parallel.dtensor import compute_device, is_sharded, reshard
from unspool.training.parallel.mesh import rank_coords
from unspool.training.step import batch_loss

logger = logging.getLogger(__name__)

VALIDATION, SAMPLES = "validation.jsonl", "samples.jsonl"


@contextmanager
def eval_mode(model: Any) -> Iterator[None]:
    """Inside the context, the model is in eval mode without gradients, in the precision of training."""
    device = compute_device(model)
    # FSDP gathers layers in their compute precision.
    in_fp32 = next(model.parameters()).dtype == torch.float32 and not is_sharded(model)
    modes = [(part, part.training) for part in model.modules()]
    kept = [(part, _state(part)) for part in model.modules() if next(part.buffers(recurse=False), None) is not None]
    is_cuda = device.type == "cuda"
    with (
        torch.no_grad(),
        torch.random.fork_rng([device] if is_cuda else []),
        torch.compiler.set_stance("force_eager"),
        # Autocast for fp32 weights, as in training. No autocast cache: training would reuse weights in it that were
        # cast without gradients.
        torch.autocast(device.type, torch.bfloat16, enabled=is_cuda and in_fp32, cache_enabled=False),
    ):
        model.eval()
        try:
            yield
        finally:
            for part, state in kept:
                _restore(part, state)
            for part, mode in modes:
                part.training = mode
            reshard(model)


def _state(part: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return plain attributes and buffers, which rotary modules replace for texts of another length."""
    plain = {name: value for name, value in vars(part).items() if not name.startswith("_")}
    return plain, {name: (buffer, buffer.clone()) for name, buffer in part.named_buffers(recurse=False)}


def _restore(part: nn.Module, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
    plain, buffers = state
    vars(part).update(plain)
    for name, (buffer, content) in buffers.items():
        part._buffers[name] = buffer.copy_(content)


@dataclass(frozen=True, kw_only=True)
class Validation:
    batches: Sequence[Batch]
    row_len: int
    mesh: DeviceMesh | None = None  # mesh of several ranks, which measure together

    def measure(self, model: Any) -> dict[str, Any]:
        """Return the mean loss and n over all tokens, and by bucket of positions."""
        device = compute_device(model)
        with eval_mode(model):
            # All batches are queued before the host waits for the first.
            computed = [_losses(model, batch, device, self.mesh) for batch in self.batches]
            found = [_valid(losses.cpu().numpy(), batch) for losses, batch in zip(computed, self.batches, strict=True)]
        losses = np.concatenate([losses for losses, _ in found])
        positions = np.concatenate([positions for _, positions in found])
        mean = float(losses.mean()) if len(losses) else None
        return {"loss": mean, "n": len(losses), "buckets": bucket_means(losses, positions, length=self.row_len)}


def _losses(model: Any, batch: Batch, device: torch.device, mesh: DeviceMesh | None) -> Tensor:
    return _gather_losses(model, batch, device, mesh) if mesh else batch_loss(model, batch.to(device))[1].double()


def _valid(losses: np.ndarray, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Return loss and position of every token that carries loss."""
    valid = (batch.shift_labels != IGNORE).numpy()
    # The label at i is the token at i + 1.
    positions = position_ids(np.array(batch.doc_lens)) + 1
    return losses[valid], positions[valid]


def _gather_losses(model: Any, batch: Batch, device: torch.device, mesh: DeviceMesh) -> Tensor:
    """Gather the losses of a batch whose parts are computed by sequence ranks."""
    coords = rank_coords(mesh)
    part = split_batch(batch, coords.sequence_rank, coords.sequence_ranks, ring=coords.ring)
    _, own = batch_loss(model, part.to(device))
    full = torch.zeros(len(part.tokens) * coords.sequence_ranks, dtype=torch.float64, device=device)
    if coords.data_rank == 0:
        own_indices = sequence_part(len(full), coords.sequence_rank, coords.sequence_ranks, ring=coords.ring)
        full[own_indices.to(device)] = own.double()
    dist.all_reduce(full)
    return full[: len(batch.tokens)]


def build_validation(
    stage: StageConfig, folder: Path, model: Any, *, seed: int, mesh: DeviceMesh | None = None
) -> Validation:
    """Draw the validation rows, in batches of at most one context length."""
    assert stage.validation is not None
    name, rows = stage.validation.dataset, open_rows(folder)
    if rows.row_len > stage.context_length:
        raise ConfigError(
            f"stage {stage.name}: validation.dataset {name} has rows of {format_size(rows.row_len)}, longer than "
            f"context_length {format_size(stage.context_length)}; use a smaller seq_len."
        )
    order = rng_for(seed, "validation", name).permutation(len(rows))[: stage.validation.samples]
    chosen = [rows[int(index)] for index in sorted(order)]
    vocabulary = len(model.get_input_embeddings().weight)
    if any(int(row.tokens.max()) >= vocabulary for row in chosen):
        raise ConfigError(
            f"stage {stage.name}: validation.dataset {name} has tokens outside the model's vocabulary of "
            f"{vocabulary}, such as the special tokens of utk; pack it without utk."
        )
    if mesh is not None and rank_coords(mesh).ring > 1:
        # A ring can only compute one document at a time.
        chosen = [document for row in chosen for document in _documents(row, stage.attention)]
        at_once = 1
    else:
        at_once = max(1, stage.context_length // rows.row_len)
    groups = [chosen[start : start + at_once] for start in range(0, len(chosen), at_once)]
    batches = [build_batch(group, attention=stage.attention) for group in groups]
    if compute_device(model).type == "cuda":
        batches = [batch.pinned() for batch in batches]
    return Validation(batches=batches, row_len=rows.row_len, mesh=mesh)


def _documents(row: Row, attention: str) -> Iterator[Row]:
    """Split a row into rows, one for each span that attends to itself."""
    begin, docs = 0, row.doc_lens
    for span in attended_by(row, attention).tolist():
        own = slice(begin, begin + span)
        count = int(np.searchsorted(np.cumsum(docs), span)) + 1
        yield replace(
            row,
            tokens=row.tokens[own],
            doc_lens=docs[:count],
            loss_mask=None if row.loss_mask is None else row.loss_mask[own],
            chunk_ids=None,
            positions=None if row.positions is None else row.positions[own],
        )
        begin, docs = begin + span, docs[count:]


def warn_if_trained_on(stage: StageConfig, folder: Path, trained: Mapping[str, Path]) -> None:
    """Warn if the validation dataset is packed from a training corpus."""
    known = {digest for rows in trained.values() for digest in _corpora(rows).values()}
    shared = sorted(source for source, digest in _corpora(folder).items() if digest in known)
    if shared and stage.validation:
        logger.warning(
            f"stage {stage.name}: validation.dataset {stage.validation.dataset} is packed from {', '.join(shared)}, "
            "which the stage also trains on; its loss may include training text"
        )


def _corpora(folder: Path) -> dict[str, Any]:
    """Return the hashes of the corpora that a dataset is packed from, by source."""
    inputs = (read_manifest(folder) or {}).get("inputs", {})
    return {key.removeprefix("corpus "): value for key, value in inputs.items() if key.startswith("corpus ")}


@dataclass(frozen=True, kw_only=True)
class Samples:
    prompts: Sequence[str]
    prompt_ids: Sequence[np.ndarray]
    tokenizer: Any
    stop_ids: Collection[int]
    tokens: int

    def write(self, model: Any) -> list[dict[str, str]]:
        """Generate a continuation of each prompt; return its `prompt` and `text`."""
        with eval_mode(model), whole_rows(model):
            if is_sharded(model):
                # FSDP allocates gathered layers in its first pass. Generation runs in inference mode, whose tensors
                # cannot be used in training.
                model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=compute_device(model)), use_cache=False)
            written = [self._continue(model, ids) for ids in self.prompt_ids]
        return [{"prompt": prompt, "text": text} for prompt, text in zip(self.prompts, written, strict=True)]

    def _continue(self, model: Any, ids: np.ndarray) -> str:
        # All tokens but the last are context, which is prefilled in chunks.
        (found,) = answer(model, ids[:-1], [ids[-1:]], max_new_tokens=self.tokens, stop_ids=self.stop_ids)
        text: str = self.tokenizer.decode(found, skip_special_tokens=True)
        return text


def build_samples(stage: StageConfig, model: Any, tokenizer: Any) -> Samples:
    assert stage.samples is not None
    prompt_ids = [np.array(tokenizer(prompt)["input_ids"], dtype=np.int64) for prompt in stage.samples.prompts]
    for prompt, ids in zip(stage.samples.prompts, prompt_ids, strict=True):
        if not len(ids) or len(ids) + stage.samples.tokens > stage.context_length:
            raise ConfigError(
                f"stage {stage.name}: the sample prompt {escape(prompt, 40)} has {len(ids)} tokens; with "
                f"{stage.samples.tokens} generated ones it must have 1 to {stage.context_length}; change it or "
                "samples.tokens."
            )
    ends = model.generation_config.eos_token_id
    stops = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id} - {None}
    return Samples(
        prompts=stage.samples.prompts,
        prompt_ids=prompt_ids,
        tokenizer=tokenizer,
        stop_ids=stops,
        tokens=stage.samples.tokens,
    )


def escape(text: str, most: int = 400) -> str:
    r"""Return the text on one line, with escapes such as `\n` and `\x1b` for control characters."""
    escaped = "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)
    return escaped if len(escaped) <= most else escaped[: most - 1] + "…"
