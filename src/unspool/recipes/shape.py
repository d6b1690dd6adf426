"""The recipe's JSON schema as a tree: which keys may stand at a place, and what a value may be.

One description serves editors (`unspool recipes schema`), error sentences and `--set` paths, so
that they cannot disagree. A shape is a node of that schema; a form is one of the alternatives
it allows.
"""

from functools import cache
from typing import Any

from unspool.recipes.lines import Place
from unspool.recipes.schema import Recipe

Shape = dict[str, Any]

SIZE_TYPES = {"integer", "number", "string"}


@cache
def recipe_schema() -> Shape:
    schema = Recipe.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def forms(shape: Shape) -> list[Shape]:
    """The alternatives of a shape, references followed, `null` left out."""
    if "$ref" in shape:
        return forms(recipe_schema()["$defs"][shape["$ref"].rsplit("/", 1)[-1]])
    nested = shape.get("anyOf") or shape.get("oneOf")
    if nested:
        return [form for option in nested for form in forms(option)]
    return [] if shape.get("type") == "null" else [shape]


def tag_of(shape: Shape) -> tuple[str, dict[str, str]] | None:
    """The key that says which form is meant, such as `kind`, and its values; None if there is none."""
    found = shape.get("discriminator")
    return (found["propertyName"], found["mapping"]) if found else None


def form_of(shape: Shape, value: Any) -> Shape:
    """The form that `value` was meant to take; forms are mappings, lists or scalars."""
    tag = tag_of(shape)
    if tag and isinstance(value, dict):
        key, mapping = tag
        ref = mapping.get(str(value.get(key)))
        # Without a known tag all forms are possible: their keys together.
        return forms({"$ref": ref})[0] if ref else {"type": "object", "properties": _all_keys(forms(shape))}
    kind = "object" if isinstance(value, dict) else "array" if isinstance(value, list) else None
    options = forms(shape)
    return next((form for form in options if kind and form.get("type") == kind), options[0])


def _all_keys(options: list[Shape]) -> Shape:
    return {key: child for form in options for key, child in form.get("properties", {}).items()}


def keys(form: Shape) -> list[str] | None:
    """The keys a mapping may have; None where names are free or it is no mapping."""
    return sorted(form["properties"]) if "properties" in form else None


def child(form: Shape, key: str | int) -> Shape | None:
    """The shape below `key`, or None where nothing may stand."""
    if form.get("type") == "array" and isinstance(key, int):
        fixed = form.get("prefixItems", [])
        return fixed[key] if key < len(fixed) else form.get("items")
    if "properties" in form:
        below: Shape | None = form["properties"].get(key)
        return below
    free = form.get("additionalProperties")
    return free if isinstance(free, dict) else None


def shape_at(place: Place, data: Any) -> Shape | None:
    """The shape at a place of `data`."""
    shape: Shape | None = recipe_schema()
    for key in place:
        if shape is None:
            return None
        shape = child(form_of(shape, data), key)
        data = value_at((key,), data)
    return shape


def value_at(place: Place, data: Any) -> Any:
    """The value at a place, None where there is none."""
    for key in place:
        try:
            data = data[key]
        except (KeyError, IndexError, TypeError):
            return None
    return data


def describe(shape: Shape) -> str:
    """What may stand here, in words: `a number above 0`, `one of concat, whole, intact`."""
    tag = tag_of(shape)
    if tag:
        return f"a mapping with {tag[0]}: one of {', '.join(tag[1])}"
    options = forms(shape)
    if {form.get("type") for form in options} == SIZE_TYPES:
        return "a size such as 64K, 20B, 8e6 or 4096"
    return " or ".join(dict.fromkeys(_describe_form(form) for form in options))


def _describe_form(form: Shape) -> str:
    if "enum" in form:
        return f"one of {', '.join(form['enum'])}"
    if "properties" in form:
        return f"a mapping with the keys {', '.join(form['properties'])}"
    if form.get("type") == "object":
        return f"a mapping from names to {describe(form.get('additionalProperties', {}))}"
    if form.get("type") == "array":
        return _describe_list(form)
    names = {"integer": "a whole number", "number": "a number", "string": "text", "boolean": "true or false"}
    words = {
        "exclusiveMinimum": "above {}",
        "minimum": "of at least {}",
        "exclusiveMaximum": "below {}",
        "maximum": "of at most {}",
        "pattern": "made of letters, digits, '-', '_' and '.', beginning with a letter or digit",
    }
    limits = [text.format(form[key]) for key, text in words.items() if key in form]
    return " ".join([names.get(form.get("type", ""), "a value"), " and ".join(limits)]).strip()


def _describe_list(form: Shape) -> str:
    fixed = form.get("prefixItems")
    if fixed:
        return f"a list of {len(fixed)} values, each {describe(fixed[0])}"
    least = " with at least one entry" if form.get("minItems") else ""
    return f"a list{least}, each {describe(form.get('items', {}))}"
