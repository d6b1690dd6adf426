"""Hugging Face datasets, read without the library `datasets`: a Hub id or a folder.

In: the files of one split: Parquet, JSON lines, or Arrow as `save_to_disk` writes it. Out: one item per record.
Promise: configuration and split are found by the Hub's own rules: the `configs` of the dataset card; else names
like data/train-00000-of-00002.parquet; else folders, else files, named after a split; else everything is `train`.
Where a split has files of several formats, the most frequent one is read, as the Hub does.
Price: all files of the split are fetched (to the usual cache) before the first is read.
Elsewhere: what is in a Parquet or JSON file (parquet.py, jsonl.py).
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import yaml

from unspool.core.errors import ConfigError, DataError
from unspool.data.sources import jsonl, parquet
from unspool.data.sources.base import Bad, Item
from unspool.data.sources.config import HfSource, JsonlSource, ParquetSource
from unspool.data.sources.files import Unreadable, first_line

_JSON = tuple(f".{name}{packing}" for name in ("jsonl", "json") for packing in ("", ".gz", ".zst"))
_FORMATS = {"parquet": (".parquet",), "json": _JSON, "arrow": (".arrow",)}
_NO_DATA = {"config.json", "dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json"}
_WORDS = {
    "train": "train|training",
    "validation": "validation|valid|dev|val",
    "test": "test|testing|eval|evaluation",
}
_SHARDED = re.compile(r"data/(\w+(?:\.\w+)*)-\d{5}-of-\d{5}[^/]*\.[^/]*")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_CONVERTED = "refs/convert/parquet"  # where the Hub puts Parquet copies: <config>/<split>/0000.parquet
_BATCH_RECORDS = 1024


def units(source: HfSource, root: Path) -> list[Path]:
    path = root / Path(source.path).expanduser()
    if path.is_dir():
        return _folder_files(source, path)
    if path.is_file() and _format(path.name):
        return [path]
    if _HUB_ID.fullmatch(source.path):
        return _hub_files(source, path)
    raise ConfigError(f"path {source.path!r} is no folder (looked for {path}) and no Hub id such as org/name.")


def read(source: HfSource, units: Sequence[Path], seed: int) -> Iterator[Item]:
    for path in units:
        form = _format(path.name)
        if form == "parquet":
            yield from parquet.read(ParquetSource(kind="parquet", path=source.path, text=source.text), [path], seed)
        elif form == "json":
            yield from jsonl.read(JsonlSource(kind="jsonl", path=source.path, text=source.text), [path], seed)
        else:
            yield from _read_arrow(path, source.text)


def _format(name: str) -> str | None:
    if PurePosixPath(name).name in _NO_DATA:
        return None
    return next((form for form, endings in _FORMATS.items() if name.endswith(endings)), None)


# Folders


def _folder_files(source: HfSource, folder: Path) -> list[Path]:
    if (folder / "dataset_dict.json").is_file():
        splits = _json(folder / "dataset_dict.json").get("splits")
        _check_split(source, splits if isinstance(splits, list) else [], str(folder))
        folder = folder / source.split
    if (folder / "state.json").is_file():
        return _saved_files(source, folder)
    names = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    chosen = _choose(source, names, text, str(folder))
    if not chosen:
        raise ConfigError(f"folder {folder} holds no Parquet, JSONL or Arrow files for split {source.split!r}.")
    return [folder / name for name in chosen]


def _saved_files(source: HfSource, folder: Path) -> list[Path]:
    """The files of a dataset that `save_to_disk` wrote."""
    state = _json(folder / "state.json")
    saved = state.get("_split")
    # A split may also be a slice such as "train[:1%]" or a sum, which nobody can ask for by name.
    if isinstance(saved, str) and saved.isidentifier():
        _check_split(source, [saved], str(folder))
    listed = state.get("_data_files")
    entries = listed if isinstance(listed, list) else []
    names = [str(entry.get("filename")) for entry in entries if isinstance(entry, dict)]
    # Looked up in a list: asking for a file of a damaged name can be an error of its own.
    present = {file.name for file in folder.iterdir() if file.is_file()}
    for name in names:
        if name not in present:
            what = f"{folder / 'state.json'}: names {name[:80]!r}, which is not there"
            raise DataError(f"{what}; copy the whole folder again.")
    if not names:
        raise DataError(f"{folder / 'state.json'}: names no data files; was the dataset saved whole?")
    return [folder / name for name in sorted(names)]


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read as JSON ({first_line(error)}).") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: a JSON object was expected, not {type(content).__name__}.")
    return content


# Which files


def _choose(source: HfSource, names: Sequence[str], card: str, where: str) -> list[str]:
    """The names of the split's files, sorted; none where they are of formats that are not read."""
    data = sorted(name for name in names if _format(name) and not re.search(r"(^|/)(\.|__)", name))
    configs = _card_configs(card, where)
    if configs:
        chosen = configs[_config_name(source, configs, where)]
        base = str(chosen.get("data_dir") or "").strip("/")
        below = _below(data, base)
        patterns = chosen.get("data_files")
        splits = _default_splits(below) if patterns is None else _matching(below, _split_patterns(patterns, where))
    else:
        base = source.config or ""
        below = _below(data, base)
        if base and data and not below:
            raise ConfigError(f"{where}: no configuration {base!r}: the card names none, and no such folder has data.")
        splits = _default_splits(below)
    if not below:
        return []
    _check_split(source, list(splits), where)
    return [f"{base}/{name}" if base else name for name in _one_format(splits[source.split])]


