"""Conversations in JSON lines or Parquet files: one document, not yet written out, per record."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from unspool.data.sources import jsonl
from unspool.data.sources.base import MAX_RECORD_BYTES, Bad, Document, Item, Message
from unspool.data.sources.config import ChatSource
from unspool.data.sources.files import Unreadable, checked_text, find_files
from unspool.data.sources.parquet import Plan, read_file

# The shapes conversations come in, all turned into messages of three roles: system, user, assistant.


# Where a conversation is looked for, in this order, unless the source names its field.
FIELDS = ("messages", "conversations", "conversation", "data")
SYSTEM_FIELD = "system"

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
}
_KEYS = (("role", "content"), ("from", "value"))
_TOOLS = ("tool", "function", "function_call", "function_response", "observation", "ipython", "tool_call")


def conversation_of(record: Mapping[str, Any], field: str | None) -> tuple[Message, ...]:
    """The messages of a record; `field` holds them, or None to look where they usually are."""
    turns = _turns(record, field)
    if all(isinstance(turn, str) for turn in turns):
        messages = [Message("user" if at % 2 == 0 else "assistant", turn) for at, turn in enumerate(turns)]
    else:
        messages = [_message(turn, at) for at, turn in enumerate(turns, start=1)]
    system = record.get(SYSTEM_FIELD)
    if isinstance(system, str) and system.strip() and messages and messages[0].role != "system":
        messages.insert(0, Message("system", system))
    if not any(message.content.strip() for message in messages):
        raise Unreadable("empty_conversation", "a conversation without a word")
    if not any(message.role == "assistant" for message in messages):
        raise Unreadable("no_assistant", "a conversation in which the assistant says nothing, so nothing is learnt")
    if sum(len(message.content) for message in messages) > MAX_RECORD_BYTES:
        raise Unreadable("too_long", f"more than {MAX_RECORD_BYTES >> 20} MiB in one conversation")
    return tuple(Message(message.role, checked_text(message.content)) for message in messages)


def _turns(record: Mapping[str, Any], field: str | None) -> list[Any]:
    name = field if field is not None else next((one for one in FIELDS if record.get(one) is not None), None)
    if name is None or record.get(name) is None:
        present = ", ".join(map(repr, list(record)[:12])) or "no fields"
        wanted = f"no field {field!r}" if field is not None else f"none of the fields {', '.join(FIELDS)}"
        raise Unreadable("missing_field", f"{wanted}; it has {present}")
    turns = record[name]
    if not isinstance(turns, list):
        raise Unreadable("unknown_shape", f"field {name!r} must be a list of messages, not {_kind(turns)}")
    if not turns:
        raise Unreadable("empty_conversation", f"field {name!r} is an empty list")
    return turns


def _message(turn: Any, number: int) -> Message:
    if not isinstance(turn, Mapping):
        raise Unreadable("unknown_shape", f"message {number} is {_kind(turn)}; expected {{role, content}} or a text")
    keyed = next((pair for pair in _KEYS if turn.get(pair[0]) is not None), None)
    if keyed is None:
        keys = ", ".join(map(repr, list(turn)[:8])) or "no keys"
        raise Unreadable("unknown_shape", f"message {number} has neither role nor from; it has {keys}")
    role_key, content_key = keyed
    role = str(turn[role_key]).lower()
    if role in _TOOLS or turn.get("tool_calls") or turn.get("function_call"):
        raise Unreadable("tool_role", f"message {number} is part of a tool call, which cannot be trained on yet")
    if role not in ROLES:
        raise Unreadable("unknown_role", f"message {number} has the role {role[:40]!r}; known are {', '.join(ROLES)}")
    return Message(ROLES[role], _text(turn.get(content_key), content_key, number))


def _text(content: Any, key: str, number: int) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Unreadable("not_text", f"{key} of message {number} must be a text, not {_kind(content)}")
    texts: list[str] = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            kind = part.get("type", "unknown") if isinstance(part, Mapping) else _kind(part)
            raise Unreadable("not_text", f"message {number} has a part of type {str(kind)[:40]}; only text can be")
        texts.append(text)
    return "".join(texts)


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


PARQUET = ".parquet"


def units(source: ChatSource, root: Path) -> list[Path]:
    return find_files(source.path, root, kind="chat", endings=(*jsonl.ENDINGS, PARQUET))


def read(source: ChatSource, units: Sequence[Path], seed: int) -> Iterator[Item]:
    for path in units:
        if path.suffix == PARQUET:
            yield from read_file(path, partial(_plan, path, source.messages))
        else:
            yield from jsonl.records(path, partial(_document, path.name, source.messages))


def _document(name: str, field: str | None, number: int, record: dict[str, Any]) -> Document:
    return Document(f"{name}:{number}", "", messages=conversation_of(record, field))


def _plan(path: Path, field: str | None, schema: pa.Schema) -> Plan:
    """The columns to read, and how their records become items."""
    wanted = [field] if field is not None else list(FIELDS)
    columns = [name for name in wanted if name in schema.names]
    if not columns:
        present = ", ".join(map(repr, schema.names[:12])) or "no columns"
        raise Unreadable("missing_field", f"no column {' or '.join(map(repr, wanted))}; it has {present}")
    if SYSTEM_FIELD in schema.names:
        columns.append(SYSTEM_FIELD)
    return columns, partial(_items, path, field)


def _items(path: Path, field: str | None, batch: pa.RecordBatch, number: int) -> Iterator[Item]:
    for offset in range(batch.num_rows):
        record = number + offset
        try:
            # One by one: Arrow takes strings from files unchecked, and one that is not UTF-8 must not cost the others.
            (values,) = batch.slice(offset, 1).to_pylist()
            yield _document(path.name, field, record, values)
        except Unreadable as error:
            yield Bad(str(path), f"record {record}", error.reason, error.detail)
        except UnicodeDecodeError as error:
            yield Bad(str(path), f"record {record}", "invalid_utf8", f"not valid UTF-8 at byte {error.start}")
