"""The shapes conversations come in, all turned into messages of three roles: system, user, assistant.

In: a record (a JSON object, or a record of a Parquet file). Out: its `Message`s, or Unreadable with the reason.
Known are lists of {role, content} (OpenAI, Tulu, UltraChat as `messages`), of {from, value} (ShareGPT) and of texts by
turns (UltraChat's first form). Content may be a list of text parts. A text in the field `system` beside the list is
the system message, unless the list begins with one.
Promise: a record is recognised by what it holds, so files may mix shapes; nothing of a conversation is left out
silently: what cannot be taken whole is refused whole.
Elsewhere: writing conversations out (chat_template.py).
"""

from collections.abc import Mapping
from typing import Any

from unspool.data.documents import MAX_RECORD_BYTES, Message
from unspool.data.readers.files import Unreadable, checked_text

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
