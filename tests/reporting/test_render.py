import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from unspool.core.errors import ConfigError
from unspool.reporting.page import write_report

from .fake_run import SCRIPT, fake_scores, recall_cell, validation_lines, write_fake_run, write_scores

VOID = {"meta", "link", "br", "img", "hr"}


class Page(HTMLParser):
    """Fails on unbalanced tags; collects tags, ids, links and text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data.replace("\u00a0", " ").replace("\u2060", "")


def page_of(*runs: Path) -> Page:
    out = runs[0].parent / "page.html"
    write_report(list(runs), out)
    return Page(out.read_text(encoding="utf-8"))


def test_the_page_is_whole_and_loads_nothing(fake_run: Path):
    page = page_of(fake_run)

    names = {tag for tag, _ in page.tags}
    assert {"svg", "table", "pre"} <= names
    assert names.isdisjoint({"script", "img", "iframe", "object", "embed"})
    links = [value for _, attrs in page.tags for key, value in attrs.items() if key in ("src", "href", "srcset")]
    assert [link for link in links if not (link or "").startswith(("#", "data:"))] == []
    style = (fake_run.parent / "page.html").read_text(encoding="utf-8").split("<style>")[1].split("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style


def test_text_from_files_stays_text(fake_run: Path):
    html = (page_of(fake_run), (fake_run.parent / "page.html").read_text(encoding="utf-8"))

    assert SCRIPT in html[0].text
    assert "<script" not in html[1]
    assert "<b>escaped</b> & shown as it is" in html[0].text


def test_names_of_models_and_stages_are_escaped(fake_run: Path):
    evil = "<img src=x>"
    shutil.copytree(fake_run / "scores" / "abf", fake_run / "scores" / evil)

    page = page_of(fake_run)
    assert "img" not in {tag for tag, _ in page.tags}
    assert evil in page.text


def test_output_that_is_not_valid_text_is_written_readably(fake_run: Path):
    cells, samples = fake_scores("base")
    samples[-40]["output"] = "a\ud800b\x00c\u202ed"
    write_scores(fake_run, "base", cells, samples)

    assert "a⟨U+D800⟩b␀c⟨U+202E⟩d" in page_of(fake_run).text


def test_every_chart_has_a_name_for_screen_readers(fake_run: Path):
    charts = [attrs for tag, attrs in page_of(fake_run).tags if tag == "svg" and attrs.get("class") == "chart"]

    # Scores, heatmaps, loss, long against short, training, positions, lengths and mixes.
    assert len(charts) == 2 + 3 + 1 + 3 + 4 + 2 + 3 + 2
    assert all(chart["role"] == "img" and chart["aria-label"] and "viewbox" in chart for chart in charts)


def test_a_model_has_one_colour_in_all_charts(fake_run: Path):
    html = (fake_run.parent / "page.html", page_of(fake_run))[0].read_text(encoding="utf-8")

    keyed = set(re.findall(r'<g class="(m\d)">(?:(?!</svg>).)*</svg>\s*<?b?>?(base|abf|utk)\b', html))
    assert keyed == {("m0", "base"), ("m1", "abf"), ("m2", "utk")}


def test_numbers_and_headline_of_the_files_are_on_the_page(fake_run: Path):
    text = page_of(fake_run).text

    assert "tiny: 256 → 2K. Needle recall at 2K: 0%" in text
    assert "Loss inside 256" in text
    assert "original context 256" in text
    assert "1 min 10 s" in text
    assert "short 31, tail 1,200" in text
    assert "1,403,221" in text


def test_missing_values_print_as_a_dash(fake_run: Path):
    write_scores(fake_run, "utk", [recall_cell("key_value", 2048, None, 0, 0)], [])

    tile = re.search(r"Key-value recall at 2K</h2>.*?</dl>", _html(fake_run), re.S)
    assert tile is not None
    assert re.findall(r"<b>(.*?)</b>", tile[0])[-1] == "–"


def test_a_model_without_a_suite_is_absent_not_zero(fake_run: Path):
    write_scores(fake_run, "utk", [], [])

    tile = re.search(r"Needle recall at 2K</h2>.*?</dl>", _html(fake_run), re.S)
    assert tile is not None
    assert re.findall(r"<b>(.*?)</b>", tile[0])[-1] == "–"


def _html(run: Path) -> str:
    page_of(run)
    return (run.parent / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("removed", "sentence"),
    [
        ("scores", "Recall was not scored"),
        ("stages", "No training steps yet"),
        ("recipe.yaml", "recipe.yaml is not in the run folder"),
        ("run.json", "run.json does not record the original context"),
        ("datasets", "Documents"),
    ],
)
def test_a_missing_part_is_reported_and_the_rest_is_shown(fake_run: Path, removed: str, sentence: str):
    path = fake_run / removed
    shutil.rmtree(path) if path.is_dir() else path.unlink()

    assert sentence in page_of(fake_run).text


def test_a_run_that_only_has_a_recipe_gives_a_page(tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("name: fresh\nstages:\n  - {name: a, context_length: 2K}\n")

    text = page_of(tmp_path / "run").text
    for sentence in ("No scores yet", "No training steps yet", "No corpus or dataset", "not trained yet"):
        assert sentence in text


def test_long_training_is_averaged_not_cut(fake_run: Path):
    step = {"step": 0, "tokens": 0, "loss": 2.0, "lr": 1e-4, "tokens_per_second": 1.0, "losses": {}}
    lines = [json.dumps({**step, "step": at, "tokens": at * 1000}) for at in range(1, 5001)]
    (fake_run / "stages" / "abf" / "metrics.jsonl").write_text("\n".join(lines))

    html = _html(fake_run)
    curves = re.findall(r'<polyline class="line" points="([^"]*)"', html)
    assert max(len(curve.split()) for curve in curves) <= 300
    assert "averaged over neighboring steps" in html
    assert "5,000" in html


def test_validation_is_drawn_where_there_is_any(fake_run: Path):
    assert "Validation loss" not in _html(fake_run)
    (fake_run / "stages" / "abf" / "validation.jsonl").write_text(validation_lines(4.0, 3.5, 3.25))
    page = page_of(fake_run)
    assert "Validation loss" in page.text
    assert "the same at positions 64–128" in page.text


def test_several_runs_are_side_by_side_and_share_the_base_line(fake_run: Path):
    other = write_fake_run(fake_run.with_name("other"))

    page = page_of(fake_run, other)
    assert "2 runs side by side" in page.text
    assert "tiny (tiny) · base" in page.text
    assert "tiny (other) · utk" in page.text
    assert "tiny (other) · base" not in page.text
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids)) > 20
    links = [attrs["href"] for tag, attrs in page.tags if tag == "a"]
    assert {link.removeprefix("#") for link in links if link} <= set(ids)


def test_the_report_is_replaced_whole(fake_run: Path):
    out = fake_run / "deep" / "report.html"
    write_report([fake_run], out)
    first = out.read_bytes()
    write_report([fake_run], out)

    assert out.read_bytes() == first
    assert list(out.parent.iterdir()) == [out]


def test_a_folder_as_output_is_refused(fake_run: Path):
    with pytest.raises(ConfigError, match=r"is a folder\. Name the file to write"):
        write_report([fake_run], fake_run)


def test_no_runs_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="at least one run folder"):
        write_report([], tmp_path / "report.html")
