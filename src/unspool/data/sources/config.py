"""What a recipe's `sources` may be. Reading them is the readers' work (readers/), making them up that of recall.py
and synthetic/."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from unspool.core.config import Config
from unspool.core.sizes import Size


class ReadSource(Config):
    """What all sources that are read from disk have in common."""

    path: str
    limit: Size | None = Field(None, description="stop after about this many tokens")
    max_bad: float = Field(0.001, ge=0, le=1, description="share of unreadable records above which the run stops")


class TextSource(ReadSource):
    """Plain text files, a folder of them or a glob; one document each."""

    kind: Literal["text"]


class JsonlSource(ReadSource):
    """JSON lines (plain, .gz or .zst); one document per line."""

    kind: Literal["jsonl"]
    text: str = Field("text", description="the field that holds the text")


class ParquetSource(ReadSource):
    """Parquet files; one document per record."""

    kind: Literal["parquet"]
    text: str = Field("text", description="the column that holds the text")


class HfSource(ReadSource):
    """A Hugging Face dataset: a Hub id, or a folder with its Parquet, JSONL or `save_to_disk` files."""

    kind: Literal["hf"]
    path: str = Field(description="Hub id such as org/name, or a folder")
    config: str | None = Field(None, description="the dataset's configuration, where it has several")
    split: str = Field("train", description="which split")
    text: str = Field("text", description="the column that holds the text")
    revision: str | None = Field(None, description="a commit of the dataset, to read the same bytes again")


class ReposSource(ReadSource):
    """Code repositories, one document each: folders, .tar.gz, .zip, source distributions, wheels."""

    kind: Literal["repos"]
    path: str = Field(description="a folder of repositories and archives, one archive, or a pattern")


class TextbooksSource(ReadSource):
    """Chapters (one JSONL record each) joined to books, and the books of one subject to one document."""

    kind: Literal["textbooks"]
    text: str = Field("text", description="the field that holds a chapter's text")
    book: str = Field("book", description="the field that names the book")
    subject: str | None = Field("subject", description="the field that names the subject; null: one document per book")
    chapter: str | None = Field("chapter", description="the field chapters are ordered by; null: file order")


class MdsSource(ReadSource):
    """Folders in MosaicML's MDS format, tokenised already, such as ProLong's public data."""

    kind: Literal["mds"]
    tokens: str = Field("input_ids", description="the column that holds the tokens")


class ChatSource(ReadSource):
    """Conversations, one per record, written out with the model's chat template; only the assistant is trained on."""

    kind: Literal["chat"]
    path: str = Field(description="JSONL (plain, .gz or .zst) or Parquet files, a folder of them or a pattern")
    messages: str | None = Field(
        None, description="the field that holds the messages; null: messages, conversations, conversation or data"
    )
    template: str | None = Field(None, description="a Jinja file, for models that have no chat template of their own")


class RecallSource(Config):
    """Generated documents that state facts and ask for them again (see recall.py)."""

    kind: Literal["recall"]
    tokens: Size = Field(description="how many tokens to generate")
    length: tuple[Size, Size] = Field(description="shortest and longest document, in tokens")
    prose: str = Field(description="JSONL or text files that the facts are hidden in")
    pairs: float = Field(0.5, ge=0, le=1, description="share of JSON key-value documents; the rest are facts in prose")
    repeats: float = Field(0.0, ge=0, le=1, description="share of word lists said again, which teach copying first")
    asked: float = Field(
        1.0, gt=0, description="questions for each key of the largest objects; less leaves room for larger objects"
    )

    @model_validator(mode="after")
    def _ordered(self) -> "RecallSource":
        if not 48 <= self.length[0] <= self.length[1]:
            raise ValueError("length needs [shortest, longest] with at least 48 tokens, such as [128, 256]")
        if self.pairs + self.repeats > 1:
            raise ValueError("pairs and repeats must not exceed 1 together; what is left are facts in prose")
        return self


SyntheticTask = Literal["sorting", "hops", "states", "similar", "attributes"]


class SyntheticSource(Config):
    """Generated documents of tasks whose answers can be checked (see synthetic/)."""

    kind: Literal["synthetic"]
    tokens: Size = Field(description="how many tokens to generate")
    length: tuple[Size, Size] = Field(description="shortest and longest document, in tokens")
    tasks: dict[SyntheticTask, float] = Field(
        {"sorting": 1, "hops": 1, "states": 1, "similar": 1, "attributes": 1}, description="tasks with their shares"
    )
    prose: str | None = Field(None, description="JSONL or text files to stand between the facts")

    @model_validator(mode="after")
    def _possible(self) -> "SyntheticSource":
        if not 512 <= self.length[0] <= self.length[1]:
            raise ValueError("length needs [shortest, longest] with at least 512 tokens, such as [1K, 32K]")
        if not self.tasks or min(self.tasks.values()) <= 0:
            raise ValueError("tasks needs shares above 0, such as {sorting: 1, hops: 2}")
        return self


FileSource = (
    TextSource | JsonlSource | ParquetSource | HfSource | ReposSource | TextbooksSource | MdsSource | ChatSource
)
Source = Annotated[FileSource | RecallSource | SyntheticSource, Field(discriminator="kind")]
