"""Which part of a conversation that is written out is trained on: the assistant's words and what ends its turn.

In: a template, messages. Out: the text with `BEGIN` and `END` (chat_template.py) around every such part.
How: a template's own `{% generation %}` marks say it. Without them, of each answer: what is written out up to and
with it, less what is written out before it with the prompt to go on. What follows the end of a turn, usually a
newline, is not the assistant's. Where a template writes earlier turns differently once others follow (it moves the
system message, leaves out old reasoning), the conversation is written out again with another text in the answer's
place: what differs is the answer.
Promise: what is marked is exactly what a model would have to write after the prompt, or the record is refused.
Price: two more renderings per answer.
"""

from collections.abc import Sequence

from unspool.data.chat_template import BEGIN, END, ChatTemplate
from unspool.data.documents import Message
from unspool.data.readers.files import Unreadable

_WORDS = "\ufdd2"  # in the place of an answer


def mark_trained(template: ChatTemplate, messages: Sequence[Message]) -> str:
    whole = template.render(messages)
    if template.has_marks:
        return whole
    parts: list[str] = []
    done = 0
    for at, message in enumerate(messages):
        if message.role == "assistant":
            start, stop = _span(template, messages, at, whole)
            if start < done or stop <= start:
                raise _unclear(at)
            parts += [whole[done:start], BEGIN, whole[start:stop], END]
            done = stop
    return "".join([*parts, whole[done:]])


def _span(template: ChatTemplate, messages: Sequence[Message], at: int, whole: str) -> tuple[int, int]:
    """Where in `whole` the answer begins and its turn ends."""
    prompt = _prompt(template, messages[:at])
    through = template.render(messages[: at + 1]).rstrip()
    if prompt is not None and through.startswith(prompt) and whole.startswith(through):
        return len(prompt), len(through)
    before, after = _around(template, messages, at)
    if not (whole.startswith(before) and whole.endswith(after) and len(before) + len(after) <= len(whole)):
        raise _unclear(at)
    so_far, ending = _around(template, messages[: at + 1], at)
    if not after.startswith(ending.rstrip()):
        raise _unclear(at)
    stop = len(whole) - len(after) + len(ending.rstrip())
    # What stands between the prompt and the words, such as a space, is the assistant's too.
    if prompt is None or not so_far.startswith(prompt):
        return len(before), stop
    if before.startswith(prompt):
        return len(prompt), stop
    lead = so_far.removeprefix(prompt)
    return len(before.removesuffix(lead)), stop


def _prompt(template: ChatTemplate, messages: Sequence[Message]) -> str | None:
    """What the assistant is given; None where a template cannot say, such as before a first message."""
    try:
        return template.render(messages, prompt=True)
    except Unreadable:
        return None


def _around(template: ChatTemplate, messages: Sequence[Message], at: int) -> tuple[str, str]:
    """What is written before and after an answer, whatever it says."""
    probe = [*messages[:at], Message("assistant", _WORDS), *messages[at + 1 :]]
    before, found, after = template.render(probe).partition(_WORDS)
    if not found or _WORDS in after:
        raise _unclear(at)
    return before, after


def _unclear(at: int) -> Unreadable:
    return Unreadable("unclear_mask", f"where the chat template writes the words of message {at + 1} cannot be told")
