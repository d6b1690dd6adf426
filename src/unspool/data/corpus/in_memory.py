"""Build a corpus from Python objects: texts, token ids, conversations, or rows of a Hugging Face dataset."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from unspool.core.artifacts import publish
from unspool.core.errors import DataError
from unspool.data.corpus.build import KIND
from unspool.data.corpus.pipeline import BATCH_CHARS
from unspool.data.corpus.store import CorpusWriter
from unspool.data.lengths import histogram
from unspool.data.sources.base import Document, Message
from unspool.data.sources.chat import FIELDS, parse_conversation
from unspool.data.sources.files import Unreadable, checked_text, list_names
from unspool.data.tokenize.chat import build_chat_encoder
from unspool.data.tokenize.chat_template import TEMPLATE_FILE
from unspool.data.tokenize.encoder import build_encoder, choose_route

IDS = "input_ids"
_SAMPLED = 256  # records for the check of a fast tokenizer


def build_from_records(
    records: Iterable[Any], out_dir: Path, *, tokenizer: Any, text: str = "text", name: str = "data"
) -> dict[str, Any]:
    """Tokenize `records` into a corpus folder and return its counts; DataError names the first unusable record.

    A text gets the tokenizer's BOS and one EOS. Token ids are used unchanged. Conversations are rendered with the chat
    template; only the assistant's tokens are trained on. Empty texts are skipped.
    """
    documents = _documents(records, text, name)
    sample = list(islice(documents, _SAMPLED))
    if not sample:
        raise DataError(f"{name}: it contains no text; give texts, token ids, conversations or a dataset of them.")
    is_chat = bool(sample[0].messages)
    chat = build_chat_encoder(tokenizer, None, source=name) if is_chat else None
    encoder = build_encoder(tokenizer)
    texts = [document.text for document in sample if document.tokens is None and not document.messages]
    encoder = choose_route(encoder, texts) if texts else encoder
    lens: list[int] = []
    with publish(out_dir, kind=KIND, inputs={}, settings={"source": {"kind": "memory"}}) as draft:
        with CorpusWriter(draft.folder / "docs-00000.arrow", masked=is_chat) as writer:
            for batch in _batches(chain(sample, documents)):
                plain = iter(encoder.encode([one.text for one in batch if one.tokens is None and not one.messages]))
                for document in batch:
                    mask = None
                    if bool(document.messages) != is_chat:
                        raise DataError(
                            f"{document.id}: conversations and texts cannot be mixed; pack them separately."
                        )
                    if chat is not None:
                        try:
                            encoded = chat.encode(document.messages)
                        except Unreadable as error:
                            raise DataError(f"{document.id}: {error.detail}.") from error
                        tokens, mask = encoded.tokens, encoded.loss_mask
                    else:
                        tokens = next(plain) if document.tokens is None else document.tokens
                    if int(tokens.max()) >= len(tokenizer):
                        raise DataError(
                            f"{document.id}: token {int(tokens.max())} is outside the tokenizer's vocabulary of "
                            f"{len(tokenizer)}; the ids are from another tokenizer."
                        )
                    writer.append(document.id, tokens, mask)
                    lens.append(len(tokens))
        if chat is not None:
            (draft.folder / TEMPLATE_FILE).write_text(chat.template.text, encoding="utf-8")
        draft.counts = {"documents": len(lens), "tokens": sum(lens), "lengths": histogram(np.array(lens))}
    return draft.counts


def _documents(records: Iterable[Any], text: str, name: str) -> Iterator[Document]:
    for number, record in enumerate(records):
        place = f"{name}, record {number}"
        try:
            document = _document(record, text, place)
        except Unreadable as error:
            raise DataError(f"{place}: {error.detail}.") from error
        if document.text or document.messages or document.tokens is not None:
            yield document


def _document(record: Any, text: str, place: str) -> Document:
    if isinstance(record, Document):
        return record
    value = record
    if isinstance(record, Mapping):
        found = next((key for key in (text, IDS, *FIELDS) if record.get(key) is not None), None)
        if found is None:
            wanted = f"no field {text!r}, {IDS!r} or {FIELDS[0]!r}"
            raise Unreadable("missing_field", f"{wanted}; it has {list_names(record, 'no fields')}")
        if found in FIELDS and not isinstance(record[found], str):
            return Document(place, "", messages=parse_conversation(record, found))
        value = record[found]
    if isinstance(value, str):
        return Document(place, checked_text(value))
    if isinstance(value, Sequence) and value and isinstance(value[0], Mapping | Message):
        turns = [turn._asdict() if isinstance(turn, Message) else turn for turn in value]
        return Document(place, "", messages=parse_conversation({FIELDS[0]: turns}, FIELDS[0]))
    ids = np.asarray(value)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer) or (ids.size and int(ids.min()) < 0):
        raise Unreadable("not_text", f"expected a text, a list of token ids or a conversation, not {type(value)}")
    return Document(place, "", tokens=ids.astype(np.uint32) if ids.size else None)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= BATCH_CHARS:
            yield batch
            batch, size = [], 0
    yield batch
