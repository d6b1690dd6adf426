"""What a recipe's stages read: tokens and epochs of every source, and how long documents are that attend to themselves.

In: a loaded recipe. Out: `DataPlan`; each number says where it is from.
What the run's folder holds is counted: rows give the documents as attention sees them, corpora their tokens. What is
not built yet is estimated: tokens from the sizes of files, or from a limit; lengths from how rows are packed.
Promise: what sources give in all stages sums to the stages' tokens. Where nothing is known, that is said, not guessed.
Price: a text of four characters is taken for a token, compressed text for a third of its size; documents that are
packed together and not built yet for ASSUMED tokens long.
"""

import glob
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unspool.core.artifacts import read_manifest
from unspool.core.sizes import format_count, format_size
from unspool.data.mixture import Mix, epoch_warnings
from unspool.data.packing.config import DatasetConfig
from unspool.data.packing.row import attended_lens
from unspool.data.packing.store import RowSet, open_rows
from unspool.data.sources.config import RecallSource, Source, SyntheticSource
from unspool.planning.step_time import Documents, documents
from unspool.recipe.load import LoadedRecipe
from unspool.training.config import StageConfig

# Tokens of a document that is packed with others and not counted yet, such as a web page.
ASSUMED = 1024
CHARACTERS = 4.0  # of a token
# Of text in such files, how many characters a byte stands for.
PACKED = {".zst": 3.0, ".gz": 3.0, ".bz2": 3.5, ".xz": 3.5, ".zip": 3.0, ".tgz": 3.0, ".parquet": 2.0, ".whl": 3.0}
# Rows that are looked at, evenly apart, where there are more.
MOST_ROWS = 4096
COUNTED, ESTIMATED, UNKNOWN = "counted", "estimated", "unknown"


@dataclass(frozen=True, kw_only=True)
class Amount:
    """Tokens that a source or rows set has; None where that cannot be known here."""

    tokens: int | None
    how: str  # counted | estimated | unknown
    why: str


@dataclass(frozen=True, kw_only=True)
class RowsUse:
    """One rows set in one stage."""

    name: str
    share: float
    tokens: float
    available: Amount
    epochs: float | None
    document_len: float  # of equal documents that would cost as much attention
    lengths: str  # where that is from


@dataclass(frozen=True, kw_only=True)
class SourceUse:
    """One source over all stages."""

    name: str
    tokens: float  # that are trained on
    available: Amount
    epochs: float | None


@dataclass(frozen=True, kw_only=True)
class DataPlan:
    stages: dict[str, tuple[RowsUse, ...]]
    sources: tuple[SourceUse, ...]
    documents: dict[str, Documents]  # by stage, of a whole step
    warnings: tuple[str, ...]

    def lengths_are_counted(self, stage: str) -> bool:
        return all(use.lengths.startswith(COUNTED) for use in self.stages[stage])


def plan_data(loaded: LoadedRecipe) -> DataPlan:
    recipe = loaded.recipe
    amounts = {name: source_amount(loaded, name, source) for name, source in recipe.sources.items()}
    built = {name: _open(recipe.out / "datasets" / name, config) for name, config in recipe.datasets.items()}
    stages = {stage.name: tuple(_uses(loaded, stage, built, amounts)) for stage in recipe.stages}
    drawn = dict.fromkeys(recipe.sources, 0.0)
    for uses in stages.values():
        for use in uses:
            shares = recipe.datasets[use.name].shares
            for source, share in shares.items():
                drawn[source] += use.tokens * share / sum(shares.values())
    sources = tuple(
        SourceUse(name=name, tokens=tokens, available=amounts[name], epochs=_ratio(tokens, amounts[name].tokens))
        for name, tokens in drawn.items()
        if tokens
    )
    whole = {stage.name: documents_of(stages[stage.name]).of(float(stage.batch_tokens)) for stage in recipe.stages}
    repeated = [warning for uses in stages.values() for warning in epoch_warnings(_known(uses))]
    return DataPlan(stages=stages, sources=sources, documents=whole, warnings=tuple(dict.fromkeys(repeated)))


def documents_of(uses: tuple[RowsUse, ...]) -> Documents:
    """One token's worth of a stage's mix."""
    total = sum(use.share for use in uses)
    return Documents(tokens=1.0, squares=sum(use.share / total * use.document_len for use in uses))


def _known(uses: tuple[RowsUse, ...]) -> dict[str, float]:
    return {use.name: use.epochs for use in uses if use.epochs is not None}


def _uses(
    loaded: LoadedRecipe, stage: StageConfig, built: dict[str, RowSet | None], amounts: dict[str, Amount]
) -> Iterator[RowsUse]:
    """The rows sets of a stage's mix, in its order."""
    tokens = stage.steps * stage.batch_tokens
    total = sum(stage.mix.values())
    exact = _exact_epochs(loaded, stage, built)
    for name, weight in stage.mix.items():
        config, rows = loaded.recipe.datasets[name], built[name]
        share = weight / total
        available = _rows_amount(config, rows, amounts)
        length, origin = _document_len(config, rows, stage, loaded)
        yield RowsUse(
            name=name,
            share=share,
            tokens=share * tokens,
            available=available,
            epochs=exact.get(name) if exact else _ratio(share * tokens, available.tokens),
            document_len=length,
            lengths=origin,
        )


