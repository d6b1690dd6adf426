"""Which rank this process is, as its environment says, and which device and backend that gives.

In: the variables that torchrun sets. Out: a `Seat`; a sentence where they make no sense.
Several ranks of one machine that share a GPU talk by gloo, since NCCL refuses to.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from unspool.base.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Seat:
    """What the environment says."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    port: int
    agent_keeps_store: bool

    @property
    def keeps_store(self) -> bool:
        return self.rank == 0 and not self.agent_keeps_store


def read_place(env: Mapping[str, str]) -> Seat:
    given = {
        name: env[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name in env
    }
    if "WORLD_SIZE" not in given and "RANK" not in given:
        return Seat(rank=0, world_size=1, local_rank=0, local_world_size=1, host="", port=0, agent_keeps_store=False)
    needed = (
        ("RANK", "WORLD_SIZE")
        if given.get("WORLD_SIZE") == "1"
        else ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    )
    missing = [name for name in needed if name not in given]
    if missing:
        raise ConfigError(
            f"{', '.join(given)} of the environment say that this is one of several ranks, but {', '.join(missing)} "
            "is not set; start it by torchrun or `unspool launch`, or unset them to train on one."
        )
    try:
        rank, world_size = int(given["RANK"]), int(given["WORLD_SIZE"])
        local_rank = int(given.get("LOCAL_RANK", rank))
        local_world_size = int(env.get("LOCAL_WORLD_SIZE", 1))
        port = int(given.get("MASTER_PORT", 0))
    except ValueError as error:
        raise ConfigError(f"RANK, WORLD_SIZE, LOCAL_RANK and MASTER_PORT must be whole numbers: {error}.") from None
    if not 0 <= rank < world_size:
        raise ConfigError(f"RANK={rank} is not among the {world_size} ranks of WORLD_SIZE; use 0 to {world_size - 1}.")
    return Seat(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        host=given.get("MASTER_ADDR", ""),
        port=port,
        agent_keeps_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def pick_backend(device_type: str, place: Seat, *, num_devices: int) -> tuple[torch.device, str]:
    """This rank's device, and what carries its messages."""
    if device_type == "cpu":
        return torch.device("cpu"), "gloo"
    if num_devices == 0:
        raise ConfigError("device: cuda is not available here; use auto or cpu.")
    shared = place.local_world_size > num_devices
    return torch.device(
        "cuda", place.local_rank % num_devices
    ), "cpu:gloo,cuda:gloo" if shared else "cpu:gloo,cuda:nccl"
