"""MRCR conversations from the user's file, in the format of OpenAI's data set."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any

from unspool.core.errors import DataError
from unspool.core.progress import progress_bar
from unspool.core.sizes import format_size
from unspool.evals.heldout import CHARS_PER_TOKEN
from unspool.evals.question_choice import belongs
from unspool.evals.suites.records import Record, read_records

SOURCE = "OpenAI's MRCR data is on the Hub as openai/mrcr; download a file such as 2needle.parquet"
FIELDS = {
    "prompt": "a list of messages with role and content, or this list as JSON",
    "answer": "the wanted reply, after the string of random_string_to_prepend",
    "random_string_to_prepend": "a string",
    "n_needles": "a number",
}


@dataclass(frozen=True, kw_only=True)
class Dialog:
    """A conversation with a question about one of its replies."""

    head: str  # text before the first turn, such as solved examples
    turns: tuple[tuple[str, str], ...]  # requests with their replies
    question: str
    begin: str  # the string that the answer begins with
    right: int  # number of the turn with the wanted reply
    needles: int

    @property
    def reply(self) -> str:
        return self.turns[self.right][1]

    @property
    def chars(self) -> int:
        return len(self.head) + sum(len(request) + len(reply) for request, reply in self.turns) + len(self.question)


def read_dialogs(path: str) -> list[Dialog]:
    """Read all records of a file. Raises DataError with the record and field if one cannot be used."""
    return [_dialog(record, f"mrcr: {path}, record {record['_line']}") for record in read_records(path, split="train")]


def _dialog(record: Record, place: str) -> Dialog:
    missing = [name for name in FIELDS if record.get(name) in (None, "")]
    if missing:
        expected = "; ".join(f"{name}: {meaning}" for name, meaning in FIELDS.items())
        raise DataError(f"{place}: no field {' and no field '.join(missing)}. Expected {expected}. {SOURCE}.")
    if not str(record["n_needles"]).isdecimal():
        raise DataError(f"{place}: n_needles {record['n_needles']!r} is not a number. {SOURCE}.")
    messages = _messages(record["prompt"], place)
    *before, last = messages
    turns = [
        (request["content"], reply["content"])
        for request, reply in pairwise(before)
        if (request["role"], reply["role"]) == ("user", "assistant")
    ]
    begin, answer = str(record["random_string_to_prepend"]), str(record["answer"])
    wanted = answer.removeprefix(begin).strip()
    right = next((at for at, (_, reply) in enumerate(turns) if reply.strip() == wanted), None)
    if right is None or last["role"] != "user":
        problem = "the last message is not the user's" if right is not None else "its answer is no reply in its prompt"
        raise DataError(f"{place}: {problem}; remove the record, or download the current file. {SOURCE}.")
    first = next(at for at, message in enumerate(before[1:]) if message["role"] == "assistant")
    return Dialog(
        head="".join(f"{message['content'].strip()}\n\n" for message in before[:first]),
        turns=tuple(turns),
        question=last["content"],
        begin=begin,
        right=right,
        needles=int(record["n_needles"]),
    )


def _messages(prompt: Any, place: str) -> list[dict[str, str]]:
    try:
        found = list(json.loads(prompt) if isinstance(prompt, str) else prompt)
        messages = [{"role": str(one["role"]), "content": str(one["content"])} for one in found]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DataError(f"{place}: prompt is not {FIELDS['prompt']} ({type(error).__name__}: {error}).") from error
    if not messages:
        raise DataError(f"{place}: prompt has no messages; expected {FIELDS['prompt']}. {SOURCE}.")
    return messages


def choose_dialogs(
    path: str,
    lengths: Sequence[int],
    needles: Sequence[int],
    samples: int,
    count_tokens: Callable[[Dialog], int],
) -> dict[int, list[Dialog]]:
    """Choose up to `samples` conversations of a file for each length, evenly over the numbers of needles.

    A conversation belongs to a length if it has more than half of its tokens. Raises DataError if a length has none.
    """
    dialogs = read_dialogs(path)
    counts = [each for each in needles if any(dialog.needles == each for dialog in dialogs)]
    quota = -(-samples // max(1, len(counts)))
    found: dict[tuple[int, int], list[Dialog]] = {(length, each): [] for length in lengths for each in counts}
    seen: list[int] = []
    with progress_bar("count tokens of conversations", len(dialogs)) as advance:
        for dialog in dialogs:
            advance(1, path)
            open_bins = [key for key, chosen in found.items() if key[1] == dialog.needles and len(chosen) < quota]
            if not open_bins or dialog.chars > CHARS_PER_TOKEN * max(lengths):
                continue
            tokens = count_tokens(dialog)
            seen.append(tokens)
            for length, each in open_bins:
                if belongs(tokens, length):
                    found[length, each].append(dialog)
    chosen = {length: _interleave([found[length, each] for each in counts])[:samples] for length in lengths}
    for length, members in chosen.items():
        if not members:
            spread = f"; those counted have {min(seen)} to {max(seen)} tokens" if seen else ""
            raise DataError(
                f"mrcr: {path}: no conversation with {' or '.join(map(str, needles))} needles has "
                f"{length // 2 + 1} to {length} tokens{spread}. Remove length {format_size(length)}, or use another "
                f"file or other needles. {SOURCE}."
            )
    return chosen


def _interleave(groups: Sequence[Sequence[Dialog]]) -> list[Dialog]:
    return [dialog for several in zip_longest(*groups) for dialog in several if dialog is not None]
