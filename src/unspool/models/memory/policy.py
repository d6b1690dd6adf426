"""Memory settings of training, and which of them can be combined. Imports no torch."""

from dataclasses import dataclass
from typing import Literal

from unspool.core.errors import ConfigError

Recompute = Literal["none", "keep-attention", "full"]


@dataclass(frozen=True, kw_only=True)
class MemoryPolicy:
    activation_checkpointing: Recompute = "none"
    layers_per_checkpoint: int = 1
    offload: bool = False  # checkpoints are stored in host memory
    keep_products: int = 0  # layers, from the last, that also keep the results of matrix products
    keep_on_host: int = 0  # of these layers, how many store the kept results in host memory
    mlp_tiles: int | None = None  # tokens per tile of norms and MLPs
    attention_heads_at_once: int | None = None  # KV heads, with the query heads that share them

    def __post_init__(self) -> None:
        if self.activation_checkpointing == "none" and self.offload:
            raise ConfigError(
                "offload needs checkpoints of recomputed layers, and activation_checkpointing is none: "
                "set activation_checkpointing to full or keep-attention, or remove offload."
            )
        if self.activation_checkpointing == "none" and self.layers_per_checkpoint != 1:
            raise ConfigError(
                f"layers_per_checkpoint={self.layers_per_checkpoint} needs checkpoints, and "
                "activation_checkpointing is none: set activation_checkpointing to full or keep-attention, or remove "
                "layers_per_checkpoint."
            )
        if self.keep_products and (
            self.activation_checkpointing != "keep-attention" or self.layers_per_checkpoint > 1 or self.mlp_tiles
        ):
            raise ConfigError(
                f"keep_products={self.keep_products} keeps matrix products in addition to attention: it needs "
                "activation_checkpointing keep-attention, layers_per_checkpoint 1 and no mlp_tiles."
            )
        if not 0 <= self.keep_on_host <= self.keep_products:
            raise ConfigError(
                f"keep_on_host={self.keep_on_host} moves results of the keep_products layers to host memory: "
                f"it must be between 0 and {self.keep_products}."
            )
        for name in ("layers_per_checkpoint", "mlp_tiles", "attention_heads_at_once"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1.")

    def check_layers(self, num_layers: int) -> None:
        if self.keep_products > num_layers:
            raise ConfigError(
                f"keep_products={self.keep_products} is more layers than the model has; use at most {num_layers}."
            )
