"""A paper's numbers in a study file, next to the results of the study's runs.

The numbers are the paper's, at the paper's scale: they are shown but never compared by a test.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from unspool.core.formatting import MISSING
from unspool.core.table import Entry, Table, entries
from unspool.recipe.json_schema import unknown_key
from unspool.recipe.paths import bundled_studies
from unspool.recipe.yaml_lines import Problem, read_yaml
from unspool.reporting.gather_scores import SUMMARY
from unspool.reporting.result_files import json_object
from unspool.reporting.run_results import SHORT
from unspool.studies.arm_scores import Measure, find_measures

# The keys of `paper` with their descriptions.
KEYS = {
    "source": "Paper and table, such as `ProLong, Table 20`.",
    "scale": "Model and number of tokens that the paper's numbers were measured with.",
    "note": "Any other remark.",
    "columns": "Columns of the paper's table, with the measure that corresponds to each. A list means the average of "
    "its measures; `null` means that there is none. short/TASK@STAGE is a short task after a stage.",
    "numbers": "The paper's results by arm: one percentage per column, or `null`.",
    "others": "Rows of the paper's table that are no arms, in the same form.",
}
Numbers = dict[str, list[float | None]]
ShortScores = dict[str, dict[str, float]]  # stage: task of lm-eval: score


@dataclass(frozen=True, kw_only=True)
class Paper:
    source: str  # such as `ProLong, Table 4`
    scale: str  # model and tokens of the paper's measurements
    note: str
    columns: dict[str, list[str]]  # by the paper's column: our measures, or short/TASK@STAGE, whose mean it is
    numbers: Numbers  # by arm: one number per column, in percent
    others: Numbers  # rows of the paper's table without an arm

    @property
    def caption(self) -> str:
        return f"{self.source}: the paper's numbers in percent, at the paper's scale ({self.scale})"


def read_paper(data: Mapping[str, Any]) -> Paper | None:
    """Read the block `paper` of a checked study file."""
    given = data.get("paper")
    if given is None:
        return None
    columns = {name: [wanted] if isinstance(wanted, str) else wanted or [] for name, wanted in given["columns"].items()}
    texts = {key: str(given.get(key) or "") for key in ("source", "scale", "note")}
    return Paper(columns=columns, numbers=given.get("numbers") or {}, others=given.get("others") or {}, **texts)


def paper_problems(data: Mapping[str, Any], arms: Sequence[str]) -> Iterator[Problem]:
    given = data.get("paper")
    if given is None:
        return
    if not isinstance(given, dict):
        text = f"must be a mapping with the keys {', '.join(KEYS)}."
        yield Problem(place=("paper",), text=text, show_value=True)
        return
    for key in given:
        if key not in KEYS:
            yield Problem(place=("paper", key), text=unknown_key(key, list(KEYS)))
    for key in ("source", "scale"):
        if not isinstance(given.get(key), str):
            yield Problem(
                place=("paper", key),
                text="missing; write the paper and table as source, and the model and tokens as scale.",
            )
    columns = given.get("columns")
    if not isinstance(columns, dict) or not all(map(_are_measures, columns.values())):
        text = "must be a mapping from the paper's columns to measures, such as {RULER: ruler/128K, MMLU: null}."
        yield Problem(place=("paper", "columns"), text=text)
        return
    for key in ("numbers", "others"):
        rows = given.get(key) or {}
        if not isinstance(rows, dict):
            yield Problem(place=("paper", key), text="must be a mapping from names to lists of numbers.")
            continue
        for name, row in rows.items():
            if key == "numbers" and name not in arms:
                text = f"no arm is called {name!r}; move rows without an arm to paper.others."
                yield Problem(place=("paper", key, name), text=text)
            if not isinstance(row, list) or len(row) != len(columns) or not all(map(_is_number, row)):
                text = f"must be a list of {len(columns)} numbers, one per column; null for a missing one."
                yield Problem(place=("paper", key, name), text=text)


def _are_measures(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return value is None or (bool(names) and all(isinstance(name, str) for name in names))


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def read_short(run_dir: Path) -> ShortScores:
    """Read the scores of lm-eval's tasks in a run. A study does not compare them: they have no questions to pair."""
    found: ShortScores = {}
    for path in sorted([*run_dir.glob(f"scores/*/{SUMMARY}"), *run_dir.glob(f"{SHORT}/*/{SUMMARY}")]):
        for cell in json_object(path).get("cells", []):
            if cell.get("suite") == SHORT and cell.get("value") is not None:
                found.setdefault(path.parent.name, {})[str(cell.get("task"))] = float(cell["value"])
    return found


