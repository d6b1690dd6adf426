"""The key `aggregation` of a source."""

from typing import Literal

from pydantic import Field, model_validator

from unspool.core.config import Config
from unspool.core.sizes import Size

TaskName = Literal["word_counts", "passages"]
SHORTEST_SECTION = 64


class Aggregation(Config):
    """Insert tasks about whole sections into documents, after these sections."""

    share: float = Field(1.0, gt=0, le=1, description="Share of documents that get tasks.")
    tasks: dict[TaskName, float] = Field(
        {"word_counts": 1, "passages": 1},
        description="Tasks and their shares of these documents; only the proportions count. `word_counts` asks how "
        "often the most frequent words of a section occur in it; `passages` asks for all sentences of a section that "
        "contain a phrase.",
    )
    section: tuple[Size, Size] = Field(
        (4 << 10, 64 << 10),
        description="Shortest and longest section that a task is about, in tokens of 4 characters. A section is also "
        "at most half of its document; one without repeated words or phrases joins the next.",
    )
    questions: int = Field(5, ge=1, le=10, description="Number of words that `word_counts` asks for after a section.")

    @model_validator(mode="after")
    def _check(self) -> "Aggregation":
        if not self.tasks or min(self.tasks.values()) <= 0:
            raise ValueError("tasks needs shares above 0, such as {word_counts: 1, passages: 1}")
        if not SHORTEST_SECTION <= self.section[0] <= self.section[1]:
            at_least = f"at least {SHORTEST_SECTION} tokens, such as [4K, 64K]"
            raise ValueError(f"section needs [shortest, longest] with {at_least}")
        return self
