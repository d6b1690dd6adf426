"""New models to be trained from scratch: the sizes a recipe may ask for."""

from typing import Any

from pydantic import Field, field_validator

from unspool.core.config import Config
from unspool.core.sizes import Size

# Llama-architecture shapes; the vocabulary comes from the tokenizer. Eight small heads: the only one of ten trials
# that learnt to recall a stated fact had them, though three others with eight did not (benchmarks/README.md).
SIZES: dict[str, dict[str, Any]] = {
    "4M": {
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
    },
}


class NewModel(Config):
    """`model: {size: 4M, tokenizer: folder, context: 256}` starts from random weights."""

    size: str = Field(description=f"one of {', '.join(SIZES)}")
    tokenizer: str = Field(description="folder with a tokenizer")
    context_length: Size
    base: float = Field(10_000.0, gt=1, description="RoPE base")

    @field_validator("size")
    @classmethod
    def _known(cls, size: str) -> str:
        if size not in SIZES:
            raise ValueError(f"size must be one of {', '.join(SIZES)}")
        return size
