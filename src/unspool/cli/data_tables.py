"""Tables of corpora and rows for the terminal, from the dicts of their manifests.

In: what `data/lengths.py` and `build_rows` count; counts of older manifests may lack some. Out: rich Tables.
"""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from rich.table import Table

from unspool.base.sizes import format_count, format_size
from unspool.data.lengths import LONG, SHARE_COLUMNS, TABLE_EDGES, Histogram, by_edges, from_length, shares_from

MISSING = "–"
# Columns of words stand to the left, numbers to the right.
_WORDS = ("", "strategy", "source", "dropped", "quarantined", "filtered", "parts left out", "by")


def records_table(counts: Mapping[str, Mapping[str, Any]], *, title: str | None = None) -> Table:
    """One line per corpus: what became of its records."""
    trained = ["trained"] if _any_trained(counts) else []
    columns = ["records", "documents", "tokens", *trained, "quarantined", "filtered", "parts left out", "by"]
    table = _table(title, "source", *columns)
    for name, entry in counts.items():
        reasons = [_reasons(entry.get(kind, {})) for kind in ("quarantined", "filtered", "left_out")]
        records = f"{entry['records']:,}" if "records" in entry else MISSING
        numbers = [records, f"{entry['documents']:,}", format_count(entry["tokens"])]
        numbers += [_trained(entry) for _ in trained]
        table.add_row(name, *numbers, *reasons, entry.get("tokenised_with", MISSING))
    return table


def length_table(sources: Mapping[str, Mapping[str, Any]], *, title: str | None = None) -> Table:
    """Documents by length and source, and the tokens of long ones (ProLong's Table 3)."""
    table = _table(title, "source", "documents", "tokens", *_bin_names(), f"tokens in ≥{format_size(LONG)}")
    for name, entry in _with_lengths(sources):
        lengths = entry["lengths"]
        table.add_row(
            name,
            f"{sum(lengths['documents']):,}",
            format_count(sum(lengths["tokens"])),
            *(f"{count:,}" if count else "" for count in by_edges(lengths)["documents"]),
            format_count(from_length(lengths, LONG)[1]),
        )
    return table


def share_table(sources: Mapping[str, Mapping[str, Any]], *, title: str | None = None) -> Table:
    """Which share of the documents is long, as rows hold them (ProLong's Table 14)."""
    table = _table(title, "source", *(f"≥{format_size(threshold)}" for threshold in SHARE_COLUMNS))
    for name, entry in _with_lengths(sources):
        table.add_row(name, *(_percent(share) for share in shares_from(entry["lengths"])))
    return table


def histogram_table(lengths: Histogram, *, title: str | None = None, width: int = 40) -> Table:
    """One line per power of two; the bars are of tokens, since that is what training sees."""
    table = _table(title, "tokens", "documents", "of tokens", "")
    most = max(lengths["tokens"], default=0)
    total = sum(lengths["tokens"])
    for edge, documents, tokens in zip(lengths["at_least"], lengths["documents"], lengths["tokens"], strict=True):
        table.add_row(
            _range(edge, 2 * edge), f"{documents:,}", _percent(tokens / total), "█" * round(width * tokens / most)
        )
    return table


def rows_table(counts: Mapping[str, Mapping[str, Any]], *, title: str | None = None) -> Table:
    """One line per rows set: how much, how full, how often cut, and what strategies cost."""
    trained = ["trained"] if _any_trained(counts) else []
    columns = ["number", "tokens", *trained, "documents", "fill", "truncated", "strategy", "added", "dropped"]
    table = _table(title, "rows", *columns)
    for name, entry in counts.items():
        table.add_row(
            name,
            f"{entry['rows']:,}",
            format_count(entry["tokens"]),
            *(_trained(entry) for _ in trained),
            f"{entry['documents']:,}",
            _percent(entry.get("fill_rate")),
            _percent(entry.get("truncation_rate")),
            _strategies(entry),
            _share(entry["tokens_added"], entry["tokens"]),
            _drops(entry),
        )
    return table


def upsample_table(counts: Mapping[str, Mapping[str, Any]], *, title: str | None = None) -> Table:
    """For each source of the rows sets that upsample: how much of it is in long documents, before and after."""
    table = _table(title, "rows", "source", "tokens", "in long ones before", "after", "repeated", "left out")
    for name, entry in counts.items():
        parts = {source: part for source, part in entry.get("sources", {}).items() if "upsample" in part}
        for source, part in parts.items():
            found = part["upsample"]
            table.add_row(
                name,
                source,
                format_count(part["tokens"]),
                _percent(found["long_share_before"]),
                _percent(found["long_share_after"]),
                format_count(found["tokens_added"]),
                format_count(found["tokens_dropped"]),
            )
    return table


def accounting_table(counts: Mapping[str, Any], *, title: str | None = None) -> Table:
    """Where the tokens of one rows set went, source by source and exactly: in + added = in rows + dropped."""
    sources: Mapping[str, Mapping[str, Any]] = counts.get("sources", {})
    reasons = sorted(counts["dropped"])
    table = _table(title, "source", "tokens in", "added", "in rows", *(reason.replace("_", " ") for reason in reasons))
    for name, entry in sources.items():
        amounts = _exact(entry["tokens_in"], entry.get("tokens_added", 0), entry["tokens"])
        table.add_row(name, *amounts, *_by_reason(entry, reasons))
    if sources:
        table.add_section()
    everything = _exact(counts["tokens_in"], counts["tokens_added"], counts["tokens"])
    table.add_row("all", *everything, *_by_reason(counts, reasons))
    return table


def _table(title: str | None, first: str, *others: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="left" if name in _WORDS else "right")
    return table


def _with_lengths(sources: Mapping[str, Mapping[str, Any]]) -> Iterable[tuple[str, Mapping[str, Any]]]:
    return [(name, entry) for name, entry in sources.items() if "lengths" in entry]


def _bin_names() -> list[str]:
    first, *_, last = TABLE_EDGES
    return [
        f"<{format_size(first)}",
        *(_range(low, high) for low, high in pairwise(TABLE_EDGES)),
        f"≥{format_size(last)}",
    ]


def _range(low: int, high: int) -> str:
    return f"{format_size(low)}–{format_size(high)}"


def _percent(share: float | None) -> str:
    return MISSING if share is None else f"{share:.1%}"


def _share(part: int, whole: int) -> str:
    return _percent(part / whole) if part and whole else ""


def _any_trained(counts: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether some of it is conversations, of which only a part is trained on."""
    return any("trained_tokens" in entry for entry in counts.values())


def _trained(entry: Mapping[str, Any]) -> str:
    return _percent(entry["trained_tokens"] / entry["tokens"]) if entry.get("trained_tokens") else MISSING


def _strategies(entry: Mapping[str, Any]) -> str:
    name = entry.get("strategy", {}).get("name")
    return ", ".join([*([name] if name else []), *(["upsample"] if "upsample" in entry else [])])


def _drops(entry: Mapping[str, Any]) -> str:
    return _reasons(entry["dropped"])


def _reasons(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{reason.replace('_', ' ')} {format_count(count)}" for reason, count in counts.items())


def _exact(*counts: int) -> list[str]:
    return [f"{count:,}" if count else "" for count in counts]


def _by_reason(entry: Mapping[str, Any], reasons: list[str]) -> list[str]:
    return _exact(*(entry["dropped"].get(reason, 0) for reason in reasons))
