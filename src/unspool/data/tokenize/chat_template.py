"""Write conversations out with a model's chat template, as `tokenizer.apply_chat_template` does.

In: a Jinja template, the tokenizer's special tokens, messages. Out: text, in which `BEGIN` and `END` stand around
what `{% generation %}` marks, if the template has such marks.
Promise: the same text on every day and in every version of `transformers`: templates that write today's date get a
fixed one. A template can neither reach files nor run code (it is sandboxed). What it refuses is Unreadable.
Elsewhere: what is trained on where there are no marks (chat_spans.py), tokens (chat_tokens.py).
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from unspool.core.artifacts import digest
from unspool.core.errors import ConfigError
from unspool.data.sources.base import Message
from unspool.data.sources.files import Unreadable, first_line

# As `transformers` names it in a model's folder.
TEMPLATE_FILE = "chat_template.jinja"
# Characters that Unicode keeps free for uses such as these; a conversation that holds one is refused.
BEGIN, END = "\ufdd0", "\ufdd1"
PRIVATE = re.compile("[\ufdd0-\ufddf]")
# The date that Llama's template falls back to where it cannot ask for today's.
TODAY = datetime(2024, 7, 26)
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    text: str
    special_tokens: tuple[tuple[str, str], ...]  # what templates call bos_token, eos_token, …
    merges_system: bool = False  # it has no system role, so its words go before the first user's

    @property
    def has_marks(self) -> bool:
        return _GENERATION.search(self.text) is not None

    @property
    def digest(self) -> str:
        return digest([self.text, self.special_tokens, self.merges_system, str(TODAY)])

    def render(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """The conversation as text; with `prompt` also what asks the assistant to go on."""
        turns = [{"role": message.role, "content": message.content} for message in messages]
        known = dict(self.special_tokens) | {"tools": None, "documents": None}
        try:
            return compile_template(self.text).render(messages=turns, add_generation_prompt=prompt, **known)
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise Unreadable("template", f"the chat template refuses it: {first_line(error)}") from error

    def merge(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """The messages; where there is no system role, its words at the beginning go before the first user's."""
        count = next((at for at, message in enumerate(messages) if message.role != "system"), len(messages))
        if not self.merges_system or not count:
            return tuple(messages)
        first, others = messages[count : count + 1], messages[count + 1 :]
        if not first or first[0].role != "user":
            raise Unreadable("template", "the chat template has no system role, and no user's message follows it")
        words = [message.content for message in messages[: count + 1]]
        return (Message("user", "\n\n".join(words)), *others)


def load_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"template {path}: cannot be read as a Jinja file ({first_line(error)}).") from error


def common_template(folders: Mapping[str, Path], whose: str) -> str | None:
    """The template that corpora, or rows, of conversations were written out with; None if there are none among them."""
    texts = {name: (folder / TEMPLATE_FILE) for name, folder in folders.items()}
    found = {name: path.read_text(encoding="utf-8") for name, path in texts.items() if path.is_file()}
    if len(set(found.values())) > 1:
        raise ConfigError(
            f"{whose}: {' and '.join(found)} were written out with different chat templates, and a model has one; "
            "give their sources the same template."
        )
    return next(iter(found.values()), None)


def check_template(template: ChatTemplate, name: str) -> ChatTemplate:
    """The template, its `merges_system` settled; ConfigError if it cannot write out the simplest conversation."""
    try:
        compile_template(template.text)
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        at = f" in line {line}" if line else ""
        raise ConfigError(f"{name}: not a Jinja template ({first_line(error)}{at}).") from error
    talk = (Message("user", "Ahoj"), Message("assistant", "Dobry den"))
    try:
        template.render(talk)
    except Unreadable as error:
        raise ConfigError(f"{name}: it cannot write out a user's message with an answer: {error.detail}.") from error
    # Some refuse the role and some leave it out without a word.
    system = Message("system", "Povidej")
    try:
        is_written = system.content in template.render((system, *talk))
    except Unreadable:
        is_written = False
    return template if is_written else replace(template, merges_system=True)


class _Generation(Extension):
    """`{% generation %} … {% endgeneration %}`: what the assistant itself writes."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{BEGIN}{caller()}{END}"


@lru_cache(maxsize=8)
def compile_template(text: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = TODAY.strftime
    return environment.from_string(text)


def _to_json(value: Any, **options: Any) -> str:
    # Jinja's own escapes what HTML would take for marks.
    return json.dumps(value, **{"ensure_ascii": False} | options)


def _refuse(message: str) -> None:
    raise TemplateError(message)
