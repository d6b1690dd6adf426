"""The results pages say what `make results` computes from the committed answers."""

import csv
import gzip
import importlib.util
import json
import math
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from scipy import stats

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
sys.path.insert(0, str(ROOT / "tools"))
spec = importlib.util.spec_from_file_location("unspool_results", ROOT / "tools" / "results.py")
assert spec is not None and spec.loader is not None
results = importlib.util.module_from_spec(spec)
spec.loader.exec_module(results)

Run = importlib.import_module("unspool.studies.raw_results").Run
K = 1024
ARMS = ("abf", "utk-80", "cip-2")
PAGES = [path for path in (results.README, *sorted(RESULTS.glob("*.md"))) if results.BLOCK.search(path.read_text())]


def test_every_table_and_figure_is_what_the_committed_answers_give():
    assert len(PAGES) >= 3
    assert [path.name for path, _ in results.outdated(PAGES)] == [], "run make results"


def test_a_changed_number_and_a_changed_figure_are_found(tmp_path, monkeypatch):
    page = RESULTS / "untie-the-knots.md"
    text = page.read_text(encoding="utf-8")
    changed = tmp_path / page.name
    changed.write_text(text.replace("14% (9–18)", "15% (9–18)", 1))
    assert [path for path, _ in results.outdated([changed])] == [changed]
    monkeypatch.setattr("result_figures.IMAGES", tmp_path)
    changed.write_text(text)
    assert {path.suffix for path, _ in results.outdated([changed])} == {".svg"}
    assert results.main([str(changed), "--check"]) == 1
    assert results.main([str(changed)]) == 0 and results.main([str(changed), "--check"]) == 0


def test_claims_count_the_chosen_questions_of_a_suite_only(tmp_path):
    file = tmp_path / "claims.yaml"
    kept = (RESULTS / "data" / "claims.yaml").read_text(encoding="utf-8")
    kept = kept.replace("folder: smollm2-32k/study\n", "folder: smollm2-32k/study\n    where: {niah: {depth: 0.5}}\n")
    file.write_text(
        kept.replace("metrics: [niah/16K + niah/32K,", "metrics: [niah/16K + niah/32K, perplexity/16K-32K,")
    )
    blocks = importlib.import_module("result_blocks")
    chosen, every = (blocks._judged(str(path)) for path in (file, RESULTS / "data" / "claims.yaml"))

    def questions(findings, metric):
        mine = [one for one in findings if one.folder == "smollm2-32k/study" and one.claim.second == "ct"]
        return {one.questions for one in mine if one.metric.startswith(metric)}

    assert questions(every, "niah/16K") == {40}
    assert questions(chosen, "niah/16K") == {8}, "one of five depths"
    assert questions(chosen, "perplexity") == {24}, "other suites have no depth"


