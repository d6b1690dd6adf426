"""Source kind `chat`: conversations in JSON lines or Parquet files, one per record.

All record formats are converted to messages of three roles: system, user, assistant. A chat template renders them
later, at tokenization.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from unspool.data.sources.base import MAX_RECORD_BYTES, Bad, Document, FileSource, Item, Message
from unspool.data.sources.files import Unreadable, checked_text, list_names
from unspool.data.sources.jsonl import ENDINGS, read_jsonl

if TYPE_CHECKING:
    import pyarrow as pa

    from unspool.data.sources.arrow import Columns

# Fields that may hold the messages, in order of preference, unless the source names one.
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


class ChatSource(FileSource):
    """Conversations, one per record, rendered with the model's chat template; only the assistant is trained on."""

    kind: Literal["chat"]
    path: str = Field(description="JSONL (plain, .gz or .zst) or Parquet files: one file, a folder or a glob pattern.")
    messages: str | None = Field(
        None,
        description="Field that holds the messages. Default: the first of `messages`, `conversations`, `conversation` "
        "and `data` that exists.",
    )
    template: str | None = Field(None, description="Jinja file with a chat template. Required if the model has none.")

    path_keys: ClassVar[tuple[str, ...]] = ("path", "template")
    endings: ClassVar[tuple[str, ...]] = (*ENDINGS, ".parquet")
    is_chat: ClassVar[bool] = True

    def chat_template(self, root: Path) -> str | None:
        from unspool.data.tokenize.chat_template import load_template

        return None if self.template is None else load_template(root / Path(self.template).expanduser())

    def read_units(self, units: Sequence[Path], seed: int = 0) -> Iterator[Item]:
        for path in units:
            if path.suffix == ".parquet":
                # pyarrow takes long to import, and checking a recipe does not need it.
                from unspool.data.sources.arrow import read_parquet

                yield from read_parquet(path, partial(self._choose_columns, path))
            else:
                yield from read_jsonl(path, partial(self._document, path.name))

    def _document(self, name: str, number: int, record: dict[str, Any]) -> Document:
        return Document(f"{name}:{number}", "", messages=parse_conversation(record, self.messages))

    def _choose_columns(self, path: Path, schema: "pa.Schema") -> "Columns[Item]":
        wanted = [self.messages] if self.messages is not None else list(FIELDS)
        columns = [name for name in wanted if name in schema.names]
        if not columns:
            present = list_names(schema.names, "no columns")
            raise Unreadable("missing_field", f"no column {' or '.join(map(repr, wanted))}; it has {present}")
        if SYSTEM_FIELD in schema.names:
            columns.append(SYSTEM_FIELD)
        return columns, partial(self._batch_items, path)

    def _batch_items(self, path: Path, batch: "pa.RecordBatch", number: int) -> Iterator[Item]:
        for offset in range(batch.num_rows):
            record = number + offset
            try:
                # One by one: Arrow does not check strings in files, and one bad string must not cost the other records.
                (values,) = batch.slice(offset, 1).to_pylist()
                yield self._document(path.name, record, values)
            except Unreadable as error:
                yield Bad(str(path), f"record {record}", error.reason, error.detail)
            except UnicodeDecodeError as error:
                yield Bad(str(path), f"record {record}", "invalid_utf8", f"not valid UTF-8 at byte {error.start}")


def parse_conversation(record: Mapping[str, Any], field: str | None) -> tuple[Message, ...]:
    """Parse a record's messages, from `field` or, if that is None, from the first of `FIELDS`."""
    turns = _find_turns(record, field)
    if all(isinstance(turn, str) for turn in turns):
        messages = [Message("user" if at % 2 == 0 else "assistant", turn) for at, turn in enumerate(turns)]
    else:
        messages = [_parse_message(turn, at) for at, turn in enumerate(turns, start=1)]
    system = record.get(SYSTEM_FIELD)
    if isinstance(system, str) and system.strip() and messages and messages[0].role != "system":
        messages.insert(0, Message("system", system))
    if not any(message.content.strip() for message in messages):
        raise Unreadable("empty_conversation", "the conversation has no text")
    if not any(message.role == "assistant" for message in messages):
        raise Unreadable("no_assistant", "the conversation has no assistant message, so nothing would be trained on")
    if sum(len(message.content) for message in messages) > MAX_RECORD_BYTES:
        raise Unreadable("too_long", f"more than {MAX_RECORD_BYTES >> 20} MiB in one conversation")
    return tuple(Message(message.role, checked_text(message.content)) for message in messages)


def _find_turns(record: Mapping[str, Any], field: str | None) -> list[Any]:
    name = field if field is not None else next((known for known in FIELDS if record.get(known) is not None), None)
    if name is None or record.get(name) is None:
        wanted = f"no field {field!r}" if field is not None else f"none of the fields {', '.join(FIELDS)}"
        raise Unreadable("missing_field", f"{wanted}; it has {list_names(record, 'no fields')}")
    turns = record[name]
    if not isinstance(turns, list):
        raise Unreadable("unknown_shape", f"field {name!r} must be a list of messages, not {_type_name(turns)}")
    if not turns:
        raise Unreadable("empty_conversation", f"field {name!r} is an empty list")
    return turns


def _parse_message(turn: Any, number: int) -> Message:
    if not isinstance(turn, Mapping):
        raise Unreadable("unknown_shape", f"message {number} is {_type_name(turn)}; expected {{role, content}} or text")
    keyed = next((pair for pair in _KEYS if turn.get(pair[0]) is not None), None)
    if keyed is None:
        keys = list_names(turn, "no keys", most=8)
        raise Unreadable("unknown_shape", f"message {number} has neither role nor from; it has {keys}")
    role_key, content_key = keyed
    role = str(turn[role_key]).lower()
    if role in _TOOLS or turn.get("tool_calls") or turn.get("function_call"):
        raise Unreadable("tool_role", f"message {number} is part of a tool call, which is not supported yet")
    if role not in ROLES:
        raise Unreadable(
            "unknown_role", f"message {number} has the role {role[:40]!r}; known roles are {', '.join(ROLES)}"
        )
    return Message(ROLES[role], _join_text(turn.get(content_key), content_key, number))


def _join_text(content: Any, key: str, number: int) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Unreadable("not_text", f"{key} of message {number} must be text, not {_type_name(content)}")
    texts: list[str] = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            kind = part.get("type", "unknown") if isinstance(part, Mapping) else _type_name(part)
            raise Unreadable(
                "not_text", f"message {number} has a part of type {str(kind)[:40]}; only text is supported"
            )
        texts.append(text)
    return "".join(texts)


def _type_name(value: Any) -> str:
    return "null" if value is None else type(value).__name__
