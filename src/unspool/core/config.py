"""The parent of every config class. Each lives beside what it configures; a recipe is made of them.

Frozen, unknown keys refused, checked on construction. What a class cannot be on its own
(`base: -1`) it refuses with a ValueError, which the recipe checker turns into a sentence
with the line, the value and what is allowed.
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import reduce
from operator import or_
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, TypeAdapter
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

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


class FromRegistry:
    """Pydantic annotation of a config whose class is looked up in a registry by the value of its key `tag`.

    Errors and the JSON schema are those of a discriminated union of the registered classes. The registry is read at
    validation, so classes that are registered later are found too. Without the key, the class is that of `default`.
    """

    def __init__(self, registry: Mapping[str, type[Config]], tag: str, *, default: str | None = None) -> None:
        self._registry, self._tag, self._default = registry, tag, default
        self._classes: tuple[type[Config], ...] = ()
        self._union: TypeAdapter[Any]

    def _adapter(self) -> TypeAdapter[Any]:
        classes = tuple(self._registry.values())
        if classes != self._classes:
            self._classes = classes
            union: Any = reduce(or_, classes)
            # A single class is no union, which a discriminator needs.
            self._union = TypeAdapter(Annotated[union, Field(discriminator=self._tag)] if len(classes) > 1 else union)
        return self._union

    def _validate(self, value: Any) -> Any:
        if self._default is not None and isinstance(value, dict) and self._tag not in value:
            value = {self._tag: self._default, **value}
        return self._adapter().validate_python(value)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._validate)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(self._adapter().core_schema)