def _below(names: list[str], base: str) -> list[str]:
    return [name.removeprefix(f"{base}/") for name in names if name.startswith(f"{base}/")] if base else names


def _check_split(source: HfSource, present: list[str], where: str) -> None:
    if source.split not in present:
        found = ", ".join(map(repr, present)) or "none"
        raise ConfigError(f"{where} has no split {source.split!r}; set split to one of: {found}.")


def _config_name(source: HfSource, configs: dict[str, dict[str, Any]], where: str) -> str:
    standard = [name for name, values in configs.items() if name == "default" or values.get("default") is True]
    wanted = source.config or next(iter(configs if len(configs) == 1 else standard), None)
    if wanted is None or wanted not in configs:
        what = "several configurations" if wanted is None else f"no configuration {wanted!r}"
        raise ConfigError(f"{where} has {what}; set config to one of: {', '.join(map(repr, configs))}.")
    return wanted


def _card_configs(card: str, where: str) -> dict[str, dict[str, Any]]:
    """The `configs` in the front matter of README.md, by name."""
    head = re.match(r"\ufeff?---\s*\n(.*?)\n---\s*(\n|$)", card.replace("\r\n", "\n"), re.DOTALL)
    try:
        content = yaml.safe_load(head[1]) if head else None
    except yaml.YAMLError as error:
        raise DataError(f"{where}: the front matter of README.md is not valid YAML ({first_line(error)}).") from error
    configs = content.get("configs") if isinstance(content, dict) else None
    entries = configs if isinstance(configs, list) else []
    return {str(entry["config_name"]): entry for entry in entries if isinstance(entry, dict) and "config_name" in entry}


def _split_patterns(data_files: Any, where: str) -> dict[str, list[str]]:
    """Patterns by split, from any of the forms a card may give them in; without a split they mean `train`."""
    found: dict[str, list[str]] = {}
    for entry in data_files if isinstance(data_files, list) else [data_files]:
        split, paths = (entry.get("split"), entry.get("path")) if isinstance(entry, dict) else ("train", entry)
        for pattern in paths if isinstance(paths, list) else [paths]:
            if not isinstance(split, str) or not isinstance(pattern, str):
                raise DataError(f"{where}: data_files in README.md must be patterns, or pairs of split and path.")
            found.setdefault(split, []).append(pattern)
    return found


