"""The loss on rows that are not trained on, by position, while a stage trains.

In: a rows set that is not in the mix. Out: a line of `validation.jsonl`: the mean over tokens, and means by how many
tokens of its own document a token has before it.
Promise: the same rows each time, drawn by the seed; training is left as it was (looking.py). On several ranks all give
the same numbers: those that share rows compute their parts of them, the others the same rows once more.
Elsewhere: when (watch.py); scores of finished models (eval/).
"""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
from unspool.data.packing.row import IGNORE, position_ids
from unspool.data.packing.store import open_rows
from unspool.models.generation.generate import answer
from unspool.models.loss import bucket_means
from unspool.training.batch import Batch, build_batch
from unspool.training.config import StageConfig
from unspool.training.parallel.dtensor import computing_device, is_divided, part_again
from unspool.training.parallel.mesh import place_of
from unspool.training.parallel.split import part_of, split_batch
from unspool.training.step import batch_loss

logger = logging.getLogger(__name__)

# Using a model in the middle of its training, and leaving it as if nobody had.


@contextmanager
def looking_at(model: Any) -> Iterator[None]:
    """Evaluation mode, without gradients, in the precision of training."""
    device = computing_device(model)
    # Layers that are gathered from ranks come in the precision that they compute in.
    in_fp32 = next(model.parameters()).dtype == torch.float32 and not is_divided(model)
    modes = [(part, part.training) for part in model.modules()]
    kept = [(part, _state(part)) for part in model.modules() if next(part.buffers(recurse=False), None) is not None]
    is_cuda = device.type == "cuda"
    with (
        torch.no_grad(),
        torch.random.fork_rng([device] if is_cuda else []),
        torch.compiler.set_stance("force_eager"),
        # As in training, for weights in fp32; without its cache, where a later pass would find weights that were cast
        # without gradients.
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
            part_again(model)


def _state(part: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Plain attributes and buffers; rotary modules replace theirs when they meet a text of another length."""
    plain = {name: value for name, value in vars(part).items() if not name.startswith("_")}
    return plain, {name: (buffer, buffer.clone()) for name, buffer in part.named_buffers(recurse=False)}


def _restore(part: nn.Module, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
    plain, buffers = state
    vars(part).update(plain)
    for name, (buffer, content) in buffers.items():
        part._buffers[name] = buffer.copy_(content)


VALIDATION_FILE = "validation.jsonl"


@dataclass(frozen=True, kw_only=True)
class Validation:
    batches: Sequence[Batch]
    row_len: int
    mesh: DeviceMesh | None = None  # of several ranks, which all measure together

    def measure(self, model: Any) -> dict[str, Any]:
        """Mean loss and n over all tokens, and by bucket of positions."""
        device = computing_device(model)
        with looking_at(model):
            found = [_losses(model, batch, device, self.mesh) for batch in self.batches]
        losses = np.concatenate([losses for losses, _ in found])
        places = np.concatenate([places for _, places in found])
        mean = float(losses.mean()) if len(losses) else None
        return {"loss": mean, "n": len(losses), "buckets": bucket_means(losses, places, length=self.row_len)}


def _losses(model: Any, batch: Batch, device: torch.device, mesh: DeviceMesh | None) -> tuple[np.ndarray, np.ndarray]:
    """Of every token that is asked for: its loss, and its place in what it may look at."""
    found = _of_all_parts(model, batch, device, mesh) if mesh else batch_loss(model, batch.to(device))[1].double()
    losses = found.cpu().numpy()
    valid = (batch.labels != IGNORE).numpy()
    # The label at i is the token at i + 1.
    places = position_ids(np.array(batch.doc_lens)) + 1
    return losses[valid], places[valid]


def _of_all_parts(model: Any, batch: Batch, device: torch.device, mesh: DeviceMesh) -> Tensor:
    """The losses of a batch that some ranks compute part by part."""
    place = place_of(mesh)
    part = split_batch(batch, place.sequence_rank, place.sequence_ranks, ring=place.ring)
    _, own = batch_loss(model, part.to(device))
    whole = torch.zeros(len(part.tokens) * place.sequence_ranks, dtype=torch.float64, device=device)
    if place.data_rank == 0:
        mine = part_of(len(whole), place.sequence_rank, place.sequence_ranks, ring=place.ring)
        whole[mine.to(device)] = own.double()
    dist.all_reduce(whole)
    return whole[: len(batch.tokens)]


def build_validation(
    stage: StageConfig, folder: Path, model: Any, *, seed: int, mesh: DeviceMesh | None = None
) -> Validation:
    """The rows to look at, in batches of at most one context."""
    assert stage.validation is not None
    name, rows = stage.validation.dataset, open_rows(folder)
    if rows.row_len > stage.context_length:
        raise ConfigError(
            f"stage {stage.name}: validation rows {name} have {format_size(rows.row_len)} tokens, more than the "
            f"stage's context of {format_size(stage.context_length)}; make them shorter."
        )
    order = rng_for(seed, "validation", name).permutation(len(rows))[: stage.validation.samples]
    chosen = [rows[int(index)] for index in sorted(order)]
    vocabulary = len(model.get_input_embeddings().weight)
    if any(int(row.tokens.max()) >= vocabulary for row in chosen):
        raise ConfigError(
            f"stage {stage.name}: validation rows {name} hold tokens that the model does not know (its vocabulary has "
            f"{vocabulary}), such as knots; make them without utk."
        )
    at_once = max(1, stage.context_length // rows.row_len)
    groups = [chosen[start : start + at_once] for start in range(0, len(chosen), at_once)]
    batches = [build_batch(group, attention=stage.attention) for group in groups]
    return Validation(batches=batches, row_len=rows.row_len, mesh=mesh)


def warn_if_trained_on(stage: StageConfig, folder: Path, trained: Mapping[str, Path]) -> None:
    """Rows of another name may still be made of the same documents."""
    known = {digest for rows in trained.values() for digest in _corpora(rows).values()}
    shared = sorted(source for source, digest in _corpora(folder).items() if digest in known)
    if shared and stage.validation:
        logger.warning(
            f"stage {stage.name}: validation rows {stage.validation.dataset} are made from {', '.join(shared)}, "
            "which is "
            "trained on too; their loss may be that of text the model has seen"
        )


def _corpora(folder: Path) -> dict[str, Any]:
    """What a rows set is made of: hash of each corpus, by source."""
    inputs = (read_manifest(folder) or {}).get("inputs", {})
    return {key.removeprefix("corpus "): value for key, value in inputs.items() if key.startswith("corpus ")}


# What a model writes after some prompts, while it trains.


SAMPLES_FILE = "samples.jsonl"


@dataclass(frozen=True, kw_only=True)
class Samples:
    prompts: Sequence[str]
    prompt_ids: Sequence[np.ndarray]
    tokenizer: Any
    stop_ids: Collection[int]
    tokens: int

    def write(self, model: Any) -> list[dict[str, str]]:
        """`prompt` and `text` of each."""
        with looking_at(model):
            if is_divided(model):
                # FSDP makes room for whole layers in its first pass. Generating is done in inference mode, and what is
                # made there could not be trained with.
                model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=computing_device(model)), use_cache=False)
            written = [self._continue(model, ids) for ids in self.prompt_ids]
        return [{"prompt": prompt, "text": text} for prompt, text in zip(self.prompts, written, strict=True)]

    def _continue(self, model: Any, ids: np.ndarray) -> str:
        # All but the last token as context, which is read in chunks however long it is.
        (found,) = answer(model, ids[:-1], [ids[-1:]], max_new_tokens=self.tokens, stop_ids=self.stop_ids)
        text: str = self.tokenizer.decode(found, skip_special_tokens=True)
        return text


def build_samples(stage: StageConfig, model: Any, tokenizer: Any) -> Samples:
    assert stage.samples is not None
    prompt_ids = [np.array(tokenizer(prompt)["input_ids"], dtype=np.int64) for prompt in stage.samples.prompts]
    for prompt, ids in zip(stage.samples.prompts, prompt_ids, strict=True):
        if not len(ids) or len(ids) + stage.samples.tokens > stage.context_length:
            raise ConfigError(
                f"stage {stage.name}: the prompt {shown(prompt, 40)} of samples has {len(ids)} tokens, which with "
                f"{stage.samples.tokens} written after it do not fit 1 to {stage.context_length}; change it or "
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


def shown(text: str, most: int = 400) -> str:
    r"""On one line, with `\n` and `\x1b` for what a terminal would act upon."""
    escaped = "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)
    return escaped if len(escaped) <= most else escaped[: most - 1] + "…"
