"""What a recipe's `sources` may be. Reading them is read.py's and recall.py's work."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from unspool.base.config import Config
from unspool.base.sizes import Size


class TextSource(Config):
    """Plain text files, a folder of them or a glob; one document each."""

    kind: Literal["text"]
    path: str
    limit: Size | None = Field(None, description="stop after about this many tokens")


class JsonlSource(Config):
    """JSON lines (plain, .gz or .zst); one document per line."""

    kind: Literal["jsonl"]
    path: str
    text: str = Field("text", description="the field that holds the text")
    limit: Size | None = Field(None, description="stop after about this many tokens")


class ParquetSource(Config):
    """Parquet files; one document per record."""

    kind: Literal["parquet"]
    path: str
    text: str = Field("text", description="the column that holds the text")
    limit: Size | None = Field(None, description="stop after about this many tokens")


class RecallSource(Config):
    """Generated documents that state facts and ask for them again (see recall.py)."""

    kind: Literal["recall"]
    tokens: Size = Field(description="how many tokens to generate")
    length: tuple[Size, Size] = Field(description="shortest and longest document, in tokens")
    prose: str = Field(description="JSONL or text files that the facts are hidden in")
    pairs: float = Field(0.5, ge=0, le=1, description="share of JSON key-value documents; the rest are facts in prose")
    repeats: float = Field(0.0, ge=0, le=1, description="share of word lists said again, which teach copying first")

    @model_validator(mode="after")
    def _ordered(self) -> "RecallSource":
        if not 48 <= self.length[0] <= self.length[1]:
            raise ValueError("length needs [shortest, longest] with at least 48 tokens, such as [128, 256]")
        if self.pairs + self.repeats > 1:
            raise ValueError("pairs and repeats must not exceed 1 together; what is left are facts in prose")
        return self


class ReposSource(Config):
    """Code repositories, one document each. Can be described, not read yet (see `NOT_READ_YET`)."""

    kind: Literal["repos"]
    path: str
    limit: Size | None = None


class ChatSource(Config):
    """Conversations for instruction tuning. Can be described, not read yet (see `NOT_READ_YET`)."""

    kind: Literal["chat"]
    path: str
    messages: str = "messages"
    limit: Size | None = None


Source = Annotated[
    TextSource | JsonlSource | ParquetSource | RecallSource | ReposSource | ChatSource,
    Field(discriminator="kind"),
]

# Recipes may name these kinds, so that they can be written and checked in full; running one is
# refused before any work starts.
NOT_READ_YET = {
    "repos": "Concatenate each repository into one line of a JSONL file and use kind: jsonl.",
    "chat": "Render the conversations with the model's chat template into JSONL and use kind: jsonl.",
}
