"""Render conversations with a model's chat template, as `tokenizer.apply_chat_template` does.

If the template has `{% generation %}` marks, `BEGIN` and `END` are written around the marked text. The text is the same
on every day and in every version of `transformers`: templates that write today's date get a fixed date. Templates are
sandboxed, so they can neither open files nor run code. Messages that a template rejects are Unreadable.
"""

import json
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from unspool.core.artifacts import digest
from unspool.core.errors import ConfigError
from unspool.data.sources.base import Message
from unspool.data.sources.files import Unreadable, first_line

# File name that `transformers` uses in a model's folder.
TEMPLATE_FILE = "chat_template.jinja"
# Unicode noncharacters, reserved for internal use; a conversation that contains one is rejected.
BEGIN, END = "\ufdd0", "\ufdd1"
PRIVATE = re.compile("[\ufdd0-\ufddf]")
# The date that Llama's template uses without a date function.
TODAY = datetime(2024, 7, 26)
# Seconds per conversation, and maximum length of a string that a template multiplies.
MAX_SECONDS = 10.0
MAX_PRODUCT = 10_000_000
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    text: str
    special_tokens: tuple[tuple[str, str], ...]  # bos_token, eos_token, …
    merges_system: bool = False  # without a system role: its text goes before the first user message

    @property
    def has_marks(self) -> bool:
        return _GENERATION.search(self.text) is not None

    @property
    def digest(self) -> str:
        return digest([self.text, self.special_tokens, self.merges_system, str(TODAY)])

    def render(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """Render the conversation; with `prompt`, also the generation prompt."""
        turns = [{"role": message.role, "content": message.content} for message in messages]
        known = dict(self.special_tokens) | {"tools": None, "documents": None}
        try:
            with _time_limit():
                return compile_template(self.text).render(messages=turns, add_generation_prompt=prompt, **known)
        except Exception as error:  # a template is foreign code and can raise any type
            raise Unreadable("template", f"the chat template rejects it: {first_line(error)}") from error

    def merge(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Put leading system messages before the first user message, if the template has no system role."""
        count = next((at for at, message in enumerate(messages) if message.role != "system"), len(messages))
        if not self.merges_system or not count:
            return tuple(messages)
        first, others = messages[count : count + 1], messages[count + 1 :]
        if not first or first[0].role != "user":
            raise Unreadable("template", "the chat template has no system role, and no user message follows")
        words = [message.content for message in messages[: count + 1]]
        return (Message("user", "\n\n".join(words)), *others)


def own_template(tokenizer: Any, text: str | None = None) -> ChatTemplate:
    """Return the chat template of a tokenizer, or `text` with the tokenizer's special tokens."""
    special = {key: value for key, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
    text = str(tokenizer.get_chat_template()) if text is None else text
    return ChatTemplate(text=text, special_tokens=tuple(sorted(special.items())))


def load_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"template {path}: cannot be read as a Jinja file ({first_line(error)}).") from error


def common_template(folders: Mapping[str, Path], whose: str) -> str | None:
    """Return the common chat template of corpora or datasets; None if none of them has conversations."""
    texts = {name: (folder / TEMPLATE_FILE) for name, folder in folders.items()}
    found = {name: path.read_text(encoding="utf-8") for name, path in texts.items() if path.is_file()}
    if len(set(found.values())) > 1:
        raise ConfigError(
            f"{whose}: {' and '.join(found)} were rendered with different chat templates, but a model has one; "
            "set the same template for their sources."
        )
    return next(iter(found.values()), None)


def check_template(template: ChatTemplate, name: str) -> ChatTemplate:
    """Set the template's `merges_system`; ConfigError if it cannot render the simplest conversation."""
    try:
        compile_template(template.text)
    except Exception as error:
        line = getattr(error, "lineno", None)
        at = f" in line {line}" if line else ""
        raise ConfigError(f"{name}: not a Jinja template ({first_line(error)}{at}).") from error
    talk = (Message("user", "Ahoj"), Message("assistant", "Dobry den"))
    try:
        template.render(talk)
    except Unreadable as error:
        raise ConfigError(f"{name}: it cannot render a user message with an answer: {error.detail}.") from error
    # Some templates reject the role, others omit it silently.
    system = Message("system", "Povidej")
    try:
        is_rendered = system.content in template.render((system, *talk))
    except Unreadable:
        is_rendered = False
    return template if is_rendered else replace(template, merges_system=True)


@contextmanager
def _time_limit() -> Iterator[None]:
    """Raise TimeoutError in a template that runs too long. This works only in the main thread."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(*_: Any) -> None:
        raise TimeoutError(f"it takes longer than {MAX_SECONDS:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, MAX_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class _Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox that also rejects products and powers that would fill memory."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        a, b = (len(value) if isinstance(value, Sized) else value for value in (left, right))
        grows = operator == "**" or isinstance(left, Sized) or isinstance(right, Sized)
        if grows and max(abs(a), abs(b), abs(a * b)) > MAX_PRODUCT:
            raise SecurityError(f"{operator} would make more than {MAX_PRODUCT} characters")
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """`{% generation %} … {% endgeneration %}`: the assistant's text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{BEGIN}{caller()}{END}"


@lru_cache(maxsize=8)
def compile_template(text: str) -> Template:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = TODAY.strftime
    return environment.from_string(text)


def _to_json(value: Any, **options: Any) -> str:
    # Jinja's own filter escapes HTML.
    return json.dumps(value, **{"ensure_ascii": False} | options)


def _refuse(message: str) -> None:
    raise TemplateError(message)
