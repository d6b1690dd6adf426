"""Check a source before any source of the recipe is tokenized."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from unspool.core.errors import DataError
from unspool.data.corpus.ledger import HOPELESS, Ledger, describe_bad
from unspool.data.sources.base import Document, Item, Source, read_items
from unspool.data.tokenize.chat import build_chat_encoder

# Importing this takes seconds, in every worker process.
if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def check_source(source: Source, *, name: str, root: Path, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """Reject a source without files, without a usable chat template, or whose first records all cannot be read.

    Reads up to the first document. Files on the Hub are listed and not read.
    """
    units = source.units(root)
    if source.is_chat:
        build_chat_encoder(tokenizer, source.chat_template(root), source=name)
    if source.generated or source.content_marks(units) is not None or source.spill_tasks(units):
        return
    ledger = Ledger()
    items: Iterator[Item] = chain.from_iterable(read_items(source, task, seed) for task in source.divide(units, seed))
    for item in items:
        try:
            ledger.add(item)
        except DataError as error:
            raise DataError(f"corpus {name}: {error}") from error
        if isinstance(item, Document) or ledger.records >= HOPELESS:
            return
    raise no_text(name, ledger)


def no_text(name: str, ledger: Ledger) -> DataError:
    bad = describe_bad(ledger.bad) if ledger.bad else ""
    return DataError(f"corpus {name}: no document contains text; check the source's kind and fields. {bad}".strip())
