"""Texts with places that are filled in, `{document}` say, and the checks of a user's own.

Promise: what is filled in is never read as a template; a mistake in a user's file is told with the text it is in.
"""

import re
from typing import Any

from unspool.base.errors import ConfigError
from unspool.base.lookup import nearest

_PLACE = re.compile(r"\{(\w+)\}")


def fill(template: str, **parts: str) -> str:
    # In one go, so that a document that spells "{question}" stays as it is.
    return _PLACE.sub(lambda found: parts.get(found[1], found[0]), template)


def check_name(where: str, what: str, name: Any, known: dict[str, Any]) -> None:
    if name not in known:
        guess = nearest(str(name), known)
        hint = f" did you mean {guess!r}?" if guess else ""
        raise ConfigError(f"{where}: {what} {name!r} is not known;{hint} known: {', '.join(known)}.")


def check_places(where: str, text: str, needed: set[str], allowed: set[str]) -> None:
    found = set(_PLACE.findall(text))
    if missing := needed - found:
        raise ConfigError(f"{where} lacks {{{min(missing)}}}, so something would be left out.")
    if unknown := found - needed - allowed:
        places = ", ".join(f"{{{name}}}" for name in sorted(needed | allowed)) or "none"
        raise ConfigError(f"{where} has {{{min(unknown)}}}; places here: {places}.")
