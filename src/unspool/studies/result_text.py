"""The result of a study in words: the whole of it as Markdown, and the cells that tables are made of.

In: what study.json says. Out: text. Promise: what was not measured reads "–"; every comparison says how sure it is.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from unspool.core.stats import ALPHA

MISSING = "–"


def show_value(value: float | None, kind: str) -> str:
    if value is None:
        return MISSING
    return f"{value:.3f}" if kind == "loss" else f"{100 * value:.1f}%"


def show_mean(entry: dict[str, Any], kind: str) -> str:
    """`61.5% ±2.1`: mean and deviation over seeds; one seed has none."""
    mean, deviation = entry["mean"], entry["deviation"]
    if mean is None or deviation is None:
        return show_value(mean, kind)
    return (
        f"{show_value(mean, kind)} ±{deviation:.3f}"
        if kind == "loss"
        else f"{show_value(mean, kind)} ±{100 * deviation:.1f}"
    )


def show_gap(one: dict[str, Any], kind: str) -> str:
    """`+12.5 (3.1 to 21.9)` in points, or in nats for a loss."""
    gap = one["difference"]
    if gap is None:
        return MISSING
    widest = one["seeds"] if one["of"] == "seeds" else one["prompts"]
    scale, digits = (1.0, 3) if kind == "loss" else (100.0, 1)
    shown = f"{scale * gap:+.{digits}f}"
    if widest["low"] is None:
        return shown
    return f"{shown} ({scale * widest['low']:.{digits}f} to {scale * widest['high']:.{digits}f})"


def show_p(one: dict[str, Any]) -> str:
    """The corrected p-value that the verdict rests on."""
    p = (
        one["seeds"]["p_holm"]
        if one["of"] == "seeds" and one["seeds"]["p_holm"] is not None
        else one["prompts"]["p_holm"]
    )
    if p is None:
        return MISSING
    return "<0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def kind_of(result: dict[str, Any], name: str) -> str:
    return next(str(table["kind"]) for table in result["measures"] if table["measure"] == name)


def markdown(result: dict[str, Any]) -> str:
    lines = [f"# {result['name']}", "", *_intro(result), "", "## Ranking", "", *_ranking(result), ""]
    for table in result["measures"]:
        if table["measure"] not in ("score", "loss"):
            lines += [f"## {table['measure']}", "", *_measure(table), ""]
    return "\n".join([*lines, "## Runs", "", *_runs(result), ""])


def _intro(result: dict[str, Any]) -> Iterator[str]:
    margin = result["margin"]
    yield (
        f"Baseline: {result['baseline']}. Differences are paired: the same prompts, the same seeds. p-values are "
        f"two-sided and corrected by Holm's method over the comparisons of a measure; {ALPHA} is the limit. "
        "± is the deviation over seeds. Intervals are of 95%, over seeds where the verdict says so, else over prompts, "
        "which is to say for these trained models only. Arms are called equal where the interval lies within "
        f"{100 * margin['score']:g} points, or {margin['loss']:g} nats of loss."
    )
    # Every comparison is one chance of being wrong.
    num = sum(one["prompts"]["p"] is not None for table in result["measures"] for one in table["comparisons"])
    yield ""
    yield f"{num} comparisons were made; measures are not corrected for one another."


def _ranking(result: dict[str, Any]) -> Iterator[str]:
    for kind, names in result["ranked_by"].items():
        if names:
            yield f"{kind.capitalize()}: the plain mean of {', '.join(names)}."
            yield ""
    yield seeds_sentence(result)
    yield ""
    yield from _table(*ranking_rows(result))


def seeds_sentence(result: dict[str, Any]) -> str:
    """Which seeds the ranks rest on; other seeds are other prompts."""
    seeds = result["ranked_seeds"]
    if not seeds:
        return "No seed is common to all arms, so ranks compare means over different prompts."
    return f"Ranks are by seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)}, which all arms have."


def ranking_rows(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and rows: an arm for each, and a further row for each further comparison of it."""
    kinds = [kind for kind, names in result["ranked_by"].items() if names]
    rows = []
    for entry in result["ranking"]:
        measured = entry[kinds[0]]
        first = [str(entry["rank"] or MISSING), entry["arm"], *(show_mean(entry[kind], kind) for kind in kinds)]
        first += [str(measured["n"]), str(len(measured["by_seed"]))]
        if not entry["comparisons"]:
            rows.append([*first, *[MISSING] * 4, ""])
        for at, one in enumerate(entry["comparisons"]):
            kind = one["measure"]
            cells = [one["against"], kind, show_gap(one, kind), show_p(one), one["says"]]
            rows.append([*(first if at == 0 else [""] * len(first)), *cells])
    return ["rank", "arm", *kinds, "n", "seeds", "against", "in", "difference", "p", "verdict"], rows


def _measure(table: dict[str, Any]) -> Iterator[str]:
    kind = table["kind"]
    known = [arm for arm, entry in table["arms"].items() if entry["mean"] is not None]
    sign = -1 if table["higher_is_better"] else 1
    order = sorted(known, key=lambda arm: sign * table["arms"][arm]["mean"])
    order += [arm for arm in table["arms"] if arm not in known]
    rows = []
    for arm in order:
        entry = table["arms"][arm]
        first = [arm, show_mean(entry, kind), str(entry["n"])]
        compared = [one for one in table["comparisons"] if one["arm"] == arm]
        if not compared:
            rows.append([*first, MISSING, MISSING, MISSING, MISSING])
        for at, one in enumerate(compared):
            cells = [one["against"], show_gap(one, kind), show_p(one), one["says"]]
            rows.append([*(first if at == 0 else ["", "", ""]), *cells])
    yield from _table(["arm", table["measure"], "n", "against", "difference", "p", "verdict"], rows)


def _runs(result: dict[str, Any]) -> Iterator[str]:
    rows = [
        [entry["run"], entry["state"], "yes" if entry["compared"] else "no", (entry["error"] or "").split("\n")[0]]
        for entry in result["runs"]
    ]
    yield from _table(["run", "state", "compared", "error"], rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"| {' | '.join('---' for _ in head)} |"
    for row in rows:
        yield f"| {' | '.join(map(_cell, row))} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
