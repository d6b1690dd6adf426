"""Base class of sources whose documents are generated, and the prose around the generated facts."""

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import ClassVar

from pydantic import Field, model_validator

from unspool.core.errors import DataError
from unspool.core.sizes import Size
from unspool.data.sources.base import Estimate, Source, read_strictly
from unspool.data.sources.jsonl import text_or_jsonl

SENTENCE_CHARS = (20, 400)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


class GeneratedSource(Source):
    """Common settings of generated sources."""

    tokens: Size = Field(description="Number of tokens to generate, approximately.")
    length: tuple[Size, Size] = Field(description="Shortest and longest document, in tokens.")
    prose: str | None = Field(description="JSONL or text files that supply ordinary text.")

    path_keys: ClassVar[tuple[str, ...]] = ("prose",)
    seeded: ClassVar[bool] = True
    generated: ClassVar[bool] = True
    min_length: ClassVar[int]  # of the shortest document
    example_length: ClassVar[str]

    @model_validator(mode="after")
    def _check_length(self) -> "GeneratedSource":
        if not self.min_length <= self.length[0] <= self.length[1]:
            at_least = f"at least {self.min_length} tokens, such as {self.example_length}"
            raise ValueError(f"length needs [shortest, longest] with {at_least}")
        return self

    def units(self, root: Path) -> list[Path]:
        return [] if self.prose is None else text_or_jsonl(self.prose).units(root)

    def sample(self, units: list[Path], seed: int) -> Iterator[str]:
        if self.prose is not None:
            yield from text_or_jsonl(self.prose).sample(units, seed)

    def estimate(self) -> Estimate:
        return Estimate(self.tokens, "the number of tokens to generate", sum(self.length) / 2)

    def read_prose(self, units: list[Path]) -> Iterator[str]:
        """Yield the texts of the prose files; DataError at a record that cannot be read."""
        if self.prose is not None:
            for document in read_strictly(text_or_jsonl(self.prose), units):
                yield document.text


def split_sentences(
    texts: Iterable[str], *, kind: str, max_chars: int, keep: Callable[[str], bool] = lambda sentence: True
) -> list[str]:
    """Collect sentences of ordinary length from the first `max_chars` characters; DataError if there are none."""
    shortest, longest = SENTENCE_CHARS
    sentences: list[str] = []
    chars = 0
    for text in texts:
        flat = " ".join(text[: max_chars - chars].split())
        parts = _SENTENCE_END.split(flat)
        sentences += [sentence for sentence in parts if shortest <= len(sentence) <= longest and keep(sentence)]
        chars += len(text)
        if chars >= max_chars:
            break
    if not sentences:
        raise DataError(
            f"{kind}: the prose has no sentence of {shortest} to {longest} characters; use files of ordinary text."
        )
    return sentences
