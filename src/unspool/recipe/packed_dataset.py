"""`unspool.pack` and `PackedDataset`: texts as packed rows on disk, for any trainer."""

import logging
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import ValidationError

from unspool.core.artifacts import read_manifest, remove
from unspool.core.errors import ConfigError, DataError
from unspool.core.formatting import one_line
from unspool.core.lock import lock_output
from unspool.data.corpus.in_memory import build_from_records
from unspool.data.packing.build import KIND, build_rows
from unspool.data.packing.config import DatasetConfig
from unspool.data.packing.formats import row_columns, write_format
from unspool.data.packing.row import Row
from unspool.data.packing.store import open_rows
from unspool.data.sources.base import read_strictly
from unspool.data.sources.files import matching_files
from unspool.data.sources.registry import source_for_file
from unspool.data.strategies.base import StrategyConfig
from unspool.inspection.inspect_data import Inspection, inspect
from unspool.models.location import model_path, resolve_path
from unspool.recipe.document_scorer import SCORES, ModelScorer, check_scorer, score_sources

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

NAME = "data"  # of the source, unless there are several


class PackedDataset:
    """Packed rows of one length, memory-mapped. A row is read from disk when it is indexed.

    `dataset[i]` is a `Row`: its tokens, the lengths of its documents, and where they differ from the default its loss
    mask, position ids and attention. `unspool.Collator` makes batches of rows.

    Args:
        folder: A folder that `pack` wrote, or one of a run's `datasets/`.
        tokenizer: The tokenizer of its tokens, for `show`; by default the one of its run.

    Raises:
        DataError: The folder holds no packed rows.

    Example:
        >>> import unspool
        >>> model, tokenizer = unspool.load("asset:tiny-base")
        >>> dataset = unspool.pack(["A whale.", "A ship at sea."], tokenizer, seq_len=16, packing="best_fit")
        >>> len(dataset), dataset.seq_len, int(dataset[0].doc_lens.sum())
        (1, 16, 16)
    """

    def __init__(self, folder: str | Path, tokenizer: Any = None) -> None:
        self.folder = Path(folder).absolute()
        self.tokenizer = tokenizer
        manifest = read_manifest(self.folder)
        if not manifest or manifest.get("kind") != KIND:
            raise DataError(f"{self.folder}: this folder holds no packed rows; write some with unspool.pack(…).")
        self._manifest = manifest
        self._rows = open_rows(self.folder)

    @property
    def seq_len(self) -> int:
        """Tokens of every row."""
        return self._rows.row_len

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._rows[index + len(self) if index < 0 else index]

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return f"PackedDataset({len(self):,} rows of {self.seq_len:,} tokens in {self.folder})"

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "tokenizer": self.tokenizer}  # workers of a DataLoader map the files again

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["folder"], state["tokenizer"])  # type: ignore[misc]

    def stats(self) -> dict[str, Any]:
        """Counts: rows, tokens, documents, fill and truncation rate, and what was dropped and why.

        Example:
            >>> import unspool
            >>> model, tokenizer = unspool.load("asset:tiny-base")
            >>> dataset = unspool.pack(["A whale.", "A ship at sea."], tokenizer, seq_len=16, packing="best_fit")
            >>> dataset.stats()["documents"], dataset.stats()["dropped"]
            (2, {})
        """
        counts: dict[str, Any] = self._manifest["counts"]
        return counts

    def show(self, index: int, *, tokens: bool = False, full: bool = False) -> Inspection:
        """One row with its documents: print it, or let a notebook show it in color.

        Example:
            >>> import unspool
            >>> model, tokenizer = unspool.load("asset:tiny-base")
            >>> dataset = unspool.pack(["A whale.", "A ship at sea."], tokenizer, seq_len=16, packing="best_fit")
            >>> "A ship at sea." in str(dataset.show(0))
            True
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return inspect(self.folder, index=index % len(self), tokens=tokens, full=full, tokenizer=self.tokenizer)

    def columns(self, index: int) -> dict[str, np.ndarray]:
        """One row as stock trainers name its parts.

        `input_ids`, `labels` (not shifted; -100 where there is no loss), `position_ids`, and `seq_lengths`: the lengths
        of the spans that attend only to themselves.
        """
        return row_columns(self[index])

    def to_hf(self) -> "datasets.Dataset":
        """The same rows as a Hugging Face dataset, with the columns of `columns`, in its cache on disk.

        Raises:
            ConfigError: `datasets` is not installed.
        """
        try:
            import datasets
        except ImportError as error:
            raise ConfigError("to_hf needs the package datasets: pip install datasets.") from error
        # The digest is part of what the cache goes by, so that the cache never returns other rows of the same folder.
        keys = {"folder": self.folder, "sha256": self._manifest["sha256"]}
        return datasets.Dataset.from_generator(_generate_columns, gen_kwargs=keys)

    def save(self, path: str | Path, format: str) -> Path:
        """Write the rows in the format of another library: `arrow`, `parquet`, `mds` or `megatron`.

        Arrow is for `datasets.load_from_disk`, MDS for `streaming.StreamingDataset`, Megatron's `data.bin` and
        `data.idx` for its `IndexedDataset`. A warning lists what a format cannot store.

        Example:
            >>> import tempfile, unspool
            >>> model, tokenizer = unspool.load("asset:tiny-base")
            >>> dataset = unspool.pack(["A whale.", "A ship at sea."], tokenizer, seq_len=16, packing="best_fit")
            >>> sorted(file.name for file in dataset.save(tempfile.mkdtemp() + "/rows", "mds").glob("[a-z]*"))
            ['index.json', 'shard.00000.mds']
        """
        write_format(self.folder, Path(path), format)
        return Path(path)

    def fit_vocabulary(self, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerFast") -> None:
        """Give model and tokenizer the special tokens that UtK put into these rows, in place.

        Example:
            >>> import unspool
            >>> model, tokenizer = unspool.load("asset:tiny-base")
            >>> texts = ["The sea was calm and the ship went on. " * 40] * 8
            >>> dataset = unspool.pack(texts, tokenizer, seq_len=512, strategy=unspool.UtK(min_split=64))
            >>> dataset.fit_vocabulary(model, tokenizer)
            >>> bool(dataset[0].tokens.max() < model.get_input_embeddings().num_embeddings)
            True
        """
        from unspool.models.load import add_special_tokens

        add_special_tokens(model, tokenizer, {self.folder.name: self.folder})


def _generate_columns(folder: Path, sha256: str) -> Iterator[dict[str, np.ndarray]]:
    dataset = PackedDataset(folder)
    return (dataset.columns(index) for index in range(len(dataset)))


def pack(
    data: Any,
    tokenizer: "PreTrainedTokenizerFast",
    *,
    seq_len: int | str,
    packing: str = "concat",
    strategy: StrategyConfig | Sequence[StrategyConfig] = (),
    attention: str | None = None,
    shares: Mapping[str, float] | None = None,
    limit: int | str | None = None,
    max_epochs: int = 1,
    text: str = "text",
    seed: int = 0,
    out: str | Path | None = None,
) -> PackedDataset:
    """Tokenize texts and pack them into rows of one length, without a label or an attention edge across documents.

    Args:
        data: Texts, lists of token ids, conversations (lists of `{"role": …, "content": …}`), or records with one of
            these in a field, such as a Hugging Face dataset; or files, such as `"books/*.jsonl.zst"`. A dict of several
            of these by name needs `shares`.
        tokenizer: The model's fast tokenizer.
        seq_len: Tokens of a row, such as `"64K"`.
        packing: `concat` fills rows and continues documents in the next, `best_fit` keeps documents whole and pads,
            `truncate` fills rows and drops the rest of a document, `single_doc` takes one document per row.
        strategy: `UtK`, `CIP`, `NExtLong`, `PoSE`, `Upsample` or `LongContextGain`, or several. `LongContextGain` needs
            its `model`; scores are not kept, so a second call scores again.
        attention: `intra_document` or `full`; by default what the strategy needs.
        shares: Share of tokens by name, if `data` is a dict.
        limit: Stop after about this many tokens of rows.
        max_epochs: How often a part may be used until it has run out.
        text: Field with the text.
        seed: Seed of the order of documents and of the strategy.
        out: Folder to keep the rows in; by default a temporary one that is deleted with the dataset.

    Returns:
        The rows, memory-mapped.

    Raises:
        ConfigError: The settings do not fit together, or the model of `LongContextGain` cannot score these texts.
        DataError: A record is not text, or there is too little of it.

    Example:
        >>> import unspool
        >>> model, tokenizer = unspool.load("asset:tiny-base")
        >>> texts = ["The sea was calm and the ship went on. " * 40] * 8
        >>> dataset = unspool.pack(texts, tokenizer, seq_len=512, strategy=unspool.UtK(min_split=64, probability=0.8))
        >>> dataset[0].attention, dataset.stats()["strategy"]["name"]
        ('full', 'utk')
    """
    strategies = [strategy] if isinstance(strategy, StrategyConfig) else list(strategy)
    parts = _parts(data, shares, text)
    settings = {
        "from": dict(shares) if shares else NAME,
        "seq_len": seq_len,
        "packing": packing,
        "attention": attention,
        "limit": limit,
        "max_epochs": max_epochs,
        **{one.name: one for one in strategies},
    }
    config = _config(settings)
    folder = Path(tempfile.mkdtemp(prefix="unspool-")) / NAME if out is None else Path(out).absolute()
    try:
        _check_out(folder)
        scorer = _scorer(config, tokenizer)
        with tempfile.TemporaryDirectory(prefix="unspool-") as scratch, lock_output(folder):
            corpora = {name: Path(scratch, "corpus", name) for name in parts}
            for name, records in parts.items():
                build_from_records(records, corpora[name], tokenizer=tokenizer, text=text, name=name)
            embed = embedder(config, tokenizer)
            scores = _scores(config, corpora, Path(scratch, SCORES), scorer)
            counts = build_rows(config, corpora, folder, tokenizer=tokenizer, seed=seed, embed=embed, scores=scores)
    except BaseException:
        if out is None:
            remove(folder.parent)
        raise
    if counts.get("added_tokens"):
        logger.warning("pack: these rows hold new special tokens; call dataset.fit_vocabulary(model, tokenizer).")
    dataset = PackedDataset(folder, tokenizer)
    if out is None:
        weakref.finalize(dataset, remove, folder.parent)
    return dataset


def _config(settings: dict[str, Any]) -> DatasetConfig:
    try:
        return DatasetConfig.model_validate(settings)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, one['loc']))} {one['msg']}".strip() for one in error.errors()]
        raise ConfigError(f"pack: {'; '.join(problems).replace('Value error, ', '')}.") from error


def _scorer(config: DatasetConfig, tokenizer: Any) -> ModelScorer | None:
    """Return the model that scores documents; None if the dataset has no `score`. Its weights are not loaded yet."""
    if config.score is None:
        return None
    if config.score.model is None:
        raise ConfigError("pack: score.model is missing; name the model that scores: LongContextGain(model=…).")
    ref = model_path(config.score.model, Path())
    check_scorer(config.score, ref, tokenizer, place="pack: score")
    return ModelScorer(ref)


def _scores(
    config: DatasetConfig, corpora: Mapping[str, Path], out_dir: Path, scorer: ModelScorer | None
) -> dict[str, Path]:
    """Score the documents of each source that `score` chooses from; return the folders of scores."""
    if scorer is None:
        return {}

    def build(source: str, step: Callable[[Path], Any]) -> Path:
        folder = out_dir / source
        step(folder)
        return folder

    return score_sources(config, corpora, scorer=scorer, build=build)


def _parts(data: Any, shares: Mapping[str, float] | None, text: str) -> dict[str, Iterable[Any]]:
    if not isinstance(data, Mapping):
        if shares:
            raise ConfigError("pack: shares are for several parts; give data as a dict of them by name.")
        return {NAME: _records(data, text)}
    if set(data) != set(shares or {}):
        raise ConfigError(f"pack: data has the parts {', '.join(map(str, data))}; give shares={{…}} with one for each.")
    return {name: _records(part, text) for name, part in data.items()}


def _records(data: Any, text: str) -> Iterable[Any]:
    """The records of files, if `data` names some; other data is returned as it is."""
    if not isinstance(data, str | Path):
        return data  # type: ignore[no-any-return]
    files = list(matching_files(resolve_path(str(data), Path())))
    if not files:
        raise ConfigError(f"pack: {one_line(str(data)[:80])!r} names no files; give files, or a list of texts.")
    sources = [(source_for_file(file, None if text == "text" else text), file) for file in files]
    return chain.from_iterable(read_strictly(source, [file]) for source, file in sources)


def _check_out(folder: Path) -> None:
    """Refuse a folder with other files, because packing replaces the whole folder."""
    ours = (read_manifest(folder) or {}).get("kind") == KIND
    if folder.exists() and not ours and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and holds no packed rows; give a new folder, so that no files are lost.")


def embedder(config: DatasetConfig, tokenizer: Any, resolve: Any = str) -> Any:
    """The model that embeds texts, for strategies that need one."""
    model = next((strategy.embedder for strategy in config.strategies if strategy.embedder), None)
    if model is None:
        return None
    import torch  # import late: every other dataset is packed without torch

    from unspool.models.load import Embedder

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Embedder(resolve(model), tokenizer=tokenizer, device=device)
