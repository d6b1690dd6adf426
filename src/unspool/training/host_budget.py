"""The host memory of a stage: its needs, the available memory, and settings that are reduced or refused.

The ranks of a machine share its memory, and all ranks make the same decision. The number of layers with kept results is
reduced until they fit, because other layers can be recomputed. Anything else that does not fit is refused before a
weight is loaded. Otherwise the system would kill the process later, without a message.
"""

import logging
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname
from typing import Any

from unspool.core.errors import ConfigError
from unspool.core.host_memory import HostMemory, measure_host_memory
from unspool.models.config import NewModel
from unspool.models.memory.host_bytes import LayerWidths, activation_bytes, with_fewer_kept, with_larger_groups
from unspool.models.weight_files import read_header, weight_files
from unspool.training.config import StageConfig
from unspool.training.optim.base import BF16_BYTES, FP32_BYTES
from unspool.training.parallel.mesh import DistContext, gather_on_leader

logger = logging.getLogger(__name__)

GIB = 1 << 30

# Share of the available memory that a stage may use; the rest is for the file cache, checkpoints and other programs.
SHARE = 0.9
# Bytes of the process itself, with CUDA's libraries and context.
PROCESS_BYTES = 3 << 30


@dataclass(frozen=True, kw_only=True)
class HostRoom:
    """One rank's share of its machine's memory: the smallest share of all ranks."""

    available: int
    total: int
    owner: str
    ranks: int  # ranks that share the machine

    def bytes(self, *, process: int = 0) -> float:
        """Bytes for the tensors of one rank, besides `process` bytes for the process itself."""
        return SHARE * self.available / self.ranks - process

    def __str__(self) -> str:
        shared = f", shared by {self.ranks} ranks" if self.ranks > 1 else ""
        return f"{self.owner} has {_gib(self.available)} of {_gib(self.total)} available{shared}"


@dataclass(frozen=True, kw_only=True)
class HostNeeds:
    """Bytes of host memory that one rank needs, besides activations."""

    loading: int  # the model in fp32 while it is loaded
    states: int  # weights, gradients and optimizer state in host memory


def measure_room(dist_context: DistContext) -> HostRoom | None:
    """Measure every rank's memory before loading; the result is the same on all ranks. None if unknown."""
    found = gather_on_leader(dist_context.ranks, _own_facts(measure_host_memory()))
    chosen = dist_context.from_leader(lambda: smallest_share(found))
    return HostRoom(**chosen) if chosen is not None else None


def _own_facts(memory: HostMemory | None) -> list[Any] | None:
    return None if memory is None else [gethostname(), memory.available, memory.total, memory.owner]


def smallest_share(facts: list[list[Any] | None]) -> dict[str, Any] | None:
    """Return the measurement with the least memory per rank of its machine."""
    known = [fact for fact in facts if fact is not None]
    on_host = Counter(host for host, *_ in known)
    shares = [
        {"available": available, "total": total, "owner": owner, "ranks": on_host[host]}
        for host, available, total, owner in known
    ]
    return min(shares, key=lambda one: one["available"] / one["ranks"], default=None)


def count_params(model: str | NewModel) -> int:
    """Count parameters by the headers of a folder's weight files; 0 if the folder does not exist."""
    if isinstance(model, NewModel) or not Path(model).is_dir():
        return 0
    headers = (read_header(path) for path in set(weight_files(Path(model)).values()))
    return sum(math.prod(entry["shape"]) for header in headers for entry in header.values())


def stage_needs(stage: StageConfig, num_params: int, *, num_shards: int, loads_full: bool, on_cuda: bool) -> HostNeeds:
    """Return the needs of a stage; `num_shards` ranks share weights, gradients and optimizer state."""
    states = num_params * (2 * FP32_BYTES + stage.optimizer.state_bytes()) / num_shards
    on_host = not on_cuda or (stage.parallel.offload and num_shards > 1)
    return HostNeeds(loading=FP32_BYTES * num_params if loads_full else 0, states=int(states) if on_host else 0)


def fit_stage(
    stage: StageConfig, widths: LayerWidths, needs: HostNeeds, room: HostRoom, *, tokens: int, on_cuda: bool
) -> tuple[StageConfig, str | None]:
    """Return the stage with settings that fit, and a sentence about reduced settings; ConfigError if nothing fits.

    `tokens` is the number of tokens of one rank in one micro-batch.
    """
    element = BF16_BYTES if on_cuda else FP32_BYTES
    free = room.bytes(process=PROCESS_BYTES if on_cuda else 0)
    if needs.loading > free or needs.states > free:
        by_size = {needs.loading: "loading the model takes", needs.states: "weights and optimizer state take"}
        raise ConfigError(
            f"stage {stage.name}: {by_size[max(by_size)]} {_gib(max(by_size))} of host memory per rank, and {room}; "
            "use fewer ranks per machine, a machine with more memory, or a smaller model."
        )
    policy, left = stage.memory, free - needs.states
    needed = activation_bytes(policy, widths, tokens, element_bytes=element)
    if needed <= left:
        return stage, None
    asked = f"stage {stage.name}: activations take {_gib(needed)} of host memory per rank, and {room}"
    fewer = with_fewer_kept(policy, widths, tokens, room=left, element_bytes=element)
    if fewer is not None:
        now = _gib(activation_bytes(fewer, widths, tokens, element_bytes=element))
        return stage.model_copy(update=vars(fewer)), (
            f"{asked}; continuing with keep_products {fewer.keep_products} and keep_on_host {fewer.keep_on_host} "
            f"instead of {policy.keep_products} and {policy.keep_on_host} ({now}), which recomputes more"
        )
    larger = with_larger_groups(policy, widths, tokens, room=left, element_bytes=element)
    advice = "use offload: false, a shorter context_length, or more GPUs per row"
    if larger is not None:
        now = _gib(activation_bytes(larger, widths, tokens, element_bytes=element))
        without = " and keep_products: 0" if policy.keep_products else ""
        advice = (
            f"set layers_per_checkpoint: {larger.layers_per_checkpoint}{without} ({now}; needs more device memory), "
            "or use offload: false, a shorter context_length, or more GPUs per row"
        )
    raise ConfigError(f"{asked}; {advice}.")


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def settle_host_memory(
    stage: StageConfig,
    model: str | NewModel,
    values: dict[str, Any],
    dist_context: DistContext,
    *,
    sequence_ranks: int,
    num_shards: int,
    loads_full: bool,
) -> StageConfig:
    """Return the stage with settings that fit this machine. All ranks must call this before any loads the model."""
    room = measure_room(dist_context)
    if room is None:
        return stage
    on_cuda = dist_context.ranks.device.type == "cuda"
    needs = stage_needs(stage, count_params(model), num_shards=num_shards, loads_full=loads_full, on_cuda=on_cuda)
    tokens = -(-stage.tokens_per_pass // sequence_ranks)
    settled, note = fit_stage(stage, LayerWidths.of_config(values), needs, room, tokens=tokens, on_cuda=on_cuda)
    if note is not None and dist_context.is_leader:
        logger.warning(note)
    return settled
