"""`unspool.inspect_distances`: how far apart tokens of one document are in packed rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from unspool.core.errors import ConfigError
from unspool.core.result import Result
from unspool.data.distances import doublings
from unspool.inspection.detokenize import FoundTokenizer
from unspool.inspection.distance_view import (
    Distances,
    count_distances,
    distance_values,
    print_distances,
    read_text,
    render_distances,
    unique_names,
)
from unspool.inspection.inspect_attention import read_size
from unspool.inspection.inspect_data import find_rows, load_tokenizer_of
from unspool.inspection.packed_rows import Rows, has_special_tokens


@dataclass(frozen=True, kw_only=True)
class DistanceView(Result):
    """Pairs of tokens by distance, for each dataset, as `inspect_distances` returns it. Notebooks show the page.

    Example:
        >>> import unspool
        >>> model, tokenizer = unspool.load("asset:tiny-base")
        >>> dataset = unspool.pack(["A whale at sea. " * 20], tokenizer, seq_len=64)
        >>> view = unspool.inspect_distances(dataset.folder)
        >>> view.to_dict()[0]["row_len"]
        64
    """

    datasets: Sequence[Distances]
    beyond: Sequence[int] = ()

    def print(self, console: Console) -> None:
        print_distances(console, self.datasets, self.beyond)

    def to_dict(self) -> list[dict[str, Any]]:
        return [distance_values(each, self.beyond) for each in self.datasets]

    def renderers(self) -> Mapping[str, Callable[[], str]]:
        return {"html": lambda: render_distances(self.datasets, self.beyond)}


def inspect_distances(
    paths: str | Path | Sequence[str | Path] = ".",
    name: Sequence[str] = (),
    *,
    bins: Sequence[int | str] = (),
    beyond: Sequence[int | str] = (),
    count: int | None = None,
    tokenizer: Any = None,
) -> DistanceView:
    """Count pairs of tokens of one document by their distance in a packed row.

    Counts pairs that can attend to each other. Special tokens and padding do not count.

    Args:
        paths: Runs, or folders of packed datasets; several are compared.
        name: Names of datasets of these runs; all by default.
        bins: First distance of each bin, such as `[1, "1K", "4K"]`; doublings by default.
        beyond: Also count pairs at least this far apart, such as `["16K"]`.
        count: Rows of each dataset, evenly spaced; by default all, up to 128M tokens.
        tokenizer: A tokenizer, its folder or Hub id; by default the run's. Only rows of UTK need one.

    Returns:
        The view: print it, `save` it as a page, or take `to_dict()`.

    Raises:
        ConfigError: There are no datasets in `paths`, or the bins do not increase.

    Example:
        >>> import unspool
        >>> model, tokenizer = unspool.load("asset:tiny-base")
        >>> dataset = unspool.pack(["A whale at sea. " * 20], tokenizer, seq_len=64)
        >>> view = unspool.inspect_distances(dataset.folder, bins=[1, 32], beyond=[48])
        >>> len(view.to_dict()[0]["bins"])
        2
    """
    edges = [read_size("bins", value) for value in bins]
    thresholds = [read_size("beyond", value) for value in beyond]
    if edges != sorted(set(edges)):
        raise ConfigError(f"`bins={list(bins)!r}`: edges must increase, such as 1,1K,4K,16K.")
    given = [paths] if isinstance(paths, str | Path) else paths
    places = find_rows([Path(path) for path in given], name)
    names = unique_names([place.path for place in places])
    texts = []
    for place, label in zip(places, names, strict=True):
        # A tokenizer takes seconds to load, and only UTK's special tokens need one.
        found = load_tokenizer_of(place, tokenizer) if has_special_tokens(place) else FoundTokenizer()
        texts.append(read_text(Rows(place, found), label, most_rows=count))
    # Distances below the first edge get a bin of their own.
    edges = edges if edges[:1] == [1] else [1, *edges] if edges else doublings(max(text.reach for text in texts))
    return DistanceView(datasets=[count_distances(text, edges, thresholds) for text in texts], beyond=thresholds)
