"""Stream a Hub dataset as far as needed, instead of downloading it first.

A file on the Hub is the path hf:/datasets/ORG/NAME@COMMIT/FILE, which is valid on every machine. Parquet is read by row
groups and columns, through range requests. Files in other formats are downloaded completely to the usual cache when
they are needed. Files that are already in that cache are read from there.
"""

import io
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from unspool.core.errors import DataError
from unspool.data.sources.files import first_line

if TYPE_CHECKING:
    import pyarrow.parquet as pq

_SCHEME = ("hf:", "datasets")
# Uncompressed bytes per task: a killed task fetches as much again, and each worker may fetch as much beyond a limit.
TASK_BYTES = 64 << 20
# No tokenizer needs more bytes for a token of text; determines how much of a dataset a limit can need.
MOST_BYTES_PER_TOKEN = 32
_PATHS_PER_REQUEST = 500


class HubRows(NamedTuple):
    """A task: row groups `first` to `last` - 1 of a Parquet file on the Hub."""

    path: Path
    first: int
    last: int


def hub_path(dataset: str, commit: str, name: str) -> Path:
    return Path(*_SCHEME, f"{dataset}@{commit}", name)


def split_hub_path(path: Path) -> tuple[str, str, str] | None:
    """Split the path of a Hub file into dataset, commit and name; None for a local file."""
    if path.parts[:2] != _SCHEME:
        return None
    organization, at, rest = "/".join(path.parts[2:]).partition("@")
    assert at
    commit, _, name = rest.partition("/")
    return organization, commit, name


def divide_remote(units: Sequence[Path], limit: int | None) -> list[HubRows | list[Path]]:
    """Divide files on the Hub into tasks: groups of row groups for Parquet, one file for other formats.

    Only as many files are opened as `limit` tokens can need.
    """
    tasks: list[HubRows | list[Path]] = []
    total = 0
    for path in units:
        if path.suffix != ".parquet":
            tasks.append([path])
            continue
        metadata = open_remote(path).metadata
        first, size = 0, 0
        for group in range(metadata.num_row_groups):
            size += metadata.row_group(group).total_byte_size
            if size >= TASK_BYTES or group == metadata.num_row_groups - 1:
                tasks.append(HubRows(path, first, group + 1))
                total += size
                first, size = group + 1, 0
        if limit is not None and total >= limit * MOST_BYTES_PER_TOKEN:
            break
    return tasks


def content_marks(units: Sequence[Path]) -> list[list[str]]:
    """Return [name, content hash] of files on the Hub, so that a commit that changes only README.md has no effect."""
    import huggingface_hub as hub

    found = [split for unit in units if (split := split_hub_path(unit)) is not None]
    marks: list[list[str]] = []
    for start in range(0, len(found), _PATHS_PER_REQUEST):
        dataset, commit, _ = found[start]
        names = [name for _, _, name in found[start : start + _PATHS_PER_REQUEST]]
        with _fetching(f"dataset {dataset!r} on the Hub"):
            infos = hub.HfApi().get_paths_info(dataset, names, repo_type="dataset", revision=commit)
        marks += sorted([info.path, str(getattr(info, "blob_id", ""))] for info in infos)
    return marks


def download_file(path: Path) -> Path:
    """Return the local copy of a Hub file, downloaded if necessary; a local path is returned unchanged."""
    split = split_hub_path(path)
    if split is None:
        return path
    import huggingface_hub as hub

    dataset, commit, name = split
    with _fetching(str(path)):
        return Path(hub.hf_hub_download(dataset, name, repo_type="dataset", revision=commit))


def open_remote(path: Path) -> "pq.ParquetFile":
    """Open a Parquet file on the Hub, or its copy in the cache."""
    import huggingface_hub as hub
    import pyarrow.parquet as pq

    split = split_hub_path(path)
    assert split is not None
    dataset, commit, name = split
    cached = hub.try_to_load_from_cache(dataset, name, revision=commit, repo_type="dataset")
    if isinstance(cached, str):
        return pq.ParquetFile(cached, page_checksum_verification=True)
    file = _RemoteFile(path, f"datasets/{dataset}@{commit}/{name}")
    return pq.ParquetFile(file, metadata=_footer(path, file), pre_buffer=True, page_checksum_verification=True)


_footers: dict[Path, Any] = {}


def _footer(path: Path, file: "_RemoteFile") -> Any:
    """Return the metadata of a file, cached for the next task of this process: large files have megabytes of it."""
    import pyarrow.parquet as pq

    if path not in _footers:
        while len(_footers) >= 8:
            del _footers[next(iter(_footers))]
        _footers[path] = pq.read_metadata(file)
    return _footers[path]


@lru_cache(maxsize=1)
def _file_system(kind: Any) -> Any:
    return kind()


class _RemoteFile(io.RawIOBase):
    """Read exactly the requested bytes; a failed request is a DataError and never treated as damaged content."""

    def __init__(self, path: Path, name: str) -> None:
        super().__init__()
        import huggingface_hub as hub

        self._path = path
        with _fetching(str(path)):
            self._file = _file_system(hub.HfFileSystem).open(name, "rb", cache_type="none")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def read(self, size: int | None = -1) -> bytes:
        with _fetching(str(self._path)):
            return bytes(self._file.read(-1 if size is None else size))


class _fetching:  # noqa: N801
    """Turn errors of requests into DataErrors; huggingface_hub raises those of three HTTP libraries."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, DataError):
            raise DataError(
                f"{self._what} cannot be downloaded ({first_line(error)}); run the same command again to continue "
                "where it stopped."
            ) from error