def beside_paper(
    paper: Paper,
    arms: Sequence[str],
    measures: Sequence[Measure],
    tables: Sequence[Mapping[str, Any]],
    short: Mapping[str, Sequence[ShortScores]],
) -> dict[str, Any]:
    """Combine the paper's rows with our means over seeds, for study.json; `short` holds each arm's seeds."""
    known = {table["measure"]: table for table in tables}

    def value(arm: str, wanted: str) -> float | None:
        if "@" in wanted:
            values = [_short_value(scores, wanted) for scores in short.get(arm, ())]
        else:
            values = [_in_percent(measure, known, arm) for measure in find_measures(wanted, measures)]
        return _mean(values)

    blank: list[float | None] = [None] * len(paper.columns)
    rows: list[dict[str, Any]] = [
        {
            "arm": arm,
            "paper": paper.numbers.get(arm, blank),
            "here": [_mean([value(arm, one) for one in wanted]) for wanted in paper.columns.values()],
        }
        for arm in arms
    ]
    rows += [{"arm": None, "name": name, "paper": row, "here": blank} for name, row in paper.others.items()]
    columns = [{"name": name, "measures": wanted} for name, wanted in paper.columns.items()]
    texts = {"source": paper.source, "scale": paper.scale, "note": paper.note}
    return {**texts, "columns": columns, "rows": rows}


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean; None if one value was not measured."""
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None


def _in_percent(measure: Measure, tables: Mapping[str, Any], arm: str) -> float | None:
    mean: float | None = tables[measure.name]["arms"][arm]["mean"]
    return mean if mean is None or measure.is_loss else 100 * mean


def _short_value(scores: ShortScores, wanted: str) -> float | None:
    """Return the score of a task after a stage (`short/mmlu@64k`), or the mean of all scored tasks (`short@64k`)."""
    name, _, stage = wanted.partition("@")
    found, task = scores.get(stage, {}), name.removeprefix(SHORT).removeprefix("/")
    values = [found.get(task)] if task else list(found.values())
    mean = _mean(values)
    return None if mean is None else 100 * mean


def paper_table(paper: Paper) -> Table:
    """Tabulate the paper's numbers alone, arms first."""
    rows = [entries(name, *map(_show, row)) for name, row in (paper.numbers | paper.others).items()]
    return Table(caption=paper.caption, columns=["arm", *paper.columns], rows=rows, note=paper.note)


def beside_table(found: Mapping[str, Any]) -> Table:
    """Convert `beside_paper` to a table: our measurement, with the paper's number as its note."""
    rows = []
    for row in found["rows"]:
        pairs = list(zip(row["here"], row["paper"], strict=True))
        cells = [
            Entry(
                text=MISSING if here is None else f"{here:.1f}", note="" if theirs is None else f"paper {_show(theirs)}"
            )
            for here, theirs in pairs
        ]
        if any(value is not None for pair in pairs for value in pair):
            rows.append([Entry(text=row["arm"] or row["name"]), *cells])
    note = (
        f"Percent. “paper”: the paper's numbers at its scale ({found['scale']}). They show the order of "
        f"the arms and the size of differences; do not compare them with a run of another size. {found['note']}"
    )
    columns = ["arm", *(column["name"] for column in found["columns"])]
    return Table(caption=f"Compared with {found['source']}", columns=columns, rows=rows, note=note.strip())


def _show(value: float | None) -> str:
    """Format a number like the paper: one decimal, or two if it has two."""
    return MISSING if value is None else f"{value:.1f}" if round(value, 1) == value else f"{value:g}"


def list_studies() -> list[dict[str, Any]]:
    """List the bundled studies with their arms and the paper's numbers, without loading their recipes."""
    found = []
    for bundled in bundled_studies().values():
        data, _, _ = read_yaml(bundled.path.read_text(encoding="utf-8"), bundled.name)
        about = {"name": bundled.name, "summary": bundled.summary, "recipe": data["recipe"], "arms": list(data["arms"])}
        found.append({**about, "paper": data.get("paper"), "path": str(bundled.path)})
    return found
