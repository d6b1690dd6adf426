"""Tokens and loss masks of conversations.

Tokens are those that the tokenizer gives for the rendered conversation, without extra BOS or EOS. The mask over target
tokens is true on the assistant's text and on the tokens that end its turn. Message text is never parsed for control
tokens: "<|im_end|>" in a message gets the tokens of those characters, and only the template writes control tokens. To
ensure this, control tokens are renamed to names that no text can spell. Then the message text is inserted.

No token crosses a mask boundary: the text is split there, as when a model continues after a prompt.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import AddedToken, Tokenizer

from unspool.core.errors import ConfigError
from unspool.data.sources.base import Message
from unspool.data.sources.files import Unreadable
from unspool.data.tokenize.chat_template import BEGIN, END, PRIVATE, ChatTemplate, check_template, own_template

logger = logging.getLogger(__name__)

_PROBE = "\ufdd2"  # placeholder for an answer


def mark_trained(template: ChatTemplate, messages: Sequence[Message]) -> str:
    """Render a conversation with `BEGIN` and `END` around the trained text."""
    whole = template.render(messages)
    if template.has_marks:
        return whole
    parts: list[str] = []
    done = 0
    for at, message in enumerate(messages):
        if message.role == "assistant":
            start, stop = _answer_span(template, messages, at, whole)
            if start < done or stop <= start:
                raise _unclear(at)
            parts += [whole[done:start], BEGIN, whole[start:stop], END]
            done = stop
    return "".join([*parts, whole[done:]])


def _answer_span(template: ChatTemplate, messages: Sequence[Message], at: int, whole: str) -> tuple[int, int]:
    """Find the start of an answer and the end of its turn in `whole`."""
    prompt = _render_prompt(template, messages[:at])
    through = template.render(messages[: at + 1]).rstrip()
    if prompt is not None and through.startswith(prompt) and whole.startswith(through):
        return len(prompt), len(through)
    before, after = _render_around(template, messages, at)
    if not (whole.startswith(before) and whole.endswith(after) and len(before) + len(after) <= len(whole)):
        raise _unclear(at)
    so_far, ending = _render_around(template, messages[: at + 1], at)
    if not after.startswith(ending.rstrip()):
        raise _unclear(at)
    stop = len(whole) - len(after) + len(ending.rstrip())
    # Text between the prompt and the answer, such as a space, also belongs to the assistant.
    if prompt is None or not so_far.startswith(prompt):
        return len(before), stop
    if before.startswith(prompt):
        return len(prompt), stop
    lead = so_far.removeprefix(prompt)
    return len(before.removesuffix(lead)), stop


def _render_prompt(template: ChatTemplate, messages: Sequence[Message]) -> str | None:
    """Render the prompt for the next answer; None if the template cannot, such as before the first message."""
    try:
        return template.render(messages, prompt=True)
    except Unreadable:
        return None


def _render_around(template: ChatTemplate, messages: Sequence[Message], at: int) -> tuple[str, str]:
    """Return the text before and after an answer, for any answer."""
    probe = [*messages[:at], Message("assistant", _PROBE), *messages[at + 1 :]]
    before, found, after = template.render(probe).partition(_PROBE)
    if not found or _PROBE in after:
        raise _unclear(at)
    return before, after


def _unclear(at: int) -> Unreadable:
    return Unreadable("unclear_mask", f"the place of message {at + 1} in the rendered conversation is ambiguous")


# Importing this takes seconds, in every worker process.
if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Characters around the number of a control token: in its new name, and in the placeholder for text that spells it.
_NAME, _SPELLED = ("\ufdd3", "\ufdd4"), ("\ufdd5", "\ufdd6")
_CUT = "\ufdd7"  # splits the text as a token, and is then removed
_NUMBERED = re.compile(f"(?:{_NAME[0]}|{_SPELLED[0]})([0-9]+)(?:{_NAME[1]}|{_SPELLED[1]})")


@dataclass(frozen=True, slots=True)
class Encoded:
    text: str
    tokens: np.ndarray  # uint32
    loss_mask: np.ndarray  # bool


@dataclass(frozen=True, kw_only=True)
class ChatEncoder:
    """A tokenizer and its chat template; picklable for worker processes."""

    template: ChatTemplate
    definition: str  # of the tokenizer, with renamed control tokens
    controls: tuple[str, ...]  # original names of the control tokens

    def encode(self, messages: Sequence[Message]) -> Encoded:
        """Render and tokenize; Unreadable if the template rejects the messages or nothing would be trained on."""
        marked = mark_trained(self.template, [self._hide(message) for message in self.template.merge(messages)])
        text, spans = _remove_marks(self._name_controls(marked))
        tokens, mask = _tokenize(self.definition, text, spans)
        if not mask.any():
            raise Unreadable("nothing_trained", "no token of the conversation would be trained on")
        return Encoded(_NUMBERED.sub(lambda found: self.controls[int(found[1])], text), tokens, mask)

    def _hide(self, message: Message) -> Message:
        if found := PRIVATE.search(message.content):
            raise Unreadable("noncharacter", f"a message contains U+{ord(found[0]):04X}, which is not a character")
        pattern, numbers = _controls(self.controls)
        spelled = pattern.sub(lambda found: f"{_SPELLED[0]}{numbers[found[0]]}{_SPELLED[1]}", message.content)
        return Message(message.role, spelled)

    def _name_controls(self, text: str) -> str:
        pattern, numbers = _controls(self.controls)
        named = pattern.sub(lambda found: f"{_NAME[0]}{numbers[found[0]]}{_NAME[1]}", text)
        spelled = re.compile(f"{_SPELLED[0]}([0-9]+){_SPELLED[1]}")
        return spelled.sub(lambda found: self.controls[int(found[1])], named)


def build_chat_encoder(tokenizer: PreTrainedTokenizerFast, template: str | None, *, source: str) -> ChatEncoder:
    """Build an encoder; `template` replaces the tokenizer's own. ConfigError if it allows no loss mask."""
    name = f"sources.{source}.template"
    if template is None:
        name = f"the chat template of tokenizer {tokenizer.name_or_path!r}"
        if not tokenizer.chat_template:
            raise ConfigError(
                f"source {source}: tokenizer {tokenizer.name_or_path!r} has no chat template; "
                f"set sources.{source}.template to a Jinja file, or use a model that has one."
            )
    settled = check_template(own_template(tokenizer, template), name)
    if settled.merges_system:
        logger.warning(
            f"source {source}: {name} has no system role; system messages are merged into the first user message"
        )
    definition, controls = _rename_controls(tokenizer.backend_tokenizer.to_str())
    encoder = ChatEncoder(template=settled, definition=definition, controls=controls)
    _check_masks(encoder, name)
    return encoder


