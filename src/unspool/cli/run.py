"""`unspool run`, and its steps one by one: `tokenize`, `pack`, `train`."""

import logging
import sys
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Annotated, Any

import typer
from rich.table import Table

from unspool.cli.recipes import Override
from unspool.core.console import PlainConsole, print_json
from unspool.core.sizes import format_count, format_size
from unspool.data.lengths import LONG, TABLE_EDGES, by_edges, from_length

logger = logging.getLogger(__name__)

RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a bundled recipe.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def run(recipe: RecipeArgument, overrides: Override = None, as_json: AsJson = False) -> None:
    """Run a recipe end to end: tokenize, pack, train, evaluate, report.

    You can kill the command at any time and run it again. It skips finished steps, resumes an unfinished stage from its
    last checkpoint, and redoes steps whose recipe settings or inputs changed.

        unspool run tiny

        unspool run my.yaml --set stages.0.lr=2e-5 --set out=runs/other-lr
    """
    from unspool.recipe import run_recipe

    result = run_recipe.run(recipe, overrides, from_process_start=True)
    if not result.is_leader:
        return
    if as_json:
        print_json({"headline": list(result.headline), "report": str(result.report)})
        return
    typer.echo("")
    for line in result.headline:
        typer.echo(line)
    typer.echo(f"\nreport: {result.report.absolute() if result.report else ''}")


def tokenize(recipe: RecipeArgument, overrides: Override = None, as_json: AsJson = False) -> None:
    """Read and tokenize all sources of a recipe.

    Prints document lengths and what happened to every record. Records that
    cannot be read are listed in quarantine.jsonl in the folder of the source.

        unspool tokenize my.yaml

        unspool tokenize my.yaml --set sources.web.max_bad=0.01 --json
    """
    from unspool.recipe import run_recipe

    counts = run_recipe.run(recipe, overrides, until="tokenize").corpora
    if as_json:
        print_json(counts)
        return
    print_tables(records_table(counts), length_table(counts))


def pack(
    recipe: RecipeArgument,
    format: Annotated[
        str | None,
        typer.Option(
            help="Also write every dataset to RUN/formats/FORMAT for other trainers: arrow, parquet, mds or megatron."
        ),
    ] = None,
    overrides: Override = None,
    as_json: AsJson = False,
) -> None:
    """Tokenize all sources and pack them into the datasets of a recipe.

    Prints the size and fill rate of every dataset, and how many tokens of
    each source were packed or dropped, with the reason.

        unspool pack my.yaml

        unspool pack my.yaml --format mds
    """
    from unspool.recipe import run_recipe

    counts = run_recipe.run(recipe, overrides, until="pack", format=format).datasets
    if as_json:
        print_json(counts)
        return
    upsampled = [upsample_table(counts)] if any("upsample" in entry for entry in counts.values()) else []
    mixed = [shares_table(counts)] if any("shares" in entry for entry in counts.values()) else []
    accounts = (accounting_table(entry, title=name) for name, entry in counts.items())
    print_tables(datasets_table(counts), *mixed, *upsampled, *accounts)


def train(
    recipe: RecipeArgument,
    stage: Annotated[str | None, typer.Option(help="Train only this stage. Default: all stages, in order.")] = None,
    overrides: Override = None,
) -> None:
    """Tokenize, pack and train the stages of a recipe, without evaluation and report.

    The command also runs under torchrun; `unspool launch` starts it on
    several GPUs.

        unspool train my.yaml

        unspool train my.yaml --stage 64k
    """
    from unspool.recipe import run_recipe

    result = run_recipe.run(recipe, overrides, until="train", stage=stage, from_process_start=True)
    if result.is_leader:
        for model in result.models.values():
            typer.echo(str(model.absolute()))


def print_tables(*tables: Table, highlight: bool = True) -> None:

    # Without a terminal, wide enough that no column is cut.
    console = PlainConsole(width=None if sys.stdout.isatty() else 200, highlight=highlight)
    for table in tables:
        console.print(table, end="\n\n")


# Tables of corpora and datasets, from the counts of their manifests.

MISSING = "–"
# Columns of words are aligned left, numbers right.
_WORDS = ("", "strategy", "source", "dropped", "quarantined", "filtered", "parts left out", "by")


def records_table(counts: Mapping[str, Mapping[str, Any]], *, title: str | None = None) -> Table:
    """One line per corpus: its records, and why some are missing."""
    trained = ["trained"] if _any_trained(counts) else []
    columns = ["records", "documents", "tokens", *trained, "quarantined", "filtered", "parts left out", "by"]
    table = _table(title, "source", *columns)
    for name, entry in counts.items():
        reasons = [_reasons(entry.get(kind, {})) for kind in ("quarantined", "filtered", "left_out")]
        records = f"{entry['records']:,}" if "records" in entry else MISSING
        numbers = [records, f"{entry['documents']:,}", format_count(entry["tokens"])]
        numbers += [_trained(entry) for _ in trained]
        table.add_row(name, *numbers, *reasons, entry.get("tokenized_with", MISSING))
    return table


