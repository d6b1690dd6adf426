"""What a position method comes to for one model and one context."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from unspool.position.rope import RopeShape, Tables, frequencies, tables


@dataclass(frozen=True, kw_only=True)
class Settled:
    """Either `parameters` or `head_bases` is given."""

    max_positions: int  # max_position_embeddings to write
    parameters: dict[str, Any] | None = None  # `rope_parameters` of transformers v5; None: it cannot express this
    head_bases: np.ndarray | None = None  # one per KV head
    rotate_by_layer: bool = False

    def tables(self, rope: RopeShape, seq_len: int | None = None) -> Tables:
        """Frequencies [d/2], or [KV heads, d/2] where heads differ."""
        if self.head_bases is not None:
            return Tables(inv_freq=frequencies(self.head_bases, rope.rotary_dim))
        assert self.parameters is not None
        return tables(self.parameters, rope.rotary_dim, max_positions=self.max_positions, seq_len=seq_len)


def one_base(base: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": float(base)}