def _check_masks(encoder: ChatEncoder, name: str) -> None:
    """Raise ConfigError unless a small conversation trains exactly on its answers and end-of-turn tokens."""
    questions, answers = ("Prvni otazka", "Druha otazka"), ("Jedna odpoved", "Dalsi odpoved")
    talk = [
        Message(role, text)
        for pair in zip(questions, answers, strict=True)
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    try:
        marked = mark_trained(encoder.template, talk)
    except Unreadable as error:
        raise ConfigError(f"{name}: cannot find the assistant's tokens: {error.detail}.") from error
    trained = re.findall(f"{BEGIN}([^{BEGIN}{END}]*){END}", marked)
    if not "".join(trained).strip():
        raise ConfigError(
            f"{name}: its generation marks are empty, so nothing would be trained on; mark the assistant's text."
        )
    if any(question in text for question in questions for text in trained):
        raise ConfigError(f"{name}: its generation marks include user text; mark only the assistant's text.")
    joined = "".join(trained)
    if not all(answer in joined for answer in answers):
        raise ConfigError(f"{name}: not every answer of a conversation would be trained on; see docs/tutorials/sft.md.")
    if not all(text.partition(answer)[2].strip() for answer, text in zip(answers, trained, strict=False)):
        raise ConfigError(
            f"{name}: no trained token follows the assistant's text, so a model would not learn to stop; "
            "end its turns with eos_token, within the generation marks if there are any."
        )


@lru_cache(maxsize=8)
def _controls(controls: tuple[str, ...]) -> tuple[re.Pattern[str], dict[str, int]]:
    """Build a pattern that finds control tokens, the longest first, and their numbers."""
    longest_first = sorted(controls, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)"), {name: at for at, name in enumerate(controls)}


def _rename_controls(definition: str) -> tuple[str, tuple[str, ...]]:
    """Rename control tokens to names that no text can spell; return the new definition and the original names."""
    content = json.loads(definition)
    content |= {"post_processor": None, "truncation": None, "padding": None}
    controls = tuple(token["content"] for token in content["added_tokens"] if token["special"])
    names = {control: f"{_NAME[0]}{at}{_NAME[1]}" for at, control in enumerate(controls)}
    for token in content["added_tokens"]:
        token["content"] = names[token["content"]] if token["special"] else token["content"]
    model = content["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(name, name): number for name, number in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(name, name), score] for name, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return json.dumps(content, ensure_ascii=False), controls


@lru_cache(maxsize=2)
def _load(definition: str) -> tuple[Tokenizer, int]:
    tokenizer = Tokenizer.from_str(definition)
    tokenizer.add_special_tokens([AddedToken(_CUT, special=True, normalized=False)])
    cut = tokenizer.token_to_id(_CUT)
    assert cut is not None
    return tokenizer, cut


def _remove_marks(marked: str) -> tuple[str, list[tuple[int, int]]]:
    """Remove `BEGIN` and `END`; return the text and the spans between them."""
    spans: list[tuple[int, int]] = []
    parts: list[str] = []
    at = begin = 0
    for part in re.split(f"([{BEGIN}{END}])", marked):
        if part == BEGIN:
            begin = at
        elif part == END:
            spans.append((begin, at))
        else:
            parts.append(part)
            at += len(part)
    text = "".join(parts)
    return text, [(start, _turn_end(text, start, stop)) for start, stop in spans if stop > start]


def _turn_end(text: str, start: int, stop: int) -> int:
    """Return the end of a span, without the space after the control token that ends a turn."""
    stripped = text[start:stop].rstrip()
    return start + len(stripped) if stripped.endswith(_NAME[1]) else stop


def _tokenize(definition: str, text: str, spans: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Tokenize a text whose `spans` are trained on; return tokens and mask."""
    boundaries = np.array(spans, dtype=np.int64).reshape(-1)
    ids, starts, stops = _offsets(definition, text, [])
    crossed: list[int] = []
    first, last = np.searchsorted(boundaries, starts, side="right"), np.searchsorted(boundaries, stops, side="left")
    for token in np.flatnonzero(first < last).tolist():
        held = slice(int(first[token]), int(last[token]))
        if text[starts[token] : stops[token]].strip().endswith(_NAME[1]):
            # Some control tokens include the space around them.
            boundaries[held] = stops[token]
        else:
            crossed += boundaries[held].tolist()
    if crossed:
        ids, starts, stops = _offsets(definition, text, sorted(set(crossed)))
    inside = np.searchsorted(boundaries, starts, side="right")
    # A token without characters belongs to the next token.
    mask: np.ndarray = (inside % 2 == 1) & (stops <= np.append(boundaries, 0)[inside])
    return ids.astype(np.uint32), mask


def _offsets(definition: str, text: str, cuts: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokenize a text that is split at `cuts`; return ids, and the start and end of each token in the text."""
    tokenizer, cut = _load(definition)
    pieces = [text[start:stop] for start, stop in pairwise([0, *cuts, len(text)])]
    encoding = tokenizer.encode(_CUT.join(pieces), add_special_tokens=False)
    ids = np.array(encoding.ids, dtype=np.int64)
    places = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2) - np.cumsum(ids == cut)[:, None]
    kept = ids != cut
    return ids[kept], places[kept, 0], places[kept, 1]
