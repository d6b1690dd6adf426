from typing import Any

import numpy as np
import pytest
from rich.console import Console
from rich.table import Table

from unspool.cli.run import accounting_table, datasets_table, length_table, upsample_table
from unspool.data.lengths import histogram

K = 1024
LENS = {"books": np.array([100, 9 * K, 70 * K, 600 * K]), "wiki": np.array([500] * 3)}
SOURCES = {
    name: {"documents": len(lens), "tokens": int(lens.sum()), "lengths": histogram(lens)} for name, lens in LENS.items()
}
COUNTS: dict[str, Any] = {
    "rows": 10,
    "tokens": 640,
    "documents": 50,
    "tokens_in": 1000,
    "tokens_added": 7,
    "dropped": {"last_row": 60, "unread": 307},
    "fill_rate": 633 / 640,
    "truncation_rate": 0.125,
    "sources": {
        "a": {"tokens_in": 600, "tokens": 540, "dropped": {"last_row": 60}, "lengths": histogram(np.array([540]))},
        "b": {"tokens_in": 400, "tokens": 93, "dropped": {"unread": 307}, "lengths": histogram(np.array([93]))},
    },
}


def lines(table: Table) -> list[list[str]]:
    """The cells of every line, headings first."""
    console = Console(width=300)
    with console.capture() as capture:
        console.print(table)
    return [
        [cell.strip() for cell in line.split("  ") if cell.strip()]
        for line in capture.get().splitlines()
        if line.strip()
    ]


def test_a_length_table_counts_documents_by_length_and_long_tokens():
    head, books, wiki = lines(length_table(SOURCES))
    assert head[3:] == [
        *("<8K", "8K–16K", "16K–32K", "32K–64K", "64K–128K", "128K–256K", "256K–512K", "≥512K"),
        "tokens in ≥64K",
    ]
    assert books == ["books", "4", "695K", "1", "1", "1", "1", "686K"]
    assert wiki == ["wiki", "3", "1.5K", "3", "0"]


def test_a_datasets_table_says_how_full_and_how_often_cut():
    _, entry = lines(datasets_table({"long": COUNTS}))
    assert entry == ["long", "10", "640", "50", "98.9%", "12.5%", "1.1%", "last row 60, unread 307"]


UPSAMPLED: dict[str, Any] = {
    **COUNTS,
    "tokens_added": 71,
    "strategy": {"name": "tangle", "tokens_added": 7},
    "upsample": {"tokens_added": 64},
    "sources": {
        "a": {
            "tokens_in": 600,
            "tokens_added": 64,
            "tokens": 604,
            "dropped": {"last_row": 60},
            "upsample": {
                "tokens_added": 64,
                "tokens_dropped": 1200,
                "long_share_before": 0.3,
                "long_share_after": 0.71,
            },
        },
        "b": {"tokens_in": 400, "tokens": 93, "dropped": {"unread": 307}},
    },
}


def test_a_datasets_table_names_the_strategies_and_the_share_of_tokens_they_add():
    _, entry = lines(datasets_table({"long": UPSAMPLED}))
    assert entry[5:8] == ["12.5%", "tangle, upsample", "11.1%"]


def test_an_upsample_table_shows_long_documents_before_and_after():
    head, entry = lines(upsample_table({"long": UPSAMPLED, "plain": COUNTS}))
    assert head == ["dataset", "source", "tokens", "in long documents before", "after", "repeated", "left out"]
    assert entry == ["long", "a", "604", "30.0%", "71.0%", "64", "1.2K"]


def test_an_accounting_table_says_which_source_was_repeated():
    _, first, second, everything = lines(accounting_table(UPSAMPLED))
    assert first == ["a", "600", "64", "604", "60"]
    assert second == ["b", "400", "93", "307"]
    assert everything[:3] == ["all", "1,000", "71"]


def test_counts_of_an_older_manifest_are_shown_without_what_they_lack():
    old = {name: COUNTS[name] for name in ("rows", "tokens", "documents", "tokens_in", "tokens_added", "dropped")}
    assert lines(datasets_table({"long": old}))[1][4:6] == ["–", "–"]
    assert lines(accounting_table(old))[1:] == [["all", "1,000", "7", "640", "60", "307"]]


def test_an_accounting_table_adds_up_by_source_and_in_all():
    head, first, second, everything = lines(accounting_table(COUNTS))
    assert head == ["source", "tokens in", "added", "in rows", "last row", "unread"]
    assert first == ["a", "600", "540", "60"]
    assert second == ["b", "400", "93", "307"]
    assert everything == ["all", "1,000", "7", "640", "60", "307"]


@pytest.mark.parametrize("build", [length_table])
def test_sources_without_lengths_are_left_out(build):
    assert len(lines(build({"tangled": {"tokens": 3}}))) == 1
