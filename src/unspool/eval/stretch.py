"""A model with other positions than it was trained with, to see what they do without training."""

from dataclasses import dataclass
from typing import Any

from unspool.base.artefact import digest
from unspool.model.rotary import apply_position
from unspool.position.scaling import Position


@dataclass(frozen=True, kw_only=True)
class Stretch:
    position: Position
    context: int  # tokens that the method is to reach

    def apply(self, model: Any) -> None:
        apply_position(model, self.position, self.context)

    def of(self, model_hash: str) -> str:
        """What scores depend on, where a model is stretched so."""
        return digest([model_hash, self.position.model_dump(mode="json"), self.context])

    def name_of(self, model: str) -> str:
        return f"{model}+{self.position.method}"
