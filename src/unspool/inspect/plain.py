"""What `--json` prints: the same as the other views, as plain values, with texts as they are."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from unspool.inspect.listing import Entry
from unspool.inspect.summary import Summary
from unspool.inspect.views import Item, Part


def summary_values(summary: Summary) -> dict[str, Any]:
    return {
        "path": str(summary.path),
        "kind": summary.kind,
        "headline": summary.headline,
        "facts": dict(summary.facts),
        "lengths": summary.bins,
        "lengths_of": summary.part,
        "sample": summary.sample,
        "notes": summary.notes,
    }


def item_values(item: Item, name: str) -> dict[str, Any]:
    return {name: item.index, "facts": [fact for fact in item.facts if fact], "parts": [*map(_part, item.parts)]}


def listing_values(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    return [asdict(entry) for entry in entries]


def _part(part: Part) -> dict[str, Any]:
    return {
        "title": part.title,
        "start": part.start,
        "length": part.length,
        "unit": part.unit,
        "facts": part.facts,
        "trained": part.trained,
        "group": part.group,
        "spans": [
            {"text": span.text, "role": span.role, "loss": span.loss} | ({"id": span.ids[0]} if span.ids else {})
            for span in part.spans
        ],
    }
