"""The page, Markdown and JSON say the same, and what summary.json says."""

import json
import re
from html import unescape
from pathlib import Path

import pytest

from unspool.core.table import escape_markdown
from unspool.reporting.gather import gather
from unspool.reporting.measures import format_interval, format_value
from unspool.reporting.page import render
from unspool.reporting.run_results import Cell
from unspool.reporting.text_formats import fenced, quoted, render_markdown, report_values

from .fake_run import LENGTHS, MODELS, write_fake_run


def html_tables(page: str) -> list[list[list[str]]]:
    """Cells of every table as text: value and note."""
    tables = []
    for table in re.findall(r"<table.*?</table>", page, re.S):
        rows = re.findall(r"<tr>(.*?)</tr>", table, re.S)
        cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.S) for row in rows]
        tables.append([[_words(cell) for cell in row] for row in cells])
    return tables


def _words(cell: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]+>", "", cell)).split())


def markdown_tables(text: str) -> list[list[list[str]]]:
    tables: list[list[list[str]]] = []
    for block in text.split("\n\n"):
        lines = [line for line in block.split("\n") if line.startswith("|")]
        if len(lines) > 1:
            rows = [re.split(r"(?<!\\) \| ", line[2:-2]) for line in (lines[0], *lines[2:])]
            tables.append([[_unmarked(cell) for cell in row] for row in rows])
    return tables


def _unmarked(cell: str) -> str:
    """What the page has: `**84%** (71–93)` is `84% 71–93`."""
    shown = unescape(cell.replace("**", ""))
    shown = re.sub(r"\\([\\`*_\[\]|~#!{}])", r"\1", shown)
    return re.sub(r" \((.*)\)$", r" \1", shown)


def test_every_table_of_the_page_is_in_the_markdown_with_the_same_numbers(fake_run: Path):
    runs = [gather(fake_run), gather(write_fake_run(fake_run.with_name("other")))]
    page, text = html_tables(render(runs)), markdown_tables(render_markdown(runs))

    # Before and after are tiles on the page.
    text = [table for table in text if table[0][0] != "measure"]
    assert len(page) == len(text) > 30
    assert page == text


@pytest.mark.parametrize("name", MODELS)
def test_numbers_of_summary_json_are_on_the_page_and_in_the_json(fake_run: Path, name: str):
    raw = json.loads((fake_run / "scores" / name / "summary.json").read_text())["cells"]
    results = gather(fake_run)
    found = {one["model"]: one["cells"] for one in report_values([results])["runs"][0]["models"]}

    assert found[name] == raw
    tables = {(table[0][0], table[0][-1]): table for table in html_tables(render([results])) if table[0][0] == "length"}
    column = 1 + MODELS.index(name)
    shown = [row[column] for row in tables["length", "n"][1:]]
    for length, text in zip(LENGTHS, shown, strict=True):
        cell = next(c for c in raw if (c["suite"], c["length"], c["depth"]) == ("key_value", length, None))
        spelled = Cell(**{key: cell[key] for key in ("suite", "metric", "length", "value", "n", "low", "high")})
        assert text == f"{format_value(spelled)} {format_interval(spelled)}"


def test_json_has_every_step_and_the_recipe_and_is_strict(fake_run: Path):
    (run,) = report_values([gather(fake_run)])["runs"]

    json.dumps(run, allow_nan=False)
    assert [len(stage["steps"]) for stage in run["stages"]] == [60, 60]
    assert run["recipe"] == (fake_run / "recipe.yaml").read_text()
    assert {one["path"] for one in run["artifacts"]} >= {"corpus/books", "datasets/short", "stages/abf", "scores/utk"}
    assert run["stages"][0]["mix_came"] == pytest.approx({"books-2k": 0.6, "short": 0.4})


def test_every_key_of_the_json_is_documented(fake_run: Path):
    assert report_values.__doc__ is not None
    named = set(re.findall(r"`(\w+)`", report_values.__doc__))
    found = report_values([gather(fake_run), gather(fake_run)])
    (run, _) = found["runs"]
    parts = [found, run, found["together"], run["models"][0], run["models"][0]["samples"][0], run["data"]]
    parts += [run[key][0] for key in ("measures", "comparisons", "stages", "positions", "artifacts")]
    parts += run["models"][0]["cells"]

    assert {key for part in parts for key in part} - named == set()


def test_json_of_what_json_cannot_hold_is_still_json(fake_run: Path):
    samples = fake_run / "scores" / "base" / "samples.jsonl"
    samples.write_text(samples.read_text().replace('"output": " ', '"output": "\\ud800 '))
    manifest = fake_run / "corpus" / "books" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"files": 1', '"files": NaN'))

    text = json.dumps(report_values([gather(fake_run)]), ensure_ascii=False, allow_nan=False)
    assert text.encode("utf-8")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<script>x</script>", "&lt;script&gt;x&lt;/script&gt;"),
        ("a|b", "a\\|b"),
        ("[x](javascript:y)", "\\[x\\](javascript:y)"),
        ("![x](http://y)", "\\!\\[x\\](http://y)"),
        ("two\n\n# lines", "two \\# lines"),
        ("*b* `c`", "\\*b\\* \\`c\\`"),
    ],
)
def test_markdown_text_cannot_become_markup(text: str, shown: str):
    assert escape_markdown(text) == shown


def test_code_cannot_leave_its_fence():
    assert fenced("a\n````\nb") == "`````text\na\n````\nb\n`````"
    assert quoted("a``b\nc") == "``` a``b↵c ```"
