"""The `engine` section of a recipe: where document preparation runs, and with how many processes."""

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from unspool.core.config import Config

# Options of only one kind of engine.
_BELONGS_TO = {
    "address": "ray",
    "partition": "slurm",
    "time": "slurm",
    "memory_gb": "slurm",
    "cpus": "slurm",
    "sbatch": "slurm",
}
# sbatch options that Unspool sets itself, and what to set instead.
_RESERVED = {
    "partition": "write engine.partition instead",
    "time": "write engine.time instead",
    "mem": "write engine.memory_gb instead",
    "mem-per-cpu": "write engine.memory_gb instead",
    "cpus-per-task": "write engine.cpus instead",
    "array": "Unspool numbers the tasks; set engine.workers for the number of parallel tasks",
    "output": "Unspool keeps the logs in the work folder",
    "error": "Unspool keeps the logs in the work folder",
}
_SLURM_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}")


class EngineConfig(Config):
    """Where document preparation runs. The result has the same bytes on every engine."""

    kind: Literal["local", "slurm", "ray"] = Field(
        "local",
        description="Where documents are prepared: processes on this machine, a Slurm job array, or a Ray cluster.",
    )
    workers: int = Field(2, ge=1, description="Number of tasks that run at the same time.")
    address: str | None = Field(
        None,
        min_length=1,
        description="Address of a Ray cluster, such as ray://head:10001. Default: start one on this machine for the "
        "run.",
    )
    partition: str | None = Field(
        None, pattern=r"^[A-Za-z0-9][\w.-]*$", description="Slurm partition. Required with `kind: slurm`."
    )
    time: str | None = Field(
        None, description='Slurm time limit per entry of the job array, such as "02:00:00". Default: 4 hours.'
    )
    memory_gb: int | None = Field(None, ge=1, description="Memory per Slurm task, in GB. Default: 4.")
    cpus: int | None = Field(None, ge=1, description="CPU cores per Slurm task. Default: 1.")
    sbatch: dict[str, str | int] = Field({}, description="Additional sbatch options, such as {account: physics}.")

    @field_validator("time", mode="before")
    @classmethod
    def _slurm_time(cls, value: object) -> object:
        if value is not None and not (isinstance(value, str) and _SLURM_TIME.fullmatch(value)):
            raise ValueError('must be a Slurm time limit, such as "02:00:00" or "1-12:00:00"')
        return value

    @field_validator("sbatch")
    @classmethod
    def _sbatch_options(cls, options: dict[str, str | int]) -> dict[str, str | int]:
        for name, value in options.items():
            if name in _RESERVED:
                raise ValueError(f"sbatch option {name} cannot be set here: {_RESERVED[name]}")
            # Options become lines of a shell script, in which a line break would start a command.
            if not re.fullmatch(r"[a-z][a-z0-9-]*", name) or not str(value).isprintable():
                raise ValueError(
                    f"sbatch option {name!r} must be a name without dashes in front, such as account: physics"
                )
        return options

    @model_validator(mode="after")
    def _only_own_options(self) -> "EngineConfig":
        for option, kind in _BELONGS_TO.items():
            if getattr(self, option) and kind != self.kind:
                raise ValueError(f"{option} is an option of kind: {kind}; remove it, or use kind: {kind}")
        return self
