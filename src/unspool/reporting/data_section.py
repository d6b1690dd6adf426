"""The data section: document lengths, dropped data by reason, requested and realized mix.

Every sum is checked against the counts it should match, and the page shows the result. Counts that an older run did
not record appear as dashes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unspool.core.charts import Figure, Pair, pair_bars
from unspool.core.formatting import MISSING, excerpt, format_manifest_count, format_percent, format_share
from unspool.core.sizes import format_count, format_size
from unspool.core.table import Table, entries
from unspool.reporting.run_results import Artifact, Problem, RunResults, Stage

# These counts have fixed columns. Other counts follow, except `_DETAILS`, which other parts of the page show.
_CORPUS = ("records", "documents", "tokens", "quarantined", "filtered", "left_out")
_ROWS = ("rows", "documents", "tokens_in", "tokens_added", "dropped", "tokens")
_DETAILS = {"sources", "lengths", "added_tokens", "strategy", "upsample", "shares"}
_TITLES = {
    "quarantined": "not read",
    "filtered": "filtered out",
    "left_out": "parts removed",
    "tokens_in": "tokens in",
    "tokens_added": "+ added",
    "dropped": "− dropped",
}
MAX_PANELS = 24
Gap = Callable[[Mapping[str, Any]], int | None]


@dataclass(frozen=True, kw_only=True)
class Audit:
    tables: list[Table]
    lengths: list[Figure]
    mixes: list[Figure]
    problems: Table | None
    warnings: list[str]


def audit(results: RunResults) -> Audit:
    groups = {name: _group(results.artifacts, name) for name in ("corpus", "datasets")}
    corpus = _count_table(groups["corpus"], "Documents", _CORPUS, _corpus_gap)
    rows = _count_table(groups["datasets"], "Datasets", _ROWS, _rows_gap)
    mixes = [stage for stage in results.stages if stage.mix]
    found = (corpus, rows, _shares_table(groups["datasets"]), _mix_table(mixes, groups["datasets"]))
    tables = [table for table in found if table is not None]
    gaps = [(f"corpus {name}", _corpus_gap(one.counts)) for name, one in groups["corpus"].items()]
    gaps += [(f"dataset {name}", _rows_gap(one.counts)) for name, one in groups["datasets"].items()]
    return Audit(
        tables=tables,
        lengths=_length_figures(groups),
        mixes=[figure for stage in mixes if (figure := _mix_figure(stage, groups["datasets"]))],
        problems=_problem_table(results.problems),
        warnings=[f"{name}: counts do not add up; the difference is {gap:+,}." for name, gap in gaps if gap],
    )


def _group(artifacts: Sequence[Artifact], group: str) -> dict[str, Artifact]:
    """The artifacts of one folder of the run, by name."""
    prefix = f"{group}/"
    return {one.path.removeprefix(prefix): one for one in artifacts if one.path.startswith(prefix)}


def _total(value: Any) -> int | None:
    if isinstance(value, Mapping):
        return sum(int(part) for part in value.values()) if all(isinstance(p, int) for p in value.values()) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _gap(plus: Sequence[Any], minus: Sequence[Any]) -> int | None:
    """Sum of one side minus sum of the other; None if a count is missing."""
    totals = [[_total(value) for value in side] for side in (plus, minus)]
    if any(total is None for side in totals for total in side):
        return None
    return sum(total or 0 for total in totals[0]) - sum(total or 0 for total in totals[1])


def _corpus_gap(counts: Mapping[str, Any]) -> int | None:
    """Records that no count explains (kept, unreadable or filtered); 0 if the counts add up."""
    parts = [counts.get(name) for name in ("documents", "quarantined", "filtered")]
    return _gap([counts.get("records")], parts)


def _rows_gap(counts: Mapping[str, Any]) -> int | None:
    """Tokens that are neither in a row nor counted as dropped; 0 if the counts add up."""
    return _gap([counts.get("tokens_in"), counts.get("tokens_added")], [counts.get("tokens"), counts.get("dropped")])


def _count_table(group: dict[str, Artifact], caption: str, first: Sequence[str], gap: Gap) -> Table | None:
    """Table of each folder's manifest counts, and whether they add up."""
    if not group:
        return None
    found = {name for one in group.values() for name in one.counts} - _DETAILS
    known = [name for name in first if name in found]
    more = sorted(name for name in found - set(first) if any(one.counts.get(name) for one in group.values()))
    lines = []
    for name, one in group.items():
        left = gap(one.counts)
        check = MISSING if left is None else "yes" if left == 0 else f"off by {left:+,}"
        shown = [[format_manifest_count(one.counts.get(count), count) for count in names] for names in (known, more)]
        lines.append(entries(name, *shown[0], check, *shown[1]))
    titles = [[_TITLES.get(name, name.replace("_", " ")) for name in names] for names in (known, more)]
    columns = ["name", *titles[0], "adds up", *titles[1]]
    return Table(caption=caption, columns=columns, rows=lines)


def _shares_table(group: dict[str, Artifact]) -> Table | None:
    """Requested and realized shares of the sources of mixed datasets, in trained tokens."""
    lines = [
        entries(
            f"{name}: {source}",
            format_manifest_count(share.get("trained_tokens"), "trained_tokens"),
            format_share(share.get("requested")),
            format_share(share.get("realized")),
        )
        for name, one in group.items()
        for source, share in (one.counts.get("shares") or {}).items()
    ]
    columns = ["dataset and source", "trained tokens", "requested share", "realized"]
    return Table(caption="Shares of sources", columns=columns, rows=lines) if lines else None


