"""What became of the data, and the positions of models, as the page tells them."""

import json
from pathlib import Path

import numpy as np
import pytest

from unspool.core.table import Table
from unspool.reporting.data_section import audit
from unspool.reporting.gather import gather
from unspool.reporting.rope_section import position_tables, ropes
from unspool.reporting.run_results import RunResults

from .fake_run import CONFIG, NUM_STEPS

SHARES = {"books": 0.496, "recall": 0.504}


def column(table: Table, name: str) -> dict[str, str]:
    at = list(table.columns).index(name)
    return {row[0].text: row[at].text for row in table.rows}


def tables_of(results: RunResults) -> dict[str, Table]:
    return {table.caption: table for table in audit(results).tables}


def change(run: Path, artifact: str, **counts: object) -> None:
    """Rewrite counts of a manifest; None takes one away, as older runs lack it."""
    path = run / artifact / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["counts"] |= counts
    manifest["counts"] = {name: value for name, value in manifest["counts"].items() if value is not None}
    path.write_text(json.dumps(manifest))


def test_records_and_tokens_add_up(fake_run: Path):
    found = tables_of(gather(fake_run))

    assert column(found["Documents"], "adds up") == {"books": "yes", "recall": "yes"}
    assert set(column(found["Datasets"], "adds up").values()) == {"yes"}
    assert column(found["Documents"], "not read")["books"] == "not JSON 2"
    assert column(found["Datasets"], "− dropped")["short"] == "short 31, tail 1,200"
    assert audit(gather(fake_run)).warnings == []


def test_requested_and_realized_shares_of_sources_are_on_the_page(fake_run: Path):
    assert "Shares of sources" not in tables_of(gather(fake_run)), "older runs recorded none"
    recorded = {name: {"requested": 0.5, "realized": share, "trained_tokens": 1000} for name, share in SHARES.items()}
    change(fake_run, "datasets/short", shares=recorded)
    table = tables_of(gather(fake_run))["Shares of sources"]
    assert column(table, "requested share") == {"short: books": "50.0%", "short: recall": "50.0%"}
    assert column(table, "realized") == {"short: books": "49.6%", "short: recall": "50.4%"}


def test_a_lost_token_and_a_lost_record_are_reported(fake_run: Path):
    change(fake_run, "datasets/short", tokens=320 * 2048 - 1)
    change(fake_run, "corpus/books", records=213)
    results = gather(fake_run)

    assert column(tables_of(results)["Datasets"], "adds up")["short"] == "off by +1"
    assert audit(results).warnings == [
        "corpus books: counts do not add up; the difference is -2.",
        "dataset short: counts do not add up; the difference is +1.",
    ]


def test_missing_counts_of_an_older_run_are_dashes(fake_run: Path):
    change(fake_run, "corpus/books", records=None, quarantined=None, filtered=None, lengths=None)
    change(fake_run, "datasets/short", tokens_added=None, dropped=None)
    results = gather(fake_run)

    assert column(tables_of(results)["Documents"], "adds up") == {"books": "–", "recall": "yes"}
    assert column(tables_of(results)["Datasets"], "− dropped")["short"] == "–"
    assert [figure.title for figure in audit(results).lengths] == ["corpus recall"]


def test_the_realized_mix_is_counted_in_tokens(fake_run: Path):
    # Short rows of half the length: 3 · 2048 of 4 · 2048 tokens are long, 75%.
    change(fake_run, "datasets/short", rows=640)
    mix = tables_of(gather(fake_run))["Mix"]

    assert (column(mix, "requested")["abf · books-2k"], column(mix, "realized")["abf · books-2k"]) == ("60%", "75%")
    assert column(mix, "rows trained on")["utk · short"] == f"{2 * NUM_STEPS}"
    assert column(mix, "epochs")["utk · books-utk"] == f"{3 * NUM_STEPS / 480:.3g}"


def test_without_a_ledger_there_is_no_realized_mix(fake_run: Path):
    (fake_run / "stages" / "abf" / "ledger.jsonl").unlink()
    found = audit(gather(fake_run))

    mix = next(table for table in found.tables if table.caption == "Mix")
    assert (column(mix, "requested")["abf · short"], column(mix, "realized")["abf · short"]) == ("40%", "–")
    assert [figure.title for figure in found.mixes] == ["Mix of utk"]


def test_steps_repeated_in_a_ledger_count_once(fake_run: Path):
    path = fake_run / "stages" / "abf" / "ledger.jsonl"
    path.write_text(path.read_text() + json.dumps({"step": 1, "rows": {"short": [0, 1], "books-2k": [0, 1, 2]}}))

    assert gather(fake_run).stages[0].drawn == {"books-2k": 3 * NUM_STEPS, "short": 2 * NUM_STEPS}


def test_the_first_problems_are_shown_as_text(fake_run: Path):
    table = audit(gather(fake_run)).problems

    assert table is not None
    assert [entry.text for entry in table.rows[0]] == [
        "books",
        "not read",
        "books.jsonl, line 7",
        "not JSON",
        "Expecting value: '<b>'",
    ]


# Positions


def write_config(run: Path, stage: str, **values: object) -> None:
    (run / "stages" / stage / "model" / "config.json").write_text(json.dumps({**CONFIG, **values}))


def styles_of(results: RunResults) -> dict[str, int]:
    return {name: at for at, name in enumerate(results.model_names)}


def test_models_with_equal_frequencies_share_a_line(fake_run: Path):
    results = gather(fake_run)
    base, extended = ropes(results, styles_of(results))

    assert (base.names, extended.names) == (("base",), ("abf", "utk"))
    assert (base.summary, extended.summary) == ("base 300", "base 2e5")


def test_periods_and_the_curve_follow_the_formula(fake_run: Path):
    results = gather(fake_run)
    rope = ropes(results, styles_of(results))[1]
    theta = 200000.0 ** (-np.arange(0, 32, 2) / 32)

    assert rope.periods == pytest.approx(2 * np.pi / theta, rel=1e-6)
    values = np.cos(np.arange(2048)[:, None] * theta).sum(axis=1) / 16
    assert rope.lowest == pytest.approx(values.min(), abs=1e-4)
    below = np.flatnonzero(values < 0)
    assert rope.reach == (int(below[0]) if len(below) else None)


def test_bases_per_head_show_the_worst_head(fake_run: Path):
    write_config(fake_run, "utk", head_bases=[1e4, 2e5, 1e6, 5e6])
    results = gather(fake_run)
    harpe = ropes(results, styles_of(results))[2]

    assert (harpe.names, harpe.summary) == (("utk",), "a base per head, 10000 to 5e6")
    theta = 1e4 ** (-np.arange(0, 32, 2) / 32)
    worst = np.flatnonzero(np.cos(np.arange(2048)[:, None] * theta).sum(axis=1) < 0)
    assert harpe.reach == int(worst[0])
    assert position_tables(ropes(results, styles_of(results)), results)[1].note == "Of the slowest head."


@pytest.mark.parametrize("values", [{"rope_parameters": {"rope_type": "nonsense"}}, {"max_position_embeddings": None}])
def test_an_unknown_config_is_skipped(fake_run: Path, values: dict[str, object]):
    write_config(fake_run, "utk", **values)
    results = gather(fake_run)

    assert [rope.names for rope in ropes(results, styles_of(results))] == [("base",), ("abf",)]
