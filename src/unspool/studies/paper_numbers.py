"""A paper's own numbers in a study file, and the results of the study's runs beside them.

The numbers are the paper's, at the paper's scale: they are shown and never compared by a test.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from unspool.core.formatting import MISSING
from unspool.core.table import Entry, Table, entries
from unspool.recipe.json_schema import unknown_key
from unspool.recipe.paths import bundled_studies
from unspool.recipe.yaml_lines import Problem, read_yaml
from unspool.studies.arm_scores import Measure, find_measures

KEYS = ("source", "scale", "note", "columns", "numbers", "others")
Numbers = dict[str, list[float | None]]


@dataclass(frozen=True, kw_only=True)
class Paper:
    source: str  # such as `ProLong, Table 4`
    scale: str  # model and tokens that the numbers were measured with
    note: str
    columns: dict[str, list[str]]  # the paper's column: measures of ours whose mean it is; none: not measured here
    numbers: Numbers  # arm: one number for each column, in percent
    others: Numbers  # rows of the paper's table that are no arms

    @property
    def caption(self) -> str:
        return f"{self.source}: the paper's numbers in percent, at the paper's scale ({self.scale})"


def read_paper(data: Mapping[str, Any]) -> Paper | None:
    """The block `paper` of a study file without problems."""
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
            yield Problem(place=("paper", key), text=unknown_key(key, KEYS))
    for key in ("source", "scale"):
        if not isinstance(given.get(key), str):
            yield Problem(place=("paper", key), text="missing; write which table of which paper, and at which scale.")
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
                text = f"no arm is called {name!r}; write rows that are no arms under paper.others."
                yield Problem(place=("paper", key, name), text=text)
            if not isinstance(row, list) or len(row) != len(columns) or not all(map(_is_number, row)):
                text = f"must be a list of {len(columns)} numbers, one for each column; null where there is none."
                yield Problem(place=("paper", key, name), text=text)


def _are_measures(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return value is None or (bool(names) and all(isinstance(name, str) for name in names))


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def beside_paper(
    paper: Paper, arms: Sequence[str], measures: Sequence[Measure], tables: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The paper's rows with our means over seeds beside them, as study.json has it."""
    known = {table["measure"]: table for table in tables}
    found = {name: [find_measures(one, measures) for one in wanted] for name, wanted in paper.columns.items()}
    blank: list[float | None] = [None] * len(paper.columns)
    rows: list[dict[str, Any]] = [
        {
            "arm": arm,
            "paper": paper.numbers.get(arm, blank),
            "here": [_value(arm, groups, known) for groups in found.values()],
        }
        for arm in arms
    ]
    rows += [{"arm": None, "name": name, "paper": row, "here": blank} for name, row in paper.others.items()]
    columns = [
        {"name": name, "measures": [measure.name for group in groups for measure in group]}
        for name, groups in found.items()
    ]
    texts = {"source": paper.source, "scale": paper.scale, "note": paper.note}
    return {**texts, "columns": columns, "rows": rows}


def _value(arm: str, groups: Sequence[Sequence[Measure]], tables: Mapping[str, Any]) -> float | None:
    """The mean over the groups of their measures' means, scores in percent; None if one of them was not measured."""
    means = []
    for group in groups:
        values = [tables[measure.name]["arms"][arm]["mean"] for measure in group]
        if not values or None in values:
            return None
        means.append(fmean(values) * (1 if group[0].is_loss else 100))
    return fmean(means) if means else None


def paper_table(paper: Paper) -> Table:
    """The paper's numbers alone, arms first."""
    rows = [entries(name, *map(_show, row)) for name, row in (paper.numbers | paper.others).items()]
    return Table(caption=paper.caption, columns=["arm", *paper.columns], rows=rows, note=paper.note)


def beside_table(found: Mapping[str, Any]) -> Table:
    """`beside_paper` as a table: what was measured here, and the paper's number as its note."""
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
        f"Percent. “paper”: the paper's own numbers at its own scale ({found['scale']}). They show the order of "
        f"the arms and the size of differences; a run of another size cannot be compared with them. {found['note']}"
    )
    columns = ["arm", *(column["name"] for column in found["columns"])]
    return Table(caption=f"Beside {found['source']}", columns=columns, rows=rows, note=note.strip())


def _show(value: float | None) -> str:
    """As papers print it: one decimal, two where there are two."""
    return MISSING if value is None else f"{value:.1f}" if round(value, 1) == value else f"{value:g}"


def list_studies() -> list[dict[str, Any]]:
    """The bundled studies with their arms and the paper's numbers, without loading their recipes."""
    found = []
    for bundled in bundled_studies().values():
        data, _, _ = read_yaml(bundled.path.read_text(encoding="utf-8"), bundled.name)
        about = {"name": bundled.name, "summary": bundled.summary, "recipe": data["recipe"], "arms": list(data["arms"])}
        found.append({**about, "paper": data.get("paper"), "path": str(bundled.path)})
    return found
