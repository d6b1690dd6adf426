"""What terminal, page and JSON need of anything that holds items: rows, a corpus, an input file."""

from typing import Protocol

from unspool.inspect.summary import Summary
from unspool.inspect.views import Item, Show


class Collection(Protocol):
    def summary(self) -> Summary: ...

    def pick(self, *, indices: list[int], count: int, seed: int, source: str | None) -> list[int]:
        """Which items to show: those asked for, else some; ConfigError if there are none such."""
        ...

    def item(self, index: int, show: Show) -> Item: ...
