"""The wording around generated texts: instructions, where document and question stand, how answers begin.

In: our own wording (wording.yaml), lists of the user's that replace ours. Out: texts with the parts filled in.
Promise: which wording an example gets follows from seed and the uses so far: the least used first, so that all of them
are used, about equally often.
Elsewhere: places and their checks (places.py), what generators are asked (asks.py).
"""

from collections import Counter
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from unspool.core.artifacts import digest
from unspool.core.errors import ConfigError
from unspool.core.rng import rng_for
from unspool.synthesis.config import KINDS, Kind
from unspool.synthesis.generator_prompts import ASK, OURS, Asks, check_name, check_places, fill, load_asks

# For every kind and list: the places a text must have, and those it may have besides.
PLACES: dict[str, dict[str, tuple[set[str], set[str]]]] = {
    "qa": {
        "instruction": (set(), set()),
        "placement": ({"document", "question"}, {"instruction"}),
        "answer": ({"answer"}, set()),
    },
    "rag": {
        "instruction": (set(), set()),
        "placement": ({"document", "question"}, {"instruction"}),
        "passage": ({"text"}, {"number"}),
        "answer": ({"answer"}, set()),
    },
    "summary": {
        "instruction": (set(), set()),
        "placement": ({"document", "instruction"}, set()),
        "answer": ({"answer"}, set()),
    },
}


@dataclass(frozen=True)
class Chosen:
    """Which wording an example has: the number of its text in every list."""

    numbers: tuple[tuple[str, int], ...]

    @property
    def ids(self) -> dict[str, int]:
        return dict(self.numbers)


class Templates:
    def __init__(self, lists: dict[str, dict[str, list[str]]], asks: Asks = OURS) -> None:
        self.lists, self.asks = lists, asks

    @property
    def digest(self) -> str:
        own = self.asks.plain
        return digest([self.lists, own] if own else self.lists)

    def fill(self, kind: Kind, name: str, chosen: Chosen, **parts: str) -> str:
        return fill(self.lists[kind][name][chosen.ids[name]], **parts)


class Uses:
    """How often each wording was chosen."""

    def __init__(self, templates: Templates, seed: int) -> None:
        self._templates, self._seed = templates, seed
        self._counts: dict[tuple[str, str], Counter[int]] = {}

    def choose(self, kind: Kind, number: int) -> Chosen:
        """One of the least used of every list, by seed and the example's number."""
        chosen = []
        for name, texts in self._templates.lists[kind].items():
            counts = self._counts.setdefault((kind, name), Counter())
            least = min(counts[at] for at in range(len(texts)))
            free = [at for at in range(len(texts)) if counts[at] == least]
            taken = free[int(rng_for(self._seed, "synth wording", kind, name, number).integers(len(free)))]
            counts[taken] += 1
            chosen.append((name, taken))
        return Chosen(tuple(chosen))

    def give_back(self, kind: Kind, chosen: Chosen) -> None:
        """The example was not kept, so its wording is free again."""
        for name, taken in chosen.numbers:
            self._counts[(kind, name)][taken] -= 1


def load_templates(path: Path | None) -> Templates:
    """Our wording, and what the user's file has in its place."""
    ours: dict[str, dict[str, list[str]]] = yaml.safe_load(
        (files("unspool") / "synthesis" / "templates.yaml").read_text(encoding="utf-8")
    )
    if path is None:
        return Templates(ours)
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"templates {path}: cannot be read as YAML ({str(error).splitlines()[0]}).") from error
    if not isinstance(given, dict):
        raise ConfigError(f"templates {path}: must be a mapping with some of {', '.join((*KINDS, ASK))}.")
    asks = OURS
    for kind, lists in given.items():
        check_name(f"templates {path}", "kind", kind, {**PLACES, ASK: {}})
        if kind == ASK:
            asks = load_asks(f"templates {path}: {ASK}", lists)
            continue
        if not isinstance(lists, dict):
            raise ConfigError(f"templates {path}: {kind} must be a mapping of lists: {', '.join(PLACES[kind])}.")
        for name, texts in lists.items():
            check_name(f"templates {path}", f"list of {kind}", name, PLACES[kind])
            _check_texts(f"templates {path}: {kind}.{name}", texts, *PLACES[kind][name])
            ours[kind][name] = texts
    return Templates(ours, asks)


def _check_texts(where: str, texts: Any, needed: set[str], allowed: set[str]) -> None:
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise ConfigError(f"{where} must be a list of texts, at least one, none of them empty.")
    for number, text in enumerate(texts, start=1):
        check_places(f"{where}: text {number}", text, needed, allowed)
