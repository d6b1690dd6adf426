"""Source kind `parquet`: Parquet files, one document per record of one column."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from unspool.data.sources.base import Item, TextFileSource


class ParquetSource(TextFileSource):
    """Parquet files; one document per record."""

    kind: Literal["parquet"]
    text: str = Field("text", description="Column that holds the text. `a.b` is field `b` of struct `a`.")

    endings: ClassVar[tuple[str, ...]] = (".parquet",)
    file_endings: ClassVar[tuple[str, ...]] = (".parquet",)

    def read_units(self, units: Sequence[Path], seed: int = 0) -> Iterator[Item]:
        from unspool.data.sources.arrow import read_text_column

        for path in units:
            yield from read_text_column(path, self.text)