def _matching(names: list[str], patterns: dict[str, list[str]]) -> dict[str, list[str]]:
    tests = {split: [PurePosixPath(pattern).parts for pattern in listed] for split, listed in patterns.items()}
    return {
        split: [name for name in names if any(_fits(PurePosixPath(name).parts, pattern) for pattern in listed)]
        for split, listed in tests.items()
    }


def _fits(name: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    """Folder by folder: ** stands for any number of them, * stays within one."""
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(_fits(name[start:], pattern[1:]) for start in range(len(name) + 1))
    return bool(name) and fnmatchcase(name[0], pattern[0]) and _fits(name[1:], pattern[1:])


def _default_splits(names: list[str]) -> dict[str, list[str]]:
    """What the Hub makes of a repository whose card says nothing: the first rule that any file fits."""
    splits: dict[str, list[str]] = {}
    for name in names:
        if match := _SHARDED.fullmatch(name):
            splits.setdefault(match[1], []).append(name)
    for ending, chosen in ((r"(?:[-._ 0-9].*)?", _folders), (r"[-._ 0-9].*", _file)):
        if not splits:
            for split, words in _WORDS.items():
                test = re.compile(rf"(?:.*[-._ 0-9])?(?:{words}){ending}")
                if found := [name for name in names if any(map(test.fullmatch, chosen(name)))]:
                    splits[split] = found
    return splits or {"train": names}


def _folders(name: str) -> tuple[str, ...]:
    return PurePosixPath(name).parts[:-1]


def _file(name: str) -> tuple[str, ...]:
    return PurePosixPath(name).parts[-1:]


def _one_format(names: list[str]) -> list[str]:
    counts = Counter(map(_format, names))
    usual = max(_FORMATS, key=lambda form: counts[form])
    return [name for name in names if _format(name) == usual]


# The Hub


def _hub_files(source: HfSource, looked_for: Path) -> list[Path]:
    # Inside the function, as only this needs it and it takes a while to import.
    import huggingface_hub as hub
    from huggingface_hub.errors import RepositoryNotFoundError

    name = f"dataset {source.path!r} on the Hub"
    try:
        revision, names = _listing(hub.HfApi(), source.path, source.revision)
        card = ""
        if "README.md" in names:
            file = hub.hf_hub_download(source.path, "README.md", repo_type="dataset", revision=revision)
            card = Path(file).read_text(encoding="utf-8", errors="replace")
        chosen = (
            _choose_converted(source, names) if source.revision == _CONVERTED else _choose(source, names, card, name)
        )
        if not chosen and source.revision is None:
            # The branch is always of the newest commit, so it cannot stand in for a revision that was asked for.
            revision, names = _listing(hub.HfApi(), source.path, _CONVERTED)
            chosen = _choose_converted(source, names)
        paths = [hub.hf_hub_download(source.path, name, repo_type="dataset", revision=revision) for name in chosen]
    except (ConfigError, DataError):
        raise
    except RepositoryNotFoundError as error:
        hint = "check the name, or log in with `hf auth login` if it is private"
        raise ConfigError(f"path {source.path!r}: no folder {looked_for} and no such {name}; {hint}.") from error
    except Exception as error:
        # Its versions raise the errors of three HTTP libraries, with no parent in common.
        fetch = f"hf download --repo-type dataset {source.path} --local-dir FOLDER"
        raise ConfigError(
            f"path {source.path!r}: no folder {looked_for}, and {name} cannot be had ({first_line(error)}); where "
            f"there is no network, run `{fetch}` on a machine that has one and give that folder as path."
        ) from error
    if not paths:
        raise ConfigError(f"{name} holds no Parquet, JSONL or Arrow files for split {source.split!r}.")
    return sorted(map(Path, paths))


def _listing(api: Any, name: str, revision: str | None) -> tuple[str, list[str]]:
    """The commit, so that all files are of the same one, and the files it has."""
    commit = str(api.dataset_info(name, revision=revision).sha)
    return commit, api.list_repo_files(name, repo_type="dataset", revision=commit)


def _choose_converted(source: HfSource, names: Sequence[str]) -> list[str]:
    where = f"the Parquet copy of dataset {source.path!r} on the Hub"
    configs: dict[str, dict[str, Any]] = {}
    for name in sorted(names):
        parts = PurePosixPath(name).parts
        if len(parts) == 3 and _format(name) == "parquet":
            configs.setdefault(parts[0], {}).setdefault(parts[1], []).append(name)
    if not configs:
        return []
    splits = configs[_config_name(source, configs, where)]
    if source.split not in splits and f"partial-{source.split}" in splits:
        raise ConfigError(
            f"{where} holds only the first part of {source.split!r}; to read that, set split: partial-{source.split}."
        )
    _check_split(source, list(splits), where)
    files: list[str] = splits[source.split]
    return files


# Arrow files


def _read_arrow(path: Path, column: str) -> Iterator[Item]:
    number = 1
    try:
        with pa.memory_map(str(path)) as file:
            for batch, parts in _batches(file, column):
                try:
                    # Arrow follows the offsets in a file without a look; full validation makes sure they stay inside.
                    batch.validate()
                    array = _as_bytes(parquet.column_of(batch, parts))
                except parquet.ARROW_ERRORS as error:
                    detail = f"a batch is damaged ({first_line(error)}); {batch.num_rows} records are lost"
                    yield Bad(str(path), f"after record {number - 1}", "corrupt_page", detail)
                else:
                    for start in range(0, len(array), _BATCH_RECORDS):
                        yield from parquet.items_of(array.slice(start, _BATCH_RECORDS), path, number + start)
                number += batch.num_rows
    except Unreadable as error:
        yield Bad(str(path), _after(number), error.reason, error.detail)
    except FileNotFoundError:
        yield Bad(str(path), _after(number), "unreadable", "the file has gone")
    except parquet.ARROW_ERRORS as error:
        yield Bad(str(path), _after(number), "unreadable", f"cannot be read as Arrow ({first_line(error)})")


def _after(number: int) -> str:
    return f"after record {number - 1}" if number > 1 else "whole file"


def _batches(file: pa.MemoryMappedFile, column: str) -> Iterator[tuple[pa.RecordBatch, list[str]]]:
    start = file.read(6)
    file.seek(max(file.size() - 8, 0))
    ends = file.read(8)
    file.seek(0)
    if start == b"ARROW1":
        reader = pa.ipc.open_file(file)
        parts = parquet.column_path(reader.schema, column)
        for index in range(reader.num_record_batches):
            yield reader.get_batch(index), parts
        return
    # A stream that is cut short between two batches looks like a shorter one, but for the mark at its end.
    whole = ends == b"\xff\xff\xff\xff\0\0\0\0" or (
        not start.startswith(b"\xff\xff\xff\xff") and ends.endswith(b"\0" * 4)
    )
    try:
        reader = pa.ipc.open_stream(file)
        parts = parquet.column_path(reader.schema, column)
        for batch in reader:
            yield batch, parts
    except parquet.ARROW_ERRORS as error:
        reason = "unreadable" if whole else "truncated"
        raise Unreadable(reason, f"cannot be read on as an Arrow stream ({first_line(error)})") from error
    if not whole:
        raise Unreadable("truncated", "cut short; an Arrow stream ends with a mark")
    if file.tell() < file.size():
        raise Unreadable("corrupt_page", f"an end mark at byte {file.tell()} of {file.size()}; what follows is lost")


def _as_bytes(array: pa.Array) -> pa.Array:
    """The same column as bytes, checked in full; as strings, one that is not UTF-8 would fail the whole batch."""
    if pa.types.is_dictionary(array.type):
        array.indices.validate(full=True)
        return pa.DictionaryArray.from_arrays(array.indices, _as_bytes(array.dictionary))
    kinds = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}
    array = array.view(kinds.get(array.type, array.type))
    array.validate(full=True)
    return array
