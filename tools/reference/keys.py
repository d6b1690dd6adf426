"""Tables of the keys of config classes: name, type, allowed values, default, since when, and one sentence."""

from collections.abc import Callable, Iterator
from typing import Any, get_args

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from reference.markdown import anchor, code, either, table
from unspool.core.config import Config, key_description
from unspool.recipe.json_schema import describe, forms

# The version in which keys were introduced that do not say otherwise: Field(json_schema_extra={"since": "0.2.0"}).
FIRST_VERSION = "0.1.0"
Link = Callable[[type[Config]], str | None]


def keys_table(cls: type[Config], prefix: str, link: Link, *, tag: str | None = None) -> str:
    """The keys of a class. `link` gives the address of a nested class's section; `tag` is a key that selects the class.

    The key `lr` with the prefix `stages` has the anchor `stages-lr`.
    """
    properties = cls.model_json_schema(by_alias=True)["properties"]
    rows = []
    for name, field in cls.model_fields.items():
        key = field.alias or name
        facts = [_type(properties[key], field, link), _default(field, required=name == tag), f"since {since(field)}"]
        rows.append((anchor(f"{prefix}-{key}") + code(key), "<br>".join(facts), key_description(cls, name)))
    return table(("key", "type and default", "meaning"), rows, stacked=True)


def since(field: FieldInfo) -> str:
    extra = field.json_schema_extra
    return str(extra.get("since", FIRST_VERSION)) if isinstance(extra, dict) else FIRST_VERSION


def nested_classes(field: FieldInfo) -> list[type[Config]]:
    """The config classes that a key may hold, also inside of lists, mappings and unions."""
    return list(dict.fromkeys(_classes(field.annotation)))


def _classes(annotation: Any) -> Iterator[type[Config]]:
    if isinstance(annotation, type) and issubclass(annotation, Config):
        yield annotation
    for part in get_args(annotation):
        yield from _classes(part)


def _type(shape: dict[str, Any], field: FieldInfo, link: Link) -> str:
    addresses = list(dict.fromkeys(filter(None, map(link, nested_classes(field)))))
    if addresses:
        text = f"[mapping]({addresses[0]})" if len(addresses) == 1 else _kinds(addresses)
        outer = getattr(field.annotation, "__origin__", None)
        if outer in (list, dict):
            return f"{'list of' if outer is list else 'names with'} {text.replace('[mapping]', '[mappings]')}"
        return f"text or {text}" if any(form.get("type") == "string" for form in forms(shape)) else text
    if "const" in shape:
        return code(shape["const"])
    found = forms(shape)
    if len(found) == 1 and "enum" in found[0]:
        return either(found[0]["enum"])
    text = describe(shape).replace("a size such as 64K, 20B, 8e6 or 4096", "size").removeprefix("a ")
    for long, short in (("one of ", ""), (" with at least one entry", ""), ("list, each ", "list of ")):
        text = text.replace(long, short)
    return text


def _kinds(addresses: list[str]) -> str:
    """Links to the forms of a union, whose sections end with the form's kind."""
    return "mapping: " + " or ".join(f"[{address.rpartition('-')[2]}]({address})" for address in addresses)


def _default(field: FieldInfo, *, required: bool) -> str:
    if required or (field.default is PydanticUndefined and field.default_factory is None):
        return "required"
    if field.default_factory is not None or field.default is None:
        return "default: see text" if field.default_factory else "optional"
    value = field.default
    if isinstance(value, BaseModel):
        value = {key: each for key, each in value.model_dump(mode="json").items() if each}
    value = list(value) if isinstance(value, tuple) else value
    spelled = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000)
    return "default: " + code(spelled.removesuffix("...\n").strip())