def _length_figures(groups: dict[str, dict[str, Artifact]]) -> list[Figure]:
    figures = []
    corpora = [length_bins(one.counts.get("lengths")) for one in groups["corpus"].values()]
    if len(corpora) > 1 and all(corpora):
        figures.append(_length_figure("all sources", "documents", _sum_bins(corpora)))
    for group, found in groups.items():
        for name, one in found.items():
            bins = length_bins(one.counts.get("lengths"))
            if bins:
                kind = "documents" if group == "corpus" else "pieces of documents"
                figures.append(_length_figure(f"{group} {name}", kind, bins))
    return figures[:MAX_PANELS]


def length_bins(lengths: Any) -> list[tuple[int, int, int]]:
    """(lower edge, documents, tokens) of each bin; empty without a readable histogram."""
    if not isinstance(lengths, Mapping):
        return []
    parts = [lengths.get(key) for key in ("at_least", "documents", "tokens")]
    if not all(isinstance(part, list) and all(isinstance(value, int) for value in part) for part in parts):
        return []
    return list(zip(*parts, strict=False))


def _sum_bins(histograms: Sequence[list[tuple[int, int, int]]]) -> list[tuple[int, int, int]]:
    """Sum of several histograms; empty bins between the first and the last are kept."""
    found: dict[int, tuple[int, int]] = {}
    for edge, documents, tokens in (each for bins in histograms for each in bins):
        so_far = found.get(edge, (0, 0))
        found[edge] = so_far[0] + documents, so_far[1] + tokens
    return [(edge, *found[edge]) for edge in sorted(found)]


def _length_figure(title: str, kind: str, bins: list[tuple[int, int, int]]) -> Figure:
    documents, tokens = sum(count for _, count, _ in bins) or 1, sum(count for *_, count in bins) or 1
    pairs = [
        Pair(
            label=format_size(edge),
            first=num / documents,
            second=held / tokens,
            tooltip=f"{format_size(edge)} to {format_size(2 * edge)} tokens: {num:,} {kind}, {held:,} tokens",
        )
        for edge, num, held in bins
    ]
    label = f"Lengths of the {documents:,} {kind} of {title}: share of {kind} and of tokens by length."
    note = f"{documents:,} {kind}, {format_count(tokens)} tokens"
    return Figure(
        title=title, note=note, drawing=pair_bars(pairs, label=label, x_title="length in tokens (lower edge)")
    )


def realized_mix(stage: Stage, rows: Mapping[str, Artifact]) -> dict[str, float]:
    """Share of trained tokens by dataset. Empty if the ledger or a row length is missing."""
    tokens = {}
    for name, count in stage.drawn.items():
        length = _row_length(rows.get(name))
        if length is None:
            return {}
        tokens[name] = count * length
    total = sum(tokens.values())
    return {name: held / total for name, held in tokens.items()} if total else {}


def _row_length(one: Artifact | None) -> float | None:
    if one is None or not one.counts.get("rows") or not isinstance(one.counts.get("tokens"), int):
        return None
    return float(one.counts["tokens"]) / float(one.counts["rows"])


def _mix_table(stages: Sequence[Stage], rows: Mapping[str, Artifact]) -> Table | None:
    lines = []
    for stage in stages:
        realized = realized_mix(stage, rows)
        for name in dict.fromkeys([*stage.mix, *stage.drawn]):
            drawn, held = stage.drawn.get(name, 0), rows.get(name)
            there = held.counts.get("rows") if held else None
            epochs = f"{drawn / there:.3g}" if there and stage.drawn else MISSING
            share = realized.get(name, 0.0) if realized else None
            shares = format_percent(stage.mix.get(name)), format_percent(share)
            lines.append(entries(f"{stage.name} · {name}", *shares, f"{drawn:,}" if stage.drawn else MISSING, epochs))
    if not lines:
        return None
    columns = ["stage · dataset", "requested", "realized", "rows trained on", "epochs"]
    return Table(caption="Mix", columns=columns, rows=lines, note="Shares of tokens.")


def _mix_figure(stage: Stage, rows: Mapping[str, Artifact]) -> Figure | None:
    realized = realized_mix(stage, rows)
    if not realized:
        return None
    pairs = [
        Pair(
            label=name,
            first=stage.mix.get(name, 0.0),
            second=realized.get(name, 0.0),
            tooltip=f"{name}: requested {format_percent(stage.mix.get(name))}, "
            f"realized {format_percent(realized.get(name, 0.0))}",
        )
        for name in dict.fromkeys([*stage.mix, *realized])
    ]
    label = (
        f"Mix of {stage.name}: requested and realized share of tokens by dataset. The table “Mix” has the same numbers."
    )
    return Figure(title=f"Mix of {stage.name}", note="", drawing=pair_bars(pairs, label=label, x_title="dataset"))


def _problem_table(problems: Sequence[Problem]) -> Table | None:
    if not problems:
        return None
    rows = [
        entries(one.corpus, one.kind, excerpt(one.place, 120), excerpt(one.reason, 80), excerpt(one.detail, 160))
        for one in problems
    ]
    columns = ["corpus", "problem", "where", "reason", "detail"]
    return Table(caption="First unreadable records and removed parts", columns=columns, rows=rows, numeric=False)
