"""The parent of every config class. Each lives beside what it configures; a recipe is made of them.

Frozen, unknown keys refused, checked on construction. What a class cannot be on its own
(`base: -1`) it refuses with a ValueError, which the recipe checker turns into a sentence
with the line, the value and what is allowed.
"""

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False)
