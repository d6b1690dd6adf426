"""The words around questions: our own, or others that a user gives in a file.

In: the forms of a suite (which texts each task has, in our words, and what has to stand in them), a YAML or JSON file.
Out: `Wording`, which fills texts with what is asked.
Promise: a file is checked whole before any work, and every mistake is told with the task and text that it is in; a
hash of what the file says goes into everything that is written, so that results with different words are never mixed.
Texts are filled as Python's `format` does it with plain names, so that a brace of its own is doubled.
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
_HASH = 16  # letters


@dataclass(frozen=True, kw_only=True)
class Text:
    """One text of a task."""

    own: str  # in our words
    needs: tuple[str, ...] = ()  # placeholders without which the question could not be answered or scored
    may: tuple[str, ...] = ()
    first: str | None = None  # the placeholder that no other may come before


Form = Mapping[str, Text]
Forms = Mapping[str, Form]  # by task


@dataclass(frozen=True, kw_only=True)
class Wording:
    forms: Forms
    given: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # by task and text
    answer_tokens: Mapping[str, int] = field(default_factory=dict)  # by task
    source: str | None = None  # the file; None: our own words

    @cached_property
    def hash(self) -> str | None:
        """Of what the file says, not of how it is written; None of our own words."""
        if self.source is None:
            return None
        return digest([self.given, self.answer_tokens])[:_HASH]

    def text(self, task: str, name: str) -> str:
        """As written, braces and all."""
        return self.given.get(task, {}).get(name, self.forms[task][name].own)

    def fill(self, task: str, name: str, **values: str) -> str:
        return self.text(task, name).format(**values)

    def around(self, task: str, name: str = TEMPLATE, **values: str) -> tuple[str, str]:
        """What stands before and after {context}, filled."""
        before, after = _cut(self.text(task, name), CONTEXT)
        return before.format(**values), after.format(**values)

    def after_context(self, task: str) -> str:
        """What a template says between {context} and the next placeholder."""
        rest = _cut(self.text(task, TEMPLATE), CONTEXT)[1]
        return next(iter(Formatter().parse(rest)))[0] if rest else ""

    def of(self, forms: Forms) -> "Wording":
        """What is said of tasks that another suite has as well."""
        given = {task: texts for task, texts in self.given.items() if task in forms}
        return Wording(forms=forms, given=given, source=self.source)


def literal(text: str) -> str:
    """A text of our own as one that says just that when it is filled."""
    return text.replace("{", "{{").replace("}", "}}")


def said_before(text: str, placeholder: str) -> str:
    """What a text says before its first placeholder, which is this one."""
    return _cut(text, placeholder)[0].format()


def _cut(text: str, placeholder: str) -> tuple[str, str]:
    """A text before and after the first place of a placeholder, both still to be filled."""
    parts = list(Formatter().parse(text))
    at = next(number for number, part in enumerate(parts) if part[1] == placeholder)
    head = "".join(_written(*part[:2]) for part in parts[:at]) + literal(parts[at][0])
    return head, "".join(_written(*part[:2]) for part in parts[at + 1 :])


def _written(said: str, name: str | None) -> str:
    return literal(said) + ("" if name is None else f"{{{name}}}")


def read_wording(path: str, suite: str, forms: Forms) -> Wording:
    """A file's wording for a suite; ConfigError names everything that is wrong with it."""
    if not forms:
        raise ConfigError(f"wording: suite {suite} has no texts that a file could replace; leave `wording` out.")
    loaded = _loaded(Path(path))
    problems = [*_problems(loaded, suite, forms)]
    if problems:
        listed = "".join(f"\n  {problem}" for problem in problems)
        raise ConfigError(f"wording {path}: {len(problems)} mistake{'s' if len(problems) > 1 else ''}:{listed}")
    tasks: dict[str, dict[str, Any]] = loaded["tasks"]
    return Wording(
        forms=forms,
        given={task: {name: text for name, text in texts.items() if name != TOKENS} for task, texts in tasks.items()},
        answer_tokens={task: texts[TOKENS] for task, texts in tasks.items() if TOKENS in texts},
        source=Path(path).name,
    )


def _loaded(path: Path) -> Any:
    if not path.is_file():
        raise ConfigError(f"wording {path}: no such file; give a YAML or JSON file with the words of a suite's tasks.")
    try:
        # JSON is YAML as well.
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"wording {path}: cannot be read as YAML or JSON ({said}).") from error


def _problems(loaded: Any, suite: str, forms: Forms) -> Iterator[str]:
    if not isinstance(loaded, dict) or not isinstance(loaded.get("tasks"), dict) or not loaded["tasks"]:
        yield "it must have `suite`, a name, and `tasks`, each with its texts."
        return
    for name in loaded.keys() - {"suite", "tasks"}:
        yield f"{name!r} is not known beside `suite` and `tasks`."
    if loaded.get("suite") != suite:
        yield f"it is for suite {loaded.get('suite')!r}, and this is {suite}; `suite: {suite}` must stand in it."
        return
    for task, texts in loaded["tasks"].items():
        if task not in forms:
            yield f"{task}: {suite} has no such task{_hint(str(task), forms)}."
        elif not isinstance(texts, dict) or not texts:
            yield f"{task}: its texts must stand below it, such as {TEMPLATE} and {PREFIX}."
        else:
            for name, text in texts.items():
                yield from (f"{task}, {name}: {problem}" for problem in _text_problems(name, text, forms[task]))


def _text_problems(name: Any, text: Any, form: Form) -> Iterator[str]:
    if name == TOKENS:
        if type(text) is not int or text < 1:
            yield f"must be a whole number of tokens, 1 or more, and is {text!r}."
        return
    if name not in form:
        yield f"this task has no such text{_hint(str(name), [*form, TOKENS])}; it has {', '.join([*form, TOKENS])}."
        return
    if not isinstance(text, str):
        yield f"must be text, and is {text!r}."
        return
    try:
        parts = list(Formatter().parse(text))
    except ValueError as error:
        yield f"its braces do not match ({error}); a brace that is no placeholder is doubled, {{{{ or }}}}."
        return
    found = [place for _, place, *_ in parts if place is not None]
    allowed = (*form[name].needs, *form[name].may)
    if any(spec or conversion for _, place, spec, conversion in parts if place is not None):
        yield "placeholders are plain names in braces, without ! or :."
        return
    for place in dict.fromkeys(found):
        if place not in allowed:
            known = ", ".join(f"{{{one}}}" for one in allowed) or "none"
            yield f"{{{place}}} is not known{_hint(place, allowed)}; it may have {known}, and other braces are doubled."
    for place in form[name].needs:
        if place not in found:
            yield f"{{{place}}} is missing."
        elif place == CONTEXT and found.count(place) > 1:
            yield f"{{{place}}} must stand there once."
    first = form[name].first
    if first in found and found[0] != first:
        yield f"{{{first}}} must be its first placeholder."


def _hint(name: str, known: Any) -> str:
    guess = nearest(name, known)
    return f" (did you mean {guess!r}?)" if guess else ""
