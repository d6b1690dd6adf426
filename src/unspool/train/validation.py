"""The loss on rows that are not trained on, by position, while a stage trains.

In: a rows set that is not in the mix. Out: a line of `validation.jsonl`: the mean over tokens, and means by how many
tokens of its own document a token has before it.
Promise: the same rows each time, drawn by the seed; training is left as it was (looking.py). On several ranks all give
the same numbers: those that share rows compute their parts of them, the others the same rows once more.
Elsewhere: when (watch.py); scores of finished models (eval/).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from unspool.base.artefact import read_manifest
from unspool.base.errors import ConfigError
from unspool.base.progress import say
from unspool.base.rng import rng_for
from unspool.base.sizes import format_size
from unspool.data.labels import IGNORE, position_ids
from unspool.data.store import open_rows
from unspool.model.buckets import bucket_means
from unspool.train.batch import Batch, build_batch
from unspool.train.config import StageConfig
from unspool.train.divided import computing_device
from unspool.train.forward import batch_loss
from unspool.train.looking import looking_at
from unspool.train.mesh import place_of
from unspool.train.split import part_of, split_batch

FILE = "validation.jsonl"


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
    name, rows = stage.validation.rows, open_rows(folder)
    if rows.row_len > stage.context:
        raise ConfigError(
            f"stage {stage.name}: validation rows {name} have {format_size(rows.row_len)} tokens, more than the "
            f"stage's context of {format_size(stage.context)}; make them shorter."
        )
    order = rng_for(seed, "validation", name).permutation(len(rows))[: stage.validation.samples]
    chosen = [rows[int(index)] for index in sorted(order)]
    vocabulary = len(model.get_input_embeddings().weight)
    if any(int(row.tokens.max()) >= vocabulary for row in chosen):
        raise ConfigError(
            f"stage {stage.name}: validation rows {name} hold tokens that the model does not know (its vocabulary has "
            f"{vocabulary}), such as knots; make them without tangle."
        )
    at_once = max(1, stage.context // rows.row_len)
    groups = [chosen[start : start + at_once] for start in range(0, len(chosen), at_once)]
    batches = [build_batch(group, attention=stage.attention) for group in groups]
    return Validation(batches=batches, row_len=rows.row_len, mesh=mesh)


def warn_if_trained_on(stage: StageConfig, folder: Path, trained: Mapping[str, Path]) -> None:
    """Rows of another name may still be made of the same documents."""
    known = {digest for rows in trained.values() for digest in _corpora(rows).values()}
    shared = sorted(source for source, digest in _corpora(folder).items() if digest in known)
    if shared and stage.validation:
        say(
            f"stage {stage.name}: validation rows {stage.validation.rows} are made from {', '.join(shared)}, which is "
            "trained on too; their loss may be that of text the model has seen"
        )


def _corpora(folder: Path) -> dict[str, Any]:
    """What a rows set is made of: hash of each corpus, by source."""
    inputs = (read_manifest(folder) or {}).get("inputs", {})
    return {key.removeprefix("corpus "): value for key, value in inputs.items() if key.startswith("corpus ")}
