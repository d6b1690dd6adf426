"""How a stage keeps its weights and AdamW's moments, and when it steps. Apart from optimizer.py: needs no torch."""

from typing import Literal

from pydantic import Field

from unspool.core.config import Config


class OptimizerConfig(Config):
    """The memory of the optimizer. What each mode takes per parameter is told in docs/memory.md."""

    weights: Literal["fp32", "bf16"] = Field(
        "fp32", description="fp32: masters beside the weights computed with; bf16: none, updates rounded stochastically"
    )
    states: Literal["fp32", "8bit"] = Field("fp32", description="AdamW's moments; 8bit: in blocks of 256 with a scale")
    step: Literal["after", "in-backward"] = Field(
        "after", description="in-backward: each parameter as soon as its gradient is there, which is then freed"
    )
