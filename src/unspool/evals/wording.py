"""Wording of tasks: built-in, or from a user's YAML or JSON file.

The file is checked completely before any work. Every mistake is reported with its task and text. All results contain a
hash of the wording, so results with different wordings are never mixed. Texts are filled by Python's `format` with
plain names, so literal braces are doubled.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from string import Formatter
from typing import Any

import yaml

from unspool.core.artifacts import digest
from unspool.core.config import nearest
from unspool.core.errors import ConfigError

TEMPLATE, PREFIX, TOKENS = "template", "answer_prefix", "answer_tokens"
CONTEXT = "context"
_HASH_LENGTH = 16


@dataclass(frozen=True, kw_only=True)
class Text:
    """One text of a task, with its required and optional placeholders."""

    own: str
    needs: tuple[str, ...] = ()  # required to answer or score the question
    may: tuple[str, ...] = ()
    first: str | None = None  # this placeholder must come first


Form = Mapping[str, Text]
Forms = Mapping[str, Form]  # by task


@dataclass(frozen=True, kw_only=True)
class Wording:
    forms: Forms
    given: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # by task and text
    answer_tokens: Mapping[str, int] = field(default_factory=dict)  # by task
    source: str | None = None  # the file; None: built-in texts

    @cached_property
    def hash(self) -> str | None:
        """Hash of the content, independent of formatting. None for built-in texts."""
        return None if self.source is None else digest([self.given, self.answer_tokens])[:_HASH_LENGTH]

    def text(self, task: str, name: str) -> str:
        """The text with its placeholders."""
        return self.given.get(task, {}).get(name, self.forms[task][name].own)

    def fill(self, task: str, name: str, **values: str) -> str:
        return self.text(task, name).format(**values)

    def around(self, task: str, name: str = TEMPLATE, **values: str) -> tuple[str, str]:
        """The filled texts before and after {context}."""
        before, after = _cut(self.text(task, name), CONTEXT)
        return before.format(**values), after.format(**values)

    def after_context(self, task: str) -> str:
        """Text of the template between {context} and the next placeholder."""
        rest = _cut(self.text(task, TEMPLATE), CONTEXT)[1]
        return next(iter(Formatter().parse(rest)))[0] if rest else ""

    def of(self, forms: Forms) -> "Wording":
        """The part for tasks that another suite also has."""
        given = {task: texts for task, texts in self.given.items() if task in forms}
        return Wording(forms=forms, given=given, source=self.source)


def literal(text: str) -> str:
    """Escape braces, so that filling returns the original text."""
    return text.replace("{", "{{").replace("}", "}}")


def said_before(text: str, placeholder: str) -> str:
    """Text before the first placeholder, which must be `placeholder`."""
    return _cut(text, placeholder)[0].format()


def _cut(text: str, placeholder: str) -> tuple[str, str]:
    """Split a text at the first occurrence of a placeholder. Both parts are unfilled."""
    parts = list(Formatter().parse(text))
    at = next(number for number, part in enumerate(parts) if part[1] == placeholder)
    head = "".join(_written(*part[:2]) for part in parts[:at]) + literal(parts[at][0])
    return head, "".join(_written(*part[:2]) for part in parts[at + 1 :])


def _written(said: str, name: str | None) -> str:
    return literal(said) + ("" if name is None else f"{{{name}}}")


def read_wording(path: str, suite: str, forms: Forms) -> Wording:
    """Read a wording file for a suite. ConfigError lists all mistakes."""
    if not forms:
        raise ConfigError(f"wording: suite {suite} has no replaceable texts; remove `wording`.")
    loaded = _loaded(Path(path))
    return checked_wording(loaded, suite, forms, label=f"wording {path}", source=Path(path).name)


def checked_wording(loaded: Any, suite: str, forms: Forms, *, label: str, source: str) -> Wording:
    """Check the content of a wording file. ConfigError lists all mistakes."""
    problems = [*_problems(loaded, suite, forms)]
    if problems:
        listed = "".join(f"\n  {problem}" for problem in problems)
        raise ConfigError(f"{label}: {len(problems)} mistake{'s' if len(problems) > 1 else ''}:{listed}")
    tasks: dict[str, dict[str, Any]] = loaded["tasks"]
    return Wording(
        forms=forms,
        given={task: {name: text for name, text in texts.items() if name != TOKENS} for task, texts in tasks.items()},
        answer_tokens={task: texts[TOKENS] for task, texts in tasks.items() if TOKENS in texts},
        source=source,
    )


def _loaded(path: Path) -> Any:
    if not path.is_file():
        raise ConfigError(
            f"wording {path}: no such file; pass a YAML or JSON file with the wording of a suite's tasks."
        )
    try:
        # JSON is also YAML.
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"wording {path}: cannot be read as YAML or JSON ({said}); correct the file.") from error


def _problems(loaded: Any, suite: str, forms: Forms) -> Iterator[str]:
    if not isinstance(loaded, dict) or not isinstance(loaded.get("tasks"), dict) or not loaded["tasks"]:
        yield "it needs the keys suite (a name) and tasks (the texts of each task)."
        return
    for name in loaded.keys() - {"suite", "tasks"}:
        yield f"{name!r} is not a known key; the keys are suite and tasks."
    if loaded.get("suite") != suite:
        yield f"it is for suite {loaded.get('suite')!r} instead of {suite}; write `suite: {suite}`."
        return
    for task, texts in loaded["tasks"].items():
        if task not in forms:
            yield f"{task}: {suite} has no such task{_hint(str(task), forms)}."
        elif not isinstance(texts, dict) or not texts:
            yield f"{task}: add its texts, such as {TEMPLATE} and {PREFIX}."
        else:
            for name, text in texts.items():
                yield from (f"{task}, {name}: {problem}" for problem in _text_problems(name, text, forms[task]))


def _text_problems(name: Any, text: Any, form: Form) -> Iterator[str]:
    if name == TOKENS:
        if type(text) is not int or text < 1:
            yield f"must be a whole number of tokens, at least 1, but is {text!r}."
        return
    if name not in form:
        yield f"this task has no such text{_hint(str(name), [*form, TOKENS])}; it has {', '.join([*form, TOKENS])}."
        return
    if not isinstance(text, str):
        yield f"must be text, but is {text!r}."
        return
    try:
        parts = list(Formatter().parse(text))
    except ValueError as error:
        yield f"its braces do not match ({error}); double literal braces: {{{{ or }}}}."
        return
    found = [place for _, place, *_ in parts if place is not None]
    allowed = (*form[name].needs, *form[name].may)
    if any(spec or conversion for _, place, spec, conversion in parts if place is not None):
        yield "placeholders must be plain names in braces, without ! or :."
        return
    for place in dict.fromkeys(found):
        if place not in allowed:
            known = ", ".join(f"{{{one}}}" for one in allowed) or "none"
            yield f"{{{place}}} is not known{_hint(place, allowed)}; allowed are {known}; double literal braces."
    for place in form[name].needs:
        if place not in found:
            yield f"{{{place}}} is missing."
        elif place == CONTEXT and found.count(place) > 1:
            yield f"{{{place}}} must occur once."
    first = form[name].first
    if first in found and found[0] != first:
        yield f"{{{first}}} must be the first placeholder."


def _hint(name: str, known: Any) -> str:
    guess = nearest(name, known)
    return f" (did you mean {guess!r}?)" if guess else ""
