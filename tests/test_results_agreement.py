"""The table of cheap measures, from collected runs: rank correlations, device seconds, and scores that came later."""

import gzip
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from unspool.core.artifacts import publish
from unspool.studies.raw_results import collect

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))
K = 1024
RECIPE = """\
name: {arm}-s0
seed: 0
model: org/name
sources: {{books: {{kind: jsonl, path: data/books.jsonl}}}}
datasets: {{long: {{from: books, seq_len: 4K, packing: concat}}}}
stages: [{{name: train, context_length: 4K, mix: {{long: 1}}, tokens: 1M, batch_tokens: 16K, lr: 1e-5}}]
evals: [{{suite: niah, lengths: [4K]}}, {{suite: ruler, lengths: [32K]}}]
"""
# Right answers of 10 on RULER, right answers of 10 on needles, and loss of key tokens, by arm.
ARMS = {"a": (1, 2, 2.6), "b": (3, 2, 2.5), "c": (4, 6, 2.1), "d": (6, 5, 2.2), "e": (8, 9, 1.9), "f": (9, 8, 1.8)}
NEEDLES = {"suite": "niah", "length": 4 * K, "prompt_tokens": 4000}
RULER = {"suite": "ruler", "task": "vt", "length": 32 * K, "prompt_tokens": 32_000}
SECONDS = 45.0  # of 10 needles and 10 questions of RULER, that is 360,000 prompt tokens


def answers(right: int, kind: dict[str, Any]) -> list[dict[str, Any]]:
    named = f"{kind['suite']}-"
    return [kind | {"hash": f"{named}{at}", "index": at, "score": float(at < right)} for at in range(10)]


def write_scores(folder: Path, samples: list[dict[str, Any]]) -> None:
    with publish(folder, kind="scores", inputs={"model": "m"}, settings={"evals": []}) as draft:
        (draft.folder / "samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in samples))


@pytest.fixture
def data(tmp_path, monkeypatch) -> str:
    """A study of six arms whose LongPPL was computed later, collected into `study`."""
    study = tmp_path / "out"
    for arm, (ruler, needles, loss) in ARMS.items():
        run = study / f"{arm}-s0"
        run.mkdir(parents=True)
        (run / "recipe.yaml").write_text(RECIPE.format(arm=arm))
        (run / "run.json").write_text(json.dumps({"seconds": {"scores/train": SECONDS}}))
        write_scores(run / "scores" / "train", [*answers(needles, NEEDLES), *answers(ruler, RULER)])
        windows = [
            {"suite": "longppl", "length": 32 * K, "hash": f"w{at}", "index": at, "prompt_tokens": 32 * K}
            | {"score": loss, "key_tokens": 50, "key_positions": list(range(50))}
            for at in range(4)
        ]
        write_scores(study / "longppl" / f"{arm}-s0", windows)
        (study / "longppl" / f"{arm}-s0" / "summary.json").write_text("{}")
    cells = [{"suite": "short", "task": "local_piqa", "value": 0.5, "low": 0.45, "high": 0.55, "n": 400}]
    (study / "short" / "a-s0").mkdir(parents=True)
    (study / "short" / "a-s0" / "summary.json").write_text(json.dumps({"model": "m", "cells": cells}))
    name = tmp_path.name  # answers are cached by the folder's name
    assert collect(study, tmp_path / name) == [f"{arm}-s0" for arm in ARMS]
    monkeypatch.setattr("result_data.RESULTS", tmp_path)
    return name


def table(**settings: Any) -> tuple[dict[str, list[str]], str]:
    """Return the cells by measure, and the note below the table."""
    blocks = importlib.import_module("result_blocks")
    lines = blocks.BLOCKS["agreement"](settings).text.splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return {row[0]: row[1:] for row in rows[2:]}, lines[-1]


COLUMNS = {"RULER 32K": "ruler/32K", "needles 4K": "niah/4K", "LongPPL 32K": "longppl/32K"}


def test_measures_are_ranked_by_their_correlation_over_collected_arms(data):
    found, _ = table(data=[data], target="RULER 32K", columns=COLUMNS)
    ruler, needles, loss = zip(*ARMS.values(), strict=True)
    wanted = {"needles 4K": stats.spearmanr(needles, ruler), "LongPPL 32K": stats.spearmanr([-x for x in loss], ruler)}
    assert {name: cells[0] for name, cells in found.items()} == {
        name: f"+{one.statistic:.2f}" for name, one in wanted.items()
    }
    assert all(" to " in cells[1] and cells[2] == "6" for cells in found.values())


def test_device_seconds_are_prompt_tokens_at_the_rate_of_all_scoring(data):
    found, note = table(data=[data], target="RULER 32K", columns=COLUMNS)
    rate = 10 * (4000 + 32_000) / SECONDS
    assert found["needles 4K"][3] == f"{40_000 / rate:.1f}" == "5.0"
    assert found["LongPPL 32K"][3] == f"{4 * 32 * K / rate:.1f}", "later scores do not change the rate"
    assert note.endswith(f"The target takes {320_000 / rate:.1f} device seconds.")
    shared, _ = table(data=[data], target="RULER 32K", columns=COLUMNS, at_once=2)
    assert shared["needles 4K"][3] == "2.5"
    measured, _ = table(data=[data], target="RULER 32K", columns=COLUMNS, seconds={"needles 4K": 7})
    assert measured["needles 4K"][3] == "7"


def test_later_scores_join_their_run_without_the_choice_of_key_tokens(data, tmp_path):
    folder = tmp_path / data / "a-s0"
    (line, *_) = gzip.decompress((folder / "longppl.jsonl.gz").read_bytes()).splitlines()
    assert "key_positions" not in json.loads(line) and json.loads(line)["key_tokens"] == 50
    assert json.loads((folder / "run.json").read_text())["scored_later"] == ["longppl", "short"]
    blocks = importlib.import_module("result_blocks")
    short = blocks.BLOCKS["short"]({"data": data, "rows": ["a"], "tasks": ["local_piqa"]}).text
    assert "| a | 50.0% ±5.0 |" in short