def length_table(sources: Mapping[str, Mapping[str, Any]], *, title: str | None = None) -> Table:
    """Documents by length and source, and the tokens of long ones (ProLong's Table 3)."""
    table = _table(title, "source", "documents", "tokens", *_bin_names(), f"tokens in ≥{format_size(LONG)}")
    for name, entry in _with_lengths(sources):
        lengths = entry["lengths"]
        table.add_row(
            name,
            f"{sum(lengths['documents']):,}",
            format_count(sum(lengths["tokens"])),
            *(f"{count:,}" if count else "" for count in by_edges(lengths)["documents"]),
            format_count(from_length(lengths, LONG)[1]),
        )
    return table


def datasets_table(counts: Mapping[str, Mapping[str, Any]], *, title: str | None = None) -> Table:
    """One line per dataset: size, fill rate, truncation, and the cost of strategies."""
    trained = ["trained"] if _any_trained(counts) else []
    columns = ["rows", "tokens", *trained, "documents", "fill", "truncated", "strategy", "added", "dropped"]
    table = _table(title, "dataset", *columns)
    for name, entry in counts.items():
        table.add_row(
            name,
            f"{entry['rows']:,}",
            format_count(entry["tokens"]),
            *(_trained(entry) for _ in trained),
            f"{entry['documents']:,}",
            _percent(entry.get("fill_rate")),
            _percent(entry.get("truncation_rate")),
            _strategies(entry),
            _share(entry["tokens_added"], entry["tokens"]),
            _reasons(entry["dropped"]),
        )
    return table


def shares_table(counts: Mapping[str, Mapping[str, Any]], *, title: str | None = None) -> Table:
    """Requested and realized shares of trained tokens, by dataset and source."""
    table = _table(title, "dataset", "source", "trained tokens", "requested share", "realized")
    for name, entry in counts.items():
        for source, share in entry.get("shares", {}).items():
            tokens = format_count(share["trained_tokens"])
            table.add_row(name, source, tokens, f"{share['requested']:.2%}", f"{share['realized']:.2%}")
    return table


def upsample_table(counts: Mapping[str, Mapping[str, Any]], *, title: str | None = None) -> Table:
    """Share of tokens in long documents before and after upsampling, by dataset and source."""
    table = _table(title, "dataset", "source", "tokens", "in long documents before", "after", "repeated", "left out")
    for name, entry in counts.items():
        parts = {source: part for source, part in entry.get("sources", {}).items() if "upsample" in part}
        for source, part in parts.items():
            found = part["upsample"]
            table.add_row(
                name,
                source,
                format_count(part["tokens"]),
                _percent(found["long_share_before"]),
                _percent(found["long_share_after"]),
                format_count(found["tokens_added"]),
                format_count(found["tokens_dropped"]),
            )
    return table


def accounting_table(counts: Mapping[str, Any], *, title: str | None = None) -> Table:
    """Where the tokens of one dataset went, by source and exact: in + added = in rows + dropped."""
    sources: Mapping[str, Mapping[str, Any]] = counts.get("sources", {})
    reasons = sorted(counts["dropped"])
    table = _table(title, "source", "tokens in", "added", "in rows", *(reason.replace("_", " ") for reason in reasons))
    for name, entry in sources.items():
        amounts = _exact(entry["tokens_in"], entry.get("tokens_added", 0), entry["tokens"])
        table.add_row(name, *amounts, *_by_reason(entry, reasons))
    if sources:
        table.add_section()
    everything = _exact(counts["tokens_in"], counts["tokens_added"], counts["tokens"])
    table.add_row("all", *everything, *_by_reason(counts, reasons))
    return table


def _table(title: str | None, first: str, *others: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="left" if name in _WORDS else "right")
    return table


def _with_lengths(sources: Mapping[str, Mapping[str, Any]]) -> Iterable[tuple[str, Mapping[str, Any]]]:
    return [(name, entry) for name, entry in sources.items() if "lengths" in entry]


def _bin_names() -> list[str]:
    first, *_, last = TABLE_EDGES
    between = [_range(low, high) for low, high in pairwise(TABLE_EDGES)]
    return [f"<{format_size(first)}", *between, f"≥{format_size(last)}"]


def _range(low: int, high: int) -> str:
    return f"{format_size(low)}–{format_size(high)}"


def _percent(share: float | None) -> str:
    return MISSING if share is None else f"{share:.1%}"


def _share(part: int, whole: int) -> str:
    return _percent(part / whole) if part and whole else ""


def _any_trained(counts: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether some are conversations, of which only a part is trained on."""
    return any("trained_tokens" in entry for entry in counts.values())


def _trained(entry: Mapping[str, Any]) -> str:
    return _percent(entry["trained_tokens"] / entry["tokens"]) if entry.get("trained_tokens") else MISSING


def _strategies(entry: Mapping[str, Any]) -> str:
    name = entry.get("strategy", {}).get("name")
    is_scored = any("score" in part for part in entry.get("sources", {}).values())
    used = {"upsample": "upsample" in entry, "score": is_scored}
    return ", ".join([*([name] if name else []), *(key for key, found in used.items() if found)])


def _reasons(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{reason.replace('_', ' ')} {format_count(count)}" for reason, count in counts.items())


def _exact(*counts: int) -> list[str]:
    return [f"{count:,}" if count else "" for count in counts]


def _by_reason(entry: Mapping[str, Any], reasons: list[str]) -> list[str]:
    return _exact(*(entry["dropped"].get(reason, 0) for reason in reasons))