def _exact_epochs(loaded: LoadedRecipe, stage: StageConfig, built: dict[str, RowSet | None]) -> dict[str, float]:
    """As the stage itself will say them, where all its rows are built."""
    rows = {name: built[name] for name in stage.mix}
    found = {name: row_set for name, row_set in rows.items() if row_set is not None}
    if len(found) < len(rows):
        return {}
    sizes = {name: len(row_set) for name, row_set in found.items()}
    lens = {name: row_set.row_len for name, row_set in found.items()}
    mix = Mix(stage.mix, sizes, lens, stage.context_length, loaded.recipe.seed)
    return mix.epochs(stage.steps * stage.batch_tokens // stage.context_length)


def _open(folder: Path, config: DatasetConfig) -> RowSet | None:
    """Rows that are built, of the length that the recipe asks for now."""
    if read_manifest(folder) is None or not any(folder.glob("rows-*.arrow")):
        return None
    rows = open_rows(folder)
    return rows if rows.row_len == config.seq_len else None


def _rows_amount(config: DatasetConfig, rows: RowSet | None, amounts: dict[str, Amount]) -> Amount:
    if rows is not None:
        return Amount(tokens=len(rows) * rows.row_len, how=COUNTED, why=f"{format_count(len(rows))} rows are built")
    shares = config.shares
    total = sum(shares.values())
    # The source that runs out first ends the set.
    least = [
        (amounts[name].tokens or 0) * total / share
        for name, share in shares.items()
        if amounts[name].tokens is not None
    ]
    if len(least) < len(shares):
        missing = next(name for name in shares if amounts[name].tokens is None)
        return Amount(
            tokens=config.limit, how=ESTIMATED if config.limit else UNKNOWN, why=f"source {missing} is unknown"
        )
    tokens = int(min([*least, config.limit or float("inf")]))
    return Amount(tokens=tokens, how=ESTIMATED, why="from its sources")


def _document_len(
    config: DatasetConfig, rows: RowSet | None, stage: StageConfig, loaded: LoadedRecipe
) -> tuple[float, str]:
    """Σ length² ÷ Σ length of what attends to itself, and where that is from."""
    if rows is not None:
        every = max(1, len(rows) // MOST_ROWS)
        picked = [rows[index] for index in range(0, len(rows), every)]
        full = stage.attention == "full"
        lens = [attended_lens(row.doc_lens, "full" if full else row.attention) for row in picked]
        return documents(np.concatenate(lens)).mean, f"{COUNTED} in {len(picked)} rows"
    if stage.attention == "full" or config.attention == "full" or config.chunk_strategy:
        return float(config.seq_len), "rows see all of themselves"
    if config.packing == "single_doc":
        return float(config.seq_len), "one document fills a row"
    found = [_source_len(loaded, name, config.seq_len) for name in config.shares]
    shares = list(config.shares.values())
    mean = sum(share * length for share, (length, _) in zip(shares, found, strict=True)) / sum(shares)
    origins = dict.fromkeys(origin for _, origin in found)
    return mean, "; ".join(origins)


def _source_len(loaded: LoadedRecipe, name: str, row_len: int) -> tuple[float, str]:
    source = loaded.recipe.sources[name]
    counts = (read_manifest(loaded.recipe.out / "corpus" / name) or {}).get("counts", {})
    lengths = counts.get("lengths")
    if lengths and sum(lengths["tokens"]):
        squares = sum(
            tokens * min(tokens / max(1, number), row_len)
            for tokens, number in zip(lengths["tokens"], lengths["documents"], strict=True)
        )
        return squares / sum(lengths["tokens"]), f"{COUNTED} in the corpus"
    if isinstance(source, RecallSource | SyntheticSource):
        return float(min(sum(source.length) / 2, row_len)), "as they are generated"
    return float(min(ASSUMED, row_len)), f"assumed: documents of {format_size(ASSUMED)}"


def source_amount(loaded: LoadedRecipe, name: str, source: Source) -> Amount:
    counts: dict[str, Any] = (read_manifest(loaded.recipe.out / "corpus" / name) or {}).get("counts", {})
    if counts.get("tokens"):
        return Amount(tokens=int(counts["tokens"]), how=COUNTED, why="the corpus is built")
    if isinstance(source, RecallSource | SyntheticSource):
        return Amount(tokens=source.tokens, how=ESTIMATED, why="as many as are generated")
    files = list(_files(loaded.path(source.path)))
    if not files:
        why = f"{source.path} is not here"
        return Amount(
            tokens=source.limit,
            how=ESTIMATED if source.limit else UNKNOWN,
            why=f"its limit; {why}" if source.limit else why,
        )
    size = sum(path.stat().st_size for path in files)
    per_token = 4.0 if source.kind == "mds" else CHARACTERS
    characters = sum(path.stat().st_size * _packed(path, source.kind) for path in files)
    tokens = int(characters / per_token)
    what = f"{len(files)} file{'s' * (len(files) > 1)} of {format_count(size)}B"
    if source.limit and source.limit < tokens:
        return Amount(tokens=source.limit, how=ESTIMATED, why=f"its limit, of {what}")
    return Amount(tokens=tokens, how=ESTIMATED, why=f"from {what}")


def _packed(path: Path, kind: str) -> float:
    return 1.0 if kind == "mds" else PACKED.get(path.suffix, 1.0)


def _files(path: str) -> Iterator[Path]:
    """All files of a file, a folder or a pattern."""
    # Path.glob takes no absolute patterns.
    found = glob.iglob(path, recursive=True) if glob.has_magic(path) else iter([path])  # noqa: PTH207
    for one in map(Path, found):
        if one.is_file():
            yield one
        elif one.is_dir():
            yield from (inner for inner in sorted(one.rglob("*")) if inner.is_file())


def _ratio(used: float, available: int | None) -> float | None:
    return used / available if available else None
