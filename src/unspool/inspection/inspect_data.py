"""`unspool.inspect`: documents and packed rows as text, as a page or as plain values."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from unspool.core.config import nearest
from unspool.core.errors import ConfigError
from unspool.core.result import Result
from unspool.inspection.detokenize import FoundTokenizer, find_tokenizer
from unspool.inspection.input_documents import Collection, Corpus, Records
from unspool.inspection.items import Show, item_values, listing_values, summary_values
from unspool.inspection.packed_rows import Rows
from unspool.inspection.run_paths import DataPath, Entry, find_data, list_run, published_folders, sources_of
from unspool.inspection.scored_documents import ScoredDocuments
from unspool.inspection.terminal import SHORT, print_item, print_listing, print_summary
from unspool.inspection.viewer_page import render_page
from unspool.models.location import model_path

# How many rows or documents are chosen: in the terminal, on a page, and in the terminal of each of several datasets.
IN_TERMINAL, ON_PAGE, OF_EACH = 3, 12, 1


@dataclass(frozen=True, kw_only=True, repr=False)
class Inspection(Result):
    """Documents or packed rows, as `inspect` returns them. Its `str` is the terminal's view; notebooks show the page.

    Example:
        >>> import unspool
        >>> model, tokenizer = unspool.load("asset:tiny-base")
        >>> dataset = unspool.pack(["A whale.", "A ship at sea."], tokenizer, seq_len=16, packing="best_fit")
        >>> view = unspool.inspect(dataset.folder, index=0, tokenizer=tokenizer)
        >>> len(view.to_dict()[0]["items"])
        1
    """

    chosen: Sequence[tuple[Collection, list[int]]] = ()  # each with the indices of the items to show
    path: Path | None = None  # of a run, whose folders are listed
    listing: Sequence[Entry] = ()
    tokens: bool = False
    full: bool = False

    def print(self, console: Console) -> None:
        if self.path is not None:
            print_listing(console, str(self.path), self.listing)
        show = Show(tokens=self.tokens) if self.full else replace(SHORT, tokens=self.tokens)
        for number, (collection, indices) in enumerate(self.chosen):
            if number:
                console.print("\n")
            print_summary(console, collection.summary())
            for index in indices:
                print_item(console, collection.item(index, show), full=self.full)

    def renderers(self) -> Mapping[str, Callable[[], str]]:
        return {"html": self._page}

    def _page(self) -> str:
        if self.path is not None:
            raise ConfigError(
                f"a page needs one folder; give one of those in {self.path}, such as {self.listing[-1].name}."
            )
        return render_page(self.chosen, tokens=self.tokens, full=self.full)

    def to_dict(self) -> list[dict[str, Any]]:
        """Everything as plain values, with full texts."""
        if self.path is not None:
            return listing_values(self.listing)
        show = Show(tokens=self.tokens)
        return [
            summary_values(collection.summary())
            | {"items": [item_values(collection.item(index, show)) for index in indices]}
            for collection, indices in self.chosen
        ]

    def __repr__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str | None:
        return None if self.path else super()._repr_html_()


def inspect(
    path: str | Path,
    *,
    index: int | Sequence[int] = (),
    count: int | None = None,
    seed: int = 0,
    source: str | None = None,
    tokens: bool = False,
    full: bool = False,
    tokenizer: Any = None,
    text: str | None = None,
) -> Inspection:
    """Look at documents and packed rows: where documents begin, end and are cut, and which tokens carry no loss.

    Args:
        path: A run, a folder of its `corpus/`, `document_scores/` or `datasets/`, a folder of `pack`, or an input file.
        index: Which rows or documents to show, from 0; by default the first and random others.
        count: How many to show, 3 by default.
        seed: Random seed of that choice.
        source: Show only rows that contain this source.
        tokens: Show token borders and ids instead of text.
        full: Show long documents in full.
        tokenizer: A tokenizer, its folder or Hub id; by default the run's.
        text: Field with the text of a JSONL or Parquet file.

    Returns:
        The view: `print` it, `save` it as a page, take `to_dict()`, or let a notebook show it.

    Raises:
        ConfigError: There is nothing at `path` that can be inspected.

    Example:
        >>> import unspool
        >>> model, tokenizer = unspool.load("asset:tiny-base")
        >>> dataset = unspool.pack(["A whale.", "A ship at sea."], tokenizer, seq_len=16, packing="best_fit")
        >>> view = unspool.inspect(dataset.folder, index=0, tokenizer=tokenizer)
        >>> "A whale." in str(view)
        True
    """
    place = find_data(Path(path))
    if place.kind == "run":
        listing = list_run(place.path, source)
        if not listing:
            there = ", ".join(sources_of(place.path))
            raise ConfigError(f"`source={source!r}`: nothing in {place.path} contains it; sources are {there}.")
        return Inspection(path=place.path, listing=listing)
    collection = _open(place, tokenizer=tokenizer, field=text, seed=seed)
    indices = [index] if isinstance(index, int) else list(index)
    chosen = collection.pick(indices=indices, count=count or IN_TERMINAL, seed=seed, source=source)
    return Inspection(chosen=[(collection, chosen)], tokens=tokens, full=full)


def inspect_rows(
    paths: str | Path | Sequence[str | Path] = ".",
    name: Sequence[str] = (),
    *,
    index: int | Sequence[int] = (),
    count: int | None = None,
    on_page: bool = False,
    seed: int = 0,
    source: str | None = None,
    tokens: bool = False,
    full: bool = False,
    tokenizer: Any = None,
) -> Inspection:
    """Look at packed rows of one or several datasets: pieces by document, labels of UTK, tokens without loss.

    Args:
        paths: Runs, or folders of packed datasets.
        name: Names of datasets of these runs; all by default.
        index: Which rows to show, from 0; by default the first and random others.
        count: How many rows of each dataset to show; by default 3 of one, 1 of each of several.
        on_page: Choose more rows, for a page.
        seed: Random seed of that choice.
        source: Show only rows that contain this source.
        tokens: Show token borders and ids instead of text.
        full: Show long documents in full.
        tokenizer: A tokenizer, its folder or Hub id; by default the run's.

    Returns:
        The view: print it, `save` it as a page, or take `to_dict()`.

    Raises:
        ConfigError: There are no datasets in `paths`.

    Example:
        >>> import unspool
        >>> model, tokenizer = unspool.load("asset:tiny-base")
        >>> dataset = unspool.pack(["A whale.", "A ship at sea."], tokenizer, seq_len=16, packing="best_fit")
        >>> view = unspool.inspect_rows(dataset.folder, tokenizer=tokenizer)
        >>> "A whale." in view.table()
        True
    """
    given = [paths] if isinstance(paths, str | Path) else paths
    places = find_rows([Path(path) for path in given], name)
    several = max(2, ON_PAGE // len(places)) if on_page else OF_EACH
    wanted = count or ((ON_PAGE if on_page else IN_TERMINAL) if len(places) == 1 else several)
    indices = [index] if isinstance(index, int) else list(index)
    chosen: list[tuple[Collection, list[int]]] = []
    for place in places:
        rows = Rows(place, load_tokenizer_of(place, tokenizer))
        chosen.append((rows, rows.pick(indices=indices, count=wanted, seed=seed, source=source)))
    return Inspection(chosen=chosen, tokens=tokens, full=full)


def find_rows(paths: Sequence[Path], names: Sequence[str]) -> list[DataPath]:
    """The datasets in these paths, in order or in that of `names`; ConfigError if there are none."""
    found = []
    for path in paths:
        place = find_data(path)
        if place.kind == "run":
            found += [
                find_data(published.folder) for published in published_folders(path) if published.kind == "dataset"
            ]
        elif place.kind == "dataset":
            found.append(place)
        else:
            raise ConfigError(f"{path} contains no dataset; give a run or a folder of its datasets/.")
    there = [place.path.name for place in found]
    for name in names:
        if name not in there:
            guess = nearest(name, there)
            hint = f"did you mean {guess!r}?" if guess else f"there are {', '.join(there) or 'none'}."
            raise ConfigError(f"`name={name!r}`: no such dataset; {hint}")
    if names:
        found = [place for name in names for place in found if place.path.name == name]
    if not found:
        raise ConfigError(
            f"{', '.join(map(str, paths))}: no datasets have been built here yet; run `unspool pack` first."
        )
    return found


def load_tokenizer_of(place: DataPath, tokenizer: Any) -> FoundTokenizer:
    """`tokenizer`, which may be a folder or Hub id, or the one of the run."""
    # Given paths are relative to the current folder, those in a recipe also to the run's.
    root = Path() if tokenizer or place.run_dir is None else place.run_dir
    return find_tokenizer(place, tokenizer, lambda name: model_path(name, root))


def _open(place: DataPath, *, tokenizer: Any, field: str | None, seed: int) -> Collection:
    if place.kind == "records":
        found = load_tokenizer_of(place, tokenizer) if tokenizer else FoundTokenizer()
        return Records(place, found, field=field, seed=seed)
    if field is not None:
        raise ConfigError("`text` is for JSONL and Parquet files; data in a run's folder is already tokenized.")
    if place.kind == "document_scores":
        return ScoredDocuments(place, load_tokenizer_of(place, tokenizer))
    return (Rows if place.kind == "dataset" else Corpus)(place, load_tokenizer_of(place, tokenizer))
