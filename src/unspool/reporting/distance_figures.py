"""Token distances within a document in a row, before and after its chunks were moved (Figure 3 of UtK).

Counts are exact for the sampled rows, except that special tokens count as text. `unspool inspect distances` loads the
tokenizer and excludes them.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from unspool.core.charts import Figure, Pair, pair_bars
from unspool.core.formatting import format_share
from unspool.core.sizes import format_size
from unspool.data.distances import count_pairs, doublings, join_rows, stretches_of, stretches_of_documents
from unspool.reporting.run_results import Artifact, Distances

MAX_ROWS = 256  # evenly spaced; more rows barely change the shares
MIN_SHARE = 0.005  # the histogram starts at the first bin with at least this share


def gather_distances(run_dir: Path, artifacts: Sequence[Artifact]) -> dict[str, Distances]:
    """Count distances in each dataset whose chunks were moved, if its rows still exist."""
    # Import late: pyarrow loads slowly, and few runs have such rows.
    from unspool.data.packing.describe import recorded_strategies
    from unspool.data.packing.store import open_rows

    found = {}
    for one in artifacts:
        settings = one.settings.get("dataset")
        strategies = recorded_strategies(settings) if isinstance(settings, dict) else []
        folder = run_dir / one.path
        if not any(strategy.moves_chunks for strategy in strategies) or not any(folder.glob("rows-*.arrow")):
            continue
        rows = open_rows(folder)
        chosen = np.unique(np.linspace(0, len(rows) - 1, min(MAX_ROWS, len(rows))).round().astype(int)).tolist()
        read = [row for row in map(rows.__getitem__, chosen) if row.chunk_ids is not None]
        if read:
            edges = doublings(rows.row_len)
            before, after = (
                count_pairs(join_rows([cut(row) for row in read]), edges).tolist()
                for cut in (stretches_of_documents, stretches_of)
            )
            found[one.path.rpartition("/")[2]] = Distances(
                edges=edges, before=before, after=after, counted=len(read), rows=len(rows), row_len=rows.row_len
            )
    return found


def distance_figures(found: dict[str, Distances]) -> list[Figure]:
    return [_figure(name, one) for name, one in found.items()]


def _figure(name: str, one: Distances) -> Figure:
    sides = [np.array(pairs) / (sum(pairs) or 1) for pairs in (one.before, one.after)]
    drawn = np.flatnonzero(np.maximum(*sides) >= MIN_SHARE)
    first = int(drawn[0]) if len(drawn) else 0
    pairs = [
        Pair(
            label=format_size(edge),
            first=float(before),
            second=float(after),
            tooltip=f"{format_size(edge)} to {format_size(2 * edge)} tokens apart: "
            f"{format_share(float(before))} of pairs before, {format_share(float(after))} after",
        )
        for edge, before, after in list(zip(one.edges, *sides, strict=True))[first:]
    ]
    half = one.row_len // 2
    far = [sum(share for edge, share in zip(one.edges, side, strict=True) if edge >= half) for side in sides]
    note = f"counted in {one.counted:,} of {one.rows:,} rows of {format_size(one.row_len)}; at least half a row apart: "
    note += f"{format_share(float(far[0]))} of pairs before, {format_share(float(far[1]))} after"
    label = f"Pairs of tokens of the same document in rows of {name}, by distance, before and after chunks were moved."
    drawing = pair_bars(pairs, label=label, x_title="distance in tokens (lower edge)")
    return Figure(title=f"distances in {name}", note=note, drawing=drawing)
