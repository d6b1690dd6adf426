"""The parent of every config class. Each lives beside what it configures; a recipe is made of them.

Frozen, unknown keys refused, checked on construction. What a class cannot be on its own
(`base: -1`) it refuses with a ValueError, which the recipe checker turns into a sentence
with the line, the value and what is allowed.
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TypeVar

from pydantic import BaseModel, ConfigDict

from unspool.core.errors import ConfigError


class Config(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False)


# Registries are plain dicts; this finds an entry or says which name was probably meant.


Entry = TypeVar("Entry")


def nearest(name: str, allowed: Iterable[str]) -> str | None:
    found = get_close_matches(name, list(allowed), n=1, cutoff=0.6)
    return found[0] if found else None


def lookup(registry: Mapping[str, Entry], name: str, *, kind: str) -> Entry:
    if name in registry:
        return registry[name]
    guess = nearest(name, registry)
    hint = f"Did you mean {guess!r}? " if guess else ""
    raise ConfigError(f"{kind} {name!r} is not known. {hint}Known: {', '.join(sorted(registry))}.")
