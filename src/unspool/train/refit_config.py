"""What a stage may say about refitting queries and keys. Apart from refit.py: needs no torch."""

from pydantic import Field, field_validator, model_validator

from unspool.base.config import Config
from unspool.base.sizes import Size

# Rows per step where a recipe does not say.
ROWS_PER_STEP = 8


class RefitConfig(Config):
    """Queries and keys are fitted so that each layer attends as it did in the model that the stage starts from."""

    rows: str | dict[str, float] = Field(description="rows, or rows with shares of tokens, within the old context")
    before: int = Field(0, ge=0, description="steps before the first step of training")
    during: float = Field(0.0, ge=0, description="weight of this distance beside training's loss, in each of its steps")
    after: int = Field(0, ge=0, description="steps after the last step of training")
    batch: Size | None = Field(None, description="tokens per step; 8 rows when not given")
    during_batch: Size | None = Field(None, description="the same beside a step of training; as batch when not given")
    lr: float | None = Field(None, gt=0, description="Adam's highest rate, for before and after")
    after_lr: float | None = Field(None, gt=0, description="the same after training; a quarter of lr when not given")

    @field_validator("rows")
    @classmethod
    def _positive(cls, rows: str | dict[str, float]) -> str | dict[str, float]:
        if not rows or (isinstance(rows, dict) and min(rows.values()) <= 0):
            raise ValueError("name rows, or rows with shares above 0, such as {short: 0.75, recall: 0.25}")
        return rows

    @model_validator(mode="after")
    def _does_something(self) -> "RefitConfig":
        if not self.before and not self.during and not self.after:
            raise ValueError("give before or after, numbers of steps, or during, a weight; or leave refit out")
        if (self.before and self.lr is None) or (self.after and self.lr is None and self.after_lr is None):
            raise ValueError("give lr, the highest rate of its own steps, such as 4e-3")
        return self

    @property
    def shares(self) -> dict[str, float]:
        return {self.rows: 1.0} if isinstance(self.rows, str) else self.rows

    @property
    def lr_before(self) -> float:
        assert self.lr is not None
        return self.lr

    @property
    def lr_after(self) -> float:
        return self.lr_before / 4 if self.after_lr is None else self.after_lr
