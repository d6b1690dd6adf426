"""Registries are plain dicts; this finds an entry or says which name was probably meant."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TypeVar

from unspool.base.errors import ConfigError

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
