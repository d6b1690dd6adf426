"""The interface of loss weights: a config, and the weights that it gives to the labels of rows.

A new kind is one file with a `LossConfig` and a `LossWeights`, and one line in `LOSSES` (config.py). This file imports
no torch, because recipes are checked without it.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from unspool.core.config import Config
from unspool.data.packing.row import Row

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from unspool.data.packing.store import RowSet
    from unspool.training.batch import Batch
    from unspool.training.config import StageConfig
    from unspool.training.parallel.config import ParallelConfig


class LossConfig(Config):
    """Base class of the configs of loss weights."""

    weights: str = Field(description="Name of the weighting.")

    def measure(self, stage: "StageConfig", rows: "Mapping[str, RowSet]") -> Any:
        """Return what the weights depend on, as plain JSON. Called once per stage, on one rank."""
        return None

    def build(self, stage: "StageConfig", measured: Any) -> "LossWeights | None":
        """Build the weights from `measure`; None if all labels weigh the same. Import torch here, not above."""
        raise NotImplementedError

    def describe(self, measured: Any) -> str | None:
        """Return a line for the log about the weights."""
        return None

    def problem(self, context_length: int, parallel: "ParallelConfig") -> str | None:
        """Return why a stage of this context length and layout cannot have these weights; None if it can."""
        return None

    def forward_only(self, length: float, context_length: int) -> tuple[float, float]:
        """Return the tokens that run forward to weigh a document of this length, and their summed squared lengths.

        The planner computes the cost of the weights from them.
        """
        return 0.0, 0.0


class LossWeights:
    """Weights of a stage's labels. A weight is above 0, and belongs to the position before the predicted token."""

    def of_row(self, row: Row, spans: np.ndarray) -> np.ndarray:
        """Return the weights of a row's labels; `spans` are the lengths of its parts that attend to themselves.

        Weights of labels without loss are ignored.
        """
        return np.ones(len(row.tokens), dtype=np.float32)

    def of_step(self, model: Any, batches: "tuple[Batch, ...]", mesh: "DeviceMesh | None") -> "tuple[Batch, ...]":
        """Change weights that depend on the model, before the step. All ranks of `mesh` call this together."""
        return batches
