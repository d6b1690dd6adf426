"""The base class of every config, and the registries that configs are looked up in.

A config is frozen, refuses unknown keys and checks itself on construction. It raises ValueError for a value that is
wrong by itself; the recipe checker adds the line, the value and what is allowed.
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import reduce
from operator import or_
from typing import Annotated, Any, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    TypeAdapter,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from unspool.core.errors import ConfigError


def _describe(schema: dict[str, Any], cls: "type[Config]") -> None:
    """Complete the JSON schema of a class: add keys described by a base class, remove Python examples."""
    if "description" in schema:
        schema["description"] = schema["description"].partition("\n\nExample:")[0]
    for name, field in cls.model_fields.items():
        key = schema.get("properties", {}).get(field.alias or name)
        if key is not None and (text := key_description(cls, name)):
            key["description"] = text


class Config(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        populate_by_name=True,
        allow_inf_nan=False,
        json_schema_extra=_describe,
    )


def key_description(cls: type[BaseModel], name: str) -> str:
    """Return the description of a key, from the class or the nearest base class that has one; "" if there is none.

    So a subclass that narrows a tag such as `kind` to one value need not describe it again.
    """
    fields = (base.model_fields.get(name) for base in cls.__mro__ if issubclass(base, BaseModel))
    return next((field.description for field in fields if field and field.description), "")


Entry = TypeVar("Entry")


def nearest(name: str, allowed: Iterable[str]) -> str | None:
    """Return the allowed name that `name` is probably a misspelling of."""
    found = get_close_matches(name, list(allowed), n=1, cutoff=0.6)
    return found[0] if found else None


def did_you_mean(name: Any, allowed: Iterable[str], *, prefix: str = "") -> str:
    """Return the end of a sentence about an unknown name: `; did you mean 'abf'?`, or a full stop."""
    guess = nearest(name, allowed) if isinstance(name, str) else None
    return f"; did you mean {prefix + guess!r}?" if guess else "."


def lookup(registry: Mapping[str, Entry], name: str, *, kind: str) -> Entry:
    """Return an entry of a registry (a dict); for an unknown name, raise ConfigError with the nearest one."""
    if name in registry:
        return registry[name]
    guess = nearest(name, registry)
    hint = f"Did you mean {guess!r}? " if guess else ""
    raise ConfigError(f"{kind} {name!r} is not known. {hint}Known: {', '.join(sorted(registry))}.")


# Registries that were extended after import, by kind.
_extended: dict[str, Mapping[str, object]] = {}


def registry_version() -> tuple[tuple[int, ...], ...]:
    """Return a value that changes whenever something is registered, for caches that depend on the registries."""
    return tuple(tuple(map(id, registry.values())) for registry in _extended.values())


def register(registry: dict[str, Any], name: str, entry: object, *, kind: str, replace: bool = False) -> None:
    """Add an entry to a registry; ConfigError if the name is taken, unless `replace`."""
    if replace:
        registry[name] = entry
    if registry.setdefault(name, entry) is not entry:
        raise ConfigError(f"{kind} {name!r} is already registered ({registry[name].__name__}); use another name.")
    _extended[kind] = registry


def tag_value(cls: type[BaseModel], tag: str) -> str:
    """Return the one value that a config's field `tag`, such as `kind`, can have."""
    values = get_args(cls.model_fields[tag].annotation)
    if len(values) != 1:
        raise ConfigError(f"{cls.__name__}.{tag} must be a Literal with one name, such as Literal['csv'].")
    return str(values[0])


class Current:
    """Pydantic annotation: validate with the current state of a config class, including fields added later."""

    def __init__(self, cls: type[BaseModel]) -> None:
        self._cls = cls

    def adapter(self) -> TypeAdapter[Any]:
        return TypeAdapter(self._cls)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(lambda value: self.adapter().validate_python(value))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(self.json_core_schema())

    def json_core_schema(self) -> CoreSchema:
        # By reference, so that the class has its own entry in the JSON schema's `$defs`.
        ref = f"{self._cls.__module__}.{self._cls.__qualname__}:{id(self._cls)}"
        named: Any = {**self.adapter().core_schema, "ref": ref}
        return core_schema.definitions_schema(core_schema.definition_reference_schema(ref), [named])


class FromRegistry(Current):
    """Pydantic annotation of a config whose class a registry holds under the value of the key `tag`.

    Errors and the JSON schema are those of a discriminated union of the registered classes. Validation reads the
    registry, so classes that are registered later are found too. Without the key, the class of `default` is used.
    """

    def __init__(self, registry: Mapping[str, type[BaseModel]], tag: str, *, default: str | None = None) -> None:
        self._registry, self._tag, self._default = registry, tag, default
        self._classes: tuple[type[BaseModel], ...] = ()
        self._union: TypeAdapter[Any]

    def classes(self) -> tuple[type[BaseModel], ...]:
        return tuple(self._registry.values())

    def adapter(self) -> TypeAdapter[Any]:
        classes = self.classes()
        if classes != self._classes:
            self._classes = classes
            union: Any = reduce(or_, classes)
            # A single class is not a union, and a discriminator needs a union.
            union = Annotated[union, Field(discriminator=self._tag)] if len(classes) > 1 else union
            self._union = TypeAdapter(Annotated[union, BeforeValidator(self._add_default)])
        return self._union

    def json_core_schema(self) -> CoreSchema:
        schema: CoreSchema = self.adapter().core_schema
        return schema

    def _add_default(self, value: Any) -> Any:
        is_missing = self._default is not None and isinstance(value, dict) and self._tag not in value
        return {self._tag: self._default, **value} if is_missing else value
