"""What one entry of a recipe's `evals` may say, a class per suite."""

from typing import Annotated, Literal

from pydantic import Field

from unspool.base.config import Config
from unspool.base.sizes import Size

Lengths = Annotated[list[Size], Field(min_length=1)]


class NiahEval(Config):
    """Needle in a haystack: facts hidden in prose at every depth, asked for at the end."""

    suite: Literal["niah"]
    lengths: Lengths
    samples: int = Field(20, ge=1, description="questions per length, spread evenly over depths")
    depths: int = Field(5, ge=1, description="how many depths between the start and the end")
    needles: int = Field(1, ge=1, description="facts per haystack, each asked for")
    value: Literal["numbers", "words"] = "numbers"
    text: str | None = Field(
        None, description="JSONL or text files for the haystack; the shipped held-out book if none"
    )


class KvEval(Config):
    """JSON key-value recall: one object as long as the context, several keys asked for."""

    suite: Literal["kv"]
    lengths: Lengths
    samples: int = Field(20, ge=1, description="questions per length")
    questions: int = Field(4, ge=1, description="questions per object")
    value: Literal["uuid", "words"] = "uuid"


class LossEval(Config):
    """Loss by position on held-out text."""

    suite: Literal["loss"]
    length: Size
    samples: int = Field(8, ge=1, description="windows")
    text: str | None = Field(None, description="JSONL or text files; the shipped held-out book if none")


class RulerEval(Config):
    """RULER. Can be described, not run yet (see `NOT_RUN_YET`)."""

    suite: Literal["ruler"]
    lengths: Lengths
    samples: int = Field(100, ge=1)


Eval = Annotated[NiahEval | KvEval | LossEval | RulerEval, Field(discriminator="suite")]

NOT_RUN_YET = {"ruler": "Use niah, kv and loss, which measure retrieval and loss at the same lengths."}
