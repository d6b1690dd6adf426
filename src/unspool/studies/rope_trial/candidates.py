"""The RoPE methods that a trial compares: chosen by the published rules, or given as `METHOD:KEY=VALUE,…`."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from unspool.core.config import lookup
from unspool.core.errors import ConfigError
from unspool.recipe.part_of_recipe import check_rope
from unspool.rope.bound import bound
from unspool.rope.methods import ABF, NTK, ROPE_METHODS, Unchanged
from unspool.rope.tables import RopeMethod, RopeShape, format_base, ntk_base

DEFAULT = "default"  # the name of the default candidates in a list of candidates
# Methods of the default candidates besides abf and ntk, with the settings that `unspool rope` advises.
ADVISED = ("pi", "yarn", "llama3", "cope", "harpe")
# ProLong trained with twice the base of the NTK rule.
PROLONG = 2.0
# A comma that is not inside a list.
_COMMA = re.compile(r",(?![^\[]*\])")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A RoPE method with its settings."""

    method: RopeMethod

    @property
    def label(self) -> str:
        """The candidate as `--candidate` takes it, such as `abf:base=8e6`."""
        settings = ",".join(f"{key}={text}" for key, text in _settings(self.method))
        return f"{self.method.method}:{settings}" if settings else self.method.method

    @property
    def line(self) -> str:
        """The line of a recipe's stage, such as `rope: {method: abf, base: 8e6}`."""
        words = [f"method: {self.method.method}", *(f"{key}: {text}" for key, text in _settings(self.method))]
        return f"rope: {{{', '.join(words)}}}"


def default_candidates(
    rope: RopeShape, context_len: int, *, advance: Callable[[int], None] = lambda done: None
) -> list[Candidate]:
    """Return the model as it is, three bases by published rules, and the other methods as `unspool rope` advises them.

    A method that has no settings for this model is left out.
    """
    by_rule = ntk_base(rope.base, context_len / rope.original_len, rope.rotary_dim)
    smallest = bound(context_len, rope.rotary_dim, advance=advance)
    advised = smallest or _rounded(by_rule)
    bases = dict.fromkeys([_rounded(PROLONG * by_rule), advised])
    methods: list[RopeMethod] = [Unchanged(), NTK(), *(ABF(base=base) for base in bases)]
    suggested = (ROPE_METHODS[name].suggest(rope, context_len, advised) for name in ADVISED)
    methods += [method for method in suggested if method is not None]
    return [Candidate(method=method) for method in methods]


def left_out(candidates: Iterable[Candidate]) -> list[str]:
    """Return the methods of the default candidates that have no settings for the model."""
    present = {candidate.method.method for candidate in candidates}
    return [name for name in ADVISED if name not in present]


def read_candidate(given: str | RopeMethod) -> Candidate:
    """Read `yarn`, `abf:base=8e6` or a method; ConfigError if it is not one."""
    if isinstance(given, RopeMethod):
        return Candidate(method=given)
    if not isinstance(given, str):
        raise ConfigError(f"`candidates`: {given!r} is not a RoPE method; write METHOD or METHOD:KEY=VALUE,….")
    name, _, settings = given.partition(":")
    lookup(ROPE_METHODS, name.strip(), kind="`candidates`: RoPE method")
    value: dict[str, Any] = {"method": name.strip()}
    for part in filter(None, map(str.strip, _COMMA.split(settings))):
        key, equals, text = part.partition("=")
        if not equals or not key.strip() or not text.strip():
            raise ConfigError(f"`candidates` {given!r}: write METHOD:KEY=VALUE,…, such as abf:base=8e6.")
        try:
            value[key.strip()] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"`candidates` {given!r}: the value of {key.strip()} is not valid YAML.") from error
    return Candidate(method=check_rope(value, f"`candidates` {given!r}"))


def read_candidates(
    given: Sequence[str | RopeMethod], defaults: Callable[[], list[Candidate]]
) -> tuple[list[Candidate], bool]:
    """Return the given candidates without repeats, and whether the default ones are among them."""
    wanted = list(given) or [DEFAULT]
    found: list[Candidate] = []
    for each in wanted:
        found += defaults() if each == DEFAULT else [read_candidate(each)]
    return list({candidate.label: candidate for candidate in found}.values()), DEFAULT in wanted


def refusal(candidate: Candidate, rope: RopeShape, context_len: int, *, trained: bool) -> str | None:
    """Return why the method cannot be tried on the model; None if nothing is known yet."""
    method = candidate.method
    if trained and not method.trainable:
        return "this method is for evaluation without training"
    if method.keeps_frequencies:
        return None
    try:
        method.resolve(rope, context_len)
    except ConfigError as error:
        return str(error)
    return None


def _settings(method: RopeMethod) -> list[tuple[str, str]]:
    given = method.model_dump(mode="json", exclude_defaults=True)
    return [(key, _spell(value)) for key, value in given.items() if key != "method" and value is not None]


def _spell(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_spell, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        short = format_base(value)
        return short if float(short) == value else repr(value)
    return str(value)


def _rounded(base: float) -> float:
    """Round to the three digits that a recipe shows."""
    return float(f"{base:.3g}")
