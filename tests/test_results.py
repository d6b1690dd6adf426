"""The results pages say what `make results` computes from the committed answers."""

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

K = 1024
PAGES = sorted(path for path in RESULTS.glob("*.md") if results.BLOCK.search(path.read_text(encoding="utf-8")))


def test_every_table_and_figure_is_what_the_committed_answers_give():
    assert len(PAGES) >= 3
    assert [path.name for path, _ in results.outdated(PAGES)] == [], "run make results"


def test_a_changed_number_and_a_changed_figure_are_found(tmp_path, monkeypatch):
    page = RESULTS / "smollm2-32k.md"
    text = page.read_text(encoding="utf-8")
    changed = tmp_path / page.name
    changed.write_text(text.replace("20% (10–35)", "21% (10–35)", 1))
    assert [path for path, _ in results.outdated([changed])] == [changed]
    monkeypatch.setattr("result_blocks.IMAGES", tmp_path)
    changed.write_text(text)
    assert {path.suffix for path, _ in results.outdated([changed])} == {".svg"}
    assert results.main([str(changed), "--check"]) == 1
    assert results.main([str(changed)]) == 0 and results.main([str(changed), "--check"]) == 0


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
    assert cells("claims.md", "UtK is better than ABF")[3] == wanted == "+40.6 (32.4 to 48.6)"


def test_a_rank_correlation():
    arms = ("abf", "cip2", "ct", "documents", "harpe", "harpe-shared", "utk")
    far = [sum(needles(f"{arm}-s0", 16 * K, 32 * K).values()) for arm in arms]
    near = [sum(needles(f"{arm}-s0", 8 * K).values()) for arm in arms]
    assert cells("data.md", "needles 8K |")[1] == f"+{stats.spearmanr(far, near).statistic:.2f}"


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