@pytest.mark.parametrize(
    ("block", "wanted"),
    [
        ("tables\n-->\n<!-- end results -->", "block tables: block 'tables' is not known"),
        (
            "scores\ndata: smollm2-32k/study\n-->\n<!-- end results -->",
            "block scores: the setting 'rows' is missing",
        ),
        (
            "scores\ndata: smollm2-32k/study\ncolumns: [niah/32K]\nrows: [abff]\n-->\n<!-- end results -->",
            "no arm or run abff; it has abf-s0",
        ),
        ("scores\ndata: smollm2-32k/study\n", "a block has no `<!-- end results -->`"),
    ],
)
def test_a_mistake_in_a_block_is_one_sentence(block, wanted, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n\n<!-- results: {block}\n")
    with pytest.raises(results.ConfigError, match=re.escape(wanted)):
        list(results.outdated([page]))


# Three numbers of the pages, computed here from the answers with nothing of the tools


@pytest.mark.parametrize(
    ("data", "arm", "against", "seeds", "comparisons", "wanted"),
    [
        ("utk-small", "utk-80", "abf", (0, 1, 2), 3, ["+7.9 (3.2 to 12.6)", "0.056", "3"]),
        ("harpe-small", "uniform-descending", "shared", (0, 1, 2), 1, ["−4.6 (−8.9 to −0.2)", "0.046", "3"]),
    ],
)
def test_planned_comparisons_follow_from_the_answers(data, arm, against, seeds, comparisons, wanted) -> None:
    """Student's t over the seeds' means, since every seed has other questions; Holm's factor of the smallest p.

    The interval is never narrower than Agresti and Min's over questions, and p never below that of a sign test.
    """
    means, flat = [], []
    for seed in seeds:
        found = {}
        for name in (arm, against):
            text = gzip.decompress((RESULTS / "systems" / data / f"{name}-s{seed}" / "niah.jsonl.gz").read_bytes())
            read = [json.loads(one) for one in text.decode().splitlines()]
            development = [one for one in read if one["needle_wording"] in ("magic", "record", "parcel")]
            found[name] = {one["hash"]: one["score"] for one in development if one["length"] in (16 * K, 32 * K)}
        assert found[arm].keys() == found[against].keys() and len(found[arm]) == 270
        gains = [found[arm][key] - found[against][key] for key in found[arm]]
        means.append(sum(gains) / 270)
        flat += gains
    mean, half = sum(means) / 3, stats.t.ppf(0.975, 2) * stats.sem(means)
    n, center = len(flat), sum(flat) / (len(flat) + 2)
    floor = math.sqrt(((sum(one**2 for one in flat) + 1) / (n + 2) - center**2) / (n + 2)) * stats.t.ppf(0.975, n - 1)
    low, high = 100 * min(mean - half, center - floor), 100 * max(mean + half, center + floor)
    signs = stats.binomtest(flat.count(1), flat.count(1) + flat.count(-1)).pvalue
    p = min(1, comparisons * max(signs, 2 * stats.t.sf(abs(mean) / stats.sem(means), 2)))
    page, label, in_readme = {
        "utk-small": ("untie-the-knots.md", "`utk-80` − `abf` |", "UtK − ABF"),
        "harpe-small": ("harpe.md", "`uniform-descending` − `shared` |", "HARPE − shared base"),
    }[data]
    values = f"{100 * mean:+.1f} ({low:.1f} to {high:.1f})".replace("-", "−")
    shown = "<0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"
    assert cells(page, label)[1:] == [values, shown, "3"] == wanted
    assert cells("../../README.md", in_readme)[1:] == wanted


def test_readme_quotes_the_tables_of_the_systems() -> None:
    readme = (RESULTS.parents[1] / "README.md").read_text()
    arms = [cells("harpe.md", "untouched model"), *(cells("untie-the-knots.md", f"`{arm}`, 3 seeds") for arm in ARMS)]
    untouched, abf, utk, cip2 = (cell[-1] for cell in arms)
    assert f"The untouched model finds {untouched}, ABF {abf}, UtK {utk}, CIP-2 {cip2}, n = 270" in readme
    held_back = [*cells("untie-the-knots.md", "all three")[2:], *cells("harpe.md", "all three")[2:]]
    shares = sorted(int(cell.split("%")[0]) for cell in held_back)
    assert f"every trained arm finds {shares[0]} to {shares[-1]}% of them at 32K" in readme
    share = cells("untie-the-knots.md", "locker, password, ship")[1].split(" ")[0]
    assert f"The untouched model finds {share} of them at 1K" in readme


def lines(run: str) -> list[dict]:
    text = gzip.decompress((RESULTS / "smollm2-32k" / "study" / run / "samples.jsonl.gz").read_bytes()).decode()
    return [json.loads(line) for line in text.splitlines()]


def needles(run: str, *lengths: int) -> dict[str, float]:
    return {one["hash"]: one["score"] for one in lines(run) if one["suite"] == "niah" and one["length"] in lengths}


def cells(page: str, label: str) -> list[str]:
    text = (RESULTS / page).read_text(encoding="utf-8")
    (row,) = (line for line in text.splitlines() if line.startswith(f"| {label}"))
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_a_score_with_its_interval():
    scores = list(needles("utk-s0", 32 * K).values())
    found = stats.binomtest(int(sum(scores)), len(scores)).proportion_ci(0.95, "wilson")
    wanted = f"{100 * sum(scores) / len(scores):.0f}% ({100 * found.low:.0f}–{100 * found.high:.0f})"
    assert cells("smollm2-32k.md", "`utk`: with tangled documents")[-1] == wanted == "52% (37–67)"


def test_a_difference_over_two_seeds():
    """t with one degree of freedom over seeds, never narrower than Agresti and Min's interval over questions."""
    gains = []
    for seed in (0, 1):
        abf, utk = (needles(f"{arm}-s{seed}", 16 * K, 32 * K) for arm in ("abf", "utk"))
        assert abf.keys() == utk.keys()
        gains.append([utk[key] - abf[key] for key in abf])
    means = [sum(one) / len(one) for one in gains]
    mean, half = sum(means) / 2, stats.t.ppf(0.975, 1) * abs(means[0] - means[1]) / 2
    flat = gains[0] + gains[1]
    n, center = len(flat), sum(flat) / (len(flat) + 2)
    error = math.sqrt(((sum(one**2 for one in flat) + 1) / (n + 2) - center**2) / (n + 2))
    around = stats.t.ppf(0.975, n - 1) * error
    low, high = min(mean - half, center - around), max(mean + half, center + around)
    wanted = f"+{100 * mean:.1f} ({100 * low:.1f} to {100 * high:.1f})"
    assert wanted == "+40.6 (32.4 to 48.6)"
    assert "`utk` finds +40.6 points (32.4 to 48.6)" in (RESULTS / "smollm2-32k.md").read_text(encoding="utf-8")


def test_a_rank_correlation():
    arms = ("abf", "cip2", "ct", "documents", "harpe", "harpe-shared", "utk")
    far = [sum(needles(f"{arm}-s0", 16 * K, 32 * K).values()) for arm in arms]
    near = [sum(needles(f"{arm}-s0", 8 * K).values()) for arm in arms]
    assert cells("data.md", "needles 8K |")[1] == f"+{stats.spearmanr(far, near).statistic:.2f}"


def test_the_intervals_of_the_pages_were_compared_with_others() -> None:
    with (RESULTS / "data" / "coverage.csv").open(encoding="utf-8", newline="") as file:
        found = [row for row in csv.DictReader(file) if row["seeds"] == "3"]
    assert {(row["questions"], row["trials"]) for row in found} == {("25", "2000"), ("100", "2000")}
    text = (RESULTS / "data.md").read_text(encoding="utf-8")
    for method in ("questions", "bootstrap", "t", "two-level"):
        rates = [100 * float(row[f"{method} coverage"]) for row in found]
        assert f"{min(rates):.1f}% to {max(rates):.1f}%" in text, method
    wider = max(float(row["t width"]) / float(row["two-level width"]) for row in found)
    assert f"up to {wider:.1f} times as wide" in text


# Data and figures


def test_the_data_are_below_20_mb():
    assert sum(path.stat().st_size for path in RESULTS.rglob("*") if path.is_file()) < 20e6


@pytest.mark.parametrize(
    "name", [name for page in PAGES for name in re.findall(r"^file: (\S+\.svg)$", page.read_text(), re.MULTILINE)]
)
def test_a_figure_is_readable_on_a_phone_and_on_dark_pages(name):
    drawn = (ROOT / "docs" / "images" / name).read_text(encoding="utf-8")
    root = ET.fromstring(drawn)
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    assert min(float(size) for size in re.findall(r"font: ?([\d.]+)px", drawn)) * 350 / width >= 11
    assert root.findall(".//{*}rect")[0].attrib["fill"] == "#fff", "no background of its own"
    assert all(0 <= float(one.attrib["y"]) <= height for one in root.iter("{http://www.w3.org/2000/svg}text"))
    assert not re.search(r"<script|href=|@import|url\(|\bon\w+=", drawn)


# Blocks on made-up data


@pytest.fixture
def made_up(tmp_path, monkeypatch) -> str:
    """Two arms with three seeds, two wordings of needles, and a short task."""
    monkeypatch.setattr("result_data.RESULTS", tmp_path)
    for arm, right in (("plain", 4), ("better", 16)):
        for seed in range(3):
            lines = [
                {"suite": "niah", "length": 4 * K, "hash": f"{seed}-{at}", "score": float(at % 20 < right)}
                | {"depth": at % 20 / 20, "needle_wording": "ship" if at < 20 else "magic"}
                for at in range(40)
            ]
            spans = [{"from": 0, "to": 2 * K, "value": 3.0 + seed}, {"from": 2 * K, "to": 4 * K, "value": 2.0}]
            lines += [{"suite": "loss", "length": 4 * K, "hash": f"w{at}", "losses": spans} for at in range(2)]
            cell = {"task": "piqa", "value": 0.5 + seed / 100, "low": 0.45, "high": 0.55, "n": 400}
            lines.append({"suite": "short", "task": "piqa", "length": 0, "cells": [cell]})
            folder = tmp_path / tmp_path.name / f"{arm}-s{seed}"
            folder.mkdir(parents=True)
            (folder / "niah.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            facts = {"stage": "train", "stages": ["train"], "seconds": {"stages/train": 90.0, "scores/train": 10.0}}
            (folder / "run.json").write_text(json.dumps(facts))
    return tmp_path.name  # answers are cached by the folder's name


def made(kind: str, **settings) -> list[list[str]]:
    """Cells of a block's table, without the line below the head."""
    table = [line for line in results.BLOCKS[kind](settings).text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in (table[0], *table[2:])]


def test_rows_say_how_many_seeds_and_columns_may_select_questions(made_up):
    ships = {"measure": "niah/4K", "where": {"needle_wording": "ship"}}
    late = {"measure": "niah/4K", "where": {"depth": {"from": 0.75, "to": 1}}}
    columns = {"all": "niah/4K", "ships": ships, "late": late}
    found = made("scores", data=made_up, columns=columns, rows=["plain", "better-s1"])
    assert [row[0] for row in found] == ["arm", "plain, 3 seeds", "better-s1"]
    wilson = stats.binomtest(24, 120).proportion_ci(0.95, "wilson")
    assert found[1][1] == f"20% ({100 * wilson.low:.0f}–{100 * wilson.high:.0f})", "all seeds agree: over questions"
    assert found[1][3].startswith("0% (") and found[2][3].startswith("20% (")
    turned = made("scores", data=made_up, columns=columns, rows=["plain", "better-s1"], transpose=True)
    assert [list(row) for row in zip(*turned, strict=True)] == found


def test_differences_are_against_the_baseline_or_the_row_s_own(made_up):
    rows = {"better": "better", "back": {"arm": "plain", "against": "better"}}
    found = made("differences", data=made_up, baseline="plain", columns={"needles": "niah/4K"}, rows=rows)
    assert [row[1].split()[0] for row in found[1:]] == ["+60.0", "−60.0"]
    assert [row[3] for row in found[1:]] == ["3", "3"]
    with pytest.raises(results.ConfigError, match="over = seeds: use `questions`"):
        made("differences", data=made_up, baseline="plain", over="seeds", columns=["niah/4K"], rows=["better"])


def test_a_difference_without_a_common_question_is_missing(made_up):
    rows = {"other seed": {"arm": "better-s1", "against": "plain-s0"}}
    block = results.BLOCKS["differences"]({"data": made_up, "columns": ["niah/4K"], "rows": rows})
    assert block.text.splitlines()[2:] == ["| other seed | – | – | 0 |", "", "n = 0 pairs of questions or windows."]


def test_short_tasks_have_the_wider_of_both_intervals(made_up):
    half = 4.3027 * 0.01 / math.sqrt(3)
    found = made("short", data=made_up, rows=["plain", "plain-s0"], tasks=["piqa"])
    assert found[1] == ["plain, 3 seeds", "51.0% ±5.0", "51.0% ±5.0"] and half < 0.05
    assert found[2] == ["plain-s0", "50.0% ±5.0", "50.0% ±5.0"]
    assert made("short", data=made_up, rows=["plain-s0"], tasks={"PIQA": "piqa"})[0] == ["arm", "PIQA", "mean"]


def test_the_inventory_counts_arms_runs_and_minutes(made_up):
    (_, row) = made("inventory", data=[made_up])
    assert row[:4] == [f"`{made_up}`", "2", "6", "niah, perplexity and short"] and row[6] == "10"


def test_seeds_are_columns_and_a_set_of_wordings_has_a_name(made_up):
    found = made("by_seed", data=made_up, measure="niah/4K", rows={"plain": "plain-s1", "better": "better"})
    assert found[0] == ["arm", "seed 0", "seed 1", "seed 2"]
    assert [cell.split()[0] for cell in found[1][1:]] == ["–", "20%", "–"]
    assert [cell.split()[0] for cell in found[2][1:]] == ["80%"] * 3
    settings = {"data": made_up, "columns": ["niah/4K"], "rows": ["plain-s0"]}
    development = results.BLOCKS["scores"](settings | {"where": {"needle_wording": "development"}})
    assert "n = 20 questions" in development.text, "of 40, 20 are in the wording magic"
    with pytest.raises(results.ConfigError, match="where: wording 'heldot' is not known"):
        results.BLOCKS["scores"](settings | {"where": {"needle_wording": "heldot"}})


def test_a_row_is_one_arm(made_up):
    with pytest.raises(results.ConfigError, match="has several runs with one seed; a row is one arm"):
        made("scores", data=made_up, columns=["niah/4K"], rows={"both": ["plain", "better"]})


def test_a_figure_has_a_point_for_each_arm_and_place(made_up):
    settings = {"data": made_up, "file": "x.svg", "title": "T", "rows": ["plain", "better"]}
    for measure, lengths, ticks in (
        ("niah/*", ["4K"], {"0%", "100%", "4K", "context length"}),
        ("perplexity/*", ["0-2K", "2K-4K"], {"0-2K", "2K-4K", "position"}),
    ):
        drawn = results.BLOCKS["figure"](settings | {"measure": measure, "lengths": lengths})
        ((path, content),) = drawn.figures.items()
        root = ET.fromstring(content)
        assert path.name == "x.svg" and drawn.text == "![T](../images/x.svg)"
        assert ticks <= {"".join(one.itertext()) for one in root.iter("{http://www.w3.org/2000/svg}text")}
        assert content.count('class="hit"') == 2 * len(lengths)


def test_every_task_of_a_suite_is_in_one_table(monkeypatch):
    answers = [
        {"suite": "ruler", "task": task, "length": length, "hash": f"{task}{length}{at}", "score": float(at < right)}
        for task, length, right in (("vt", 4 * K, 9), ("vt", 8 * K, 1), ("cwe", 4 * K, 5))
        for at in range(10)
    ]
    monkeypatch.setattr("result_data.runs_of", lambda data: [Run(arm="one", seed=3, samples=answers, folder=RESULTS)])
    block = results.BLOCKS["by_task"]({"data": "tasks", "suite": "ruler", "lengths": ["4K", "8K"], "rows": ["one"]})
    assert block.text.splitlines()[2:4] == ["| `cwe` | 50/– |", "| `vt` | 90/10 |"]
    found = stats.binomtest(9, 10).proportion_ci(0.95, "wilson")
    farthest = max(0.9 - found.low, stats.binomtest(5, 10).proportion_ci(0.95, "wilson").high - 0.5)
    assert block.text.endswith(
        f"n = 10 questions per cell and seed; 95% intervals reach at most {100 * farthest:.0f} points from the value."
    )


def test_an_effective_length_is_the_longest_that_keeps_the_score():
    lengths = ["2K", "4K", "8K", "16K", "32K"]
    found = made("effective", data="smollm2-32k/study", measure="niah/*", lengths=lengths, rows=["utk-s0", "ct-s0"])
    shares = [sum(needles("utk-s0", int(one[:-1]) * K).values()) / 40 for one in lengths]
    kept = [one for one, share in zip(lengths, shares, strict=True) if share >= 0.85 * shares[0]]
    assert found[1][1].split()[0] == kept[-1] == "16K"
    assert found[1][2] == "4K" and shares[1] >= 0.856 > shares[2], "a shorter length below the limit ends it"
    assert found[2][2] == "–", "never 85.6%"
