"""Source kind `hf`: Hugging Face datasets from the Hub or a folder, read without the `datasets` library.

Configuration and split are found by the Hub's rules. The first match of these counts: the `configs` of the dataset
card, names like data/train-00000-of-00002.parquet, folders or files named after a split. Otherwise all files are
`train`. If a split has files of several formats, the most frequent format is read, as on the Hub. A dataset on the Hub
is streamed only as far as needed (hub_stream.py).
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, Self

import yaml
from pydantic import Field

from unspool.core.errors import ConfigError, DataError
from unspool.data.sources.base import Item, TextFileSource
from unspool.data.sources.files import first_line
from unspool.data.sources.hub_stream import (
    HubRows,
    content_marks,
    divide_remote,
    download_file,
    hub_path,
    open_remote,
    split_hub_path,
)
from unspool.data.sources.jsonl import JsonlSource

if TYPE_CHECKING:
    from unspool.data.tokenize.encoder import Encoder

_JSON = tuple(f".{name}{packing}" for name in ("jsonl", "json") for packing in ("", ".gz", ".zst"))
_FORMATS = {"parquet": (".parquet",), "json": _JSON, "arrow": (".arrow",)}
_METADATA = {"config.json", "dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json"}
_SPLIT_WORDS = {
    "train": "train|training",
    "validation": "validation|valid|dev|val",
    "test": "test|testing|eval|evaluation",
}
_SHARDED = re.compile(r"data/(\w+(?:\.\w+)*)-\d{5}-of-\d{5}[^/]*\.[^/]*")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_CONVERTED = "refs/convert/parquet"  # where the Hub puts Parquet copies: <config>/<split>/0000.parquet


class HfSource(TextFileSource):
    """A Hugging Face dataset: a Hub id, or a folder with its Parquet, JSONL or `save_to_disk` files."""

    kind: Literal["hf"]
    path: str = Field(description="Hub id such as org/name, or a folder.")
    config: str | None = Field(
        None, description="Configuration of the dataset. Required if the dataset has several and no default."
    )
    split: str = Field("train", description="Split to read.")
    text: str = Field("text", description="Column that holds the text.")
    revision: str | None = Field(
        None, description="Commit of the dataset, so that later runs read the same bytes. Default: the newest."
    )

    def may_be_remote(self, path: str) -> bool:
        return _HUB_ID.fullmatch(path) is not None

    def limited(self, tokens: int | None) -> Self:
        """Limit a Hub dataset to what the recipe needs, unless `limit` is set; a folder is read completely."""
        if tokens is None or self.limit is not None or Path(self.path).expanduser().exists():
            return self
        return self.model_copy(update={"limit": tokens})

    def units(self, root: Path) -> list[Path]:
        path = root / Path(self.path).expanduser()
        if path.is_dir():
            return _folder_files(self, path)
        if path.is_file() and _format(path.name):
            return [path]
        if self.may_be_remote(self.path):
            return _find_remote(self, path)
        raise ConfigError(
            f"path {self.path!r} is neither a folder (looked for {path}) nor a Hub id; give one such as org/name."
        )

    def local_files(self, root: Path) -> list[Path]:
        """Return the split's files, all downloaded."""
        return [download_file(unit) for unit in self.units(root)]

    def content_marks(self, units: Sequence[Path]) -> list[Any] | None:
        return content_marks(units) if _is_remote(units) else None

    def divide(self, units: list[Path], seed: int) -> list[Any]:
        return divide_remote(units, self.limit) if _is_remote(units) else super().divide(units, seed)

    def sample(self, units: list[Path], seed: int) -> Iterator[str]:
        # From the Hub only the beginning, which is read in any case.
        return super().sample(units[:1] if _is_remote(units) else units, seed)

    def read(self, task: Any, seed: int = 0, encoder: "Encoder | None" = None) -> Iterator[Item]:
        if isinstance(task, HubRows):
            from unspool.data.sources.arrow import read_text_column

            return read_text_column(task.path, self.text, open_remote, range(task.first, task.last))
        return self.read_units(task, seed)

    def read_units(self, units: Sequence[Path], seed: int = 0) -> Iterator[Item]:
        # pyarrow takes long to import, and checking a recipe does not need it.
        from unspool.data.sources.arrow import open_parquet, read_arrow, read_text_column

        lines = JsonlSource(kind="jsonl", path=self.path, text=self.text)
        for path in units:
            form = _format(path.name)
            if form == "parquet":
                yield from read_text_column(path, self.text, open_remote if _is_remote([path]) else open_parquet)
            elif form == "json":
                yield from lines.read_units([download_file(path)])
            else:
                yield from read_arrow(download_file(path), self.text)


def _is_remote(units: Sequence[Path]) -> bool:
    return bool(units) and split_hub_path(units[0]) is not None


def _format(name: str) -> str | None:
    if PurePosixPath(name).name in _METADATA:
        return None
    return next((form for form, endings in _FORMATS.items() if name.endswith(endings)), None)


# Folders


def _folder_files(source: HfSource, folder: Path) -> list[Path]:
    if (folder / "dataset_dict.json").is_file():
        splits = _read_json(folder / "dataset_dict.json").get("splits")
        _check_split(source, splits if isinstance(splits, list) else [], str(folder))
        folder = folder / source.split
    if (folder / "state.json").is_file():
        return _saved_files(source, folder)
    names = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    chosen = _choose_files(source, names, text, str(folder))
    if not chosen:
        raise ConfigError(
            f"folder {folder} holds no Parquet, JSONL or Arrow files for split {source.split!r}; correct path or split."
        )
    return [folder / name for name in chosen]


def _saved_files(source: HfSource, folder: Path) -> list[Path]:
    """Return the files of a dataset that `save_to_disk` wrote."""
    state_path = folder / "state.json"
    state = _read_json(state_path)
    saved = state.get("_split")
    # A saved split may also be a slice such as "train[:1%]" or a sum, which no setting can name.
    if isinstance(saved, str) and saved.isidentifier():
        _check_split(source, [saved], str(folder))
    listed = state.get("_data_files")
    entries = listed if isinstance(listed, list) else []
    names = [str(entry.get("filename")) for entry in entries if isinstance(entry, dict)]
    if not names:
        raise DataError(f"{state_path}: lists no data files; save the dataset again.")
    # Compare with a listing, because opening a file with a damaged name can fail in other ways.
    present = {file.name for file in folder.iterdir() if file.is_file()}
    for name in names:
        if name not in present:
            raise DataError(f"{state_path}: lists {name[:80]!r}, which does not exist; copy the whole folder again.")
    return [folder / name for name in sorted(names)]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read as JSON ({first_line(error)}); download it again.") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: expected a JSON object, not {type(content).__name__}.")
    return content


# The files of a configuration and a split


def _choose_files(source: HfSource, names: Sequence[str], card: str, where: str) -> list[str]:
    """Return the names of the split's files, sorted; none if no format is supported."""
    data = sorted(name for name in names if _format(name) and not re.search(r"(^|/)(\.|__)", name))
    configs = _card_configs(card, where)
    if configs:
        config = configs[_config_name(source, configs, where)]
        base = str(config.get("data_dir") or "").strip("/")
        below = _names_below(data, base)
        patterns = config.get("data_files")
        splits = _default_splits(below) if patterns is None else _match_splits(below, _split_patterns(patterns, where))
    else:
        base = source.config or ""
        below = _names_below(data, base)
        if base and data and not below:
            raise ConfigError(
                f"{where}: configuration {base!r} does not exist: the card lists none, and no such folder has data."
            )
        splits = _default_splits(below)
    if not below:
        return []
    _check_split(source, list(splits), where)
    return [f"{base}/{name}" if base else name for name in _most_frequent_format(splits[source.split])]


def _names_below(names: list[str], base: str) -> list[str]:
    return [name.removeprefix(f"{base}/") for name in names if name.startswith(f"{base}/")] if base else names


def _check_split(source: HfSource, present: list[str], where: str) -> None:
    if source.split not in present:
        found = ", ".join(map(repr, present)) or "none"
        raise ConfigError(f"{where} has no split {source.split!r}; set split to one of: {found}.")


def _config_name(source: HfSource, configs: dict[str, dict[str, Any]], where: str) -> str:
    default = [name for name, values in configs.items() if name == "default" or values.get("default") is True]
    wanted = source.config or next(iter(configs if len(configs) == 1 else default), None)
    if wanted is None or wanted not in configs:
        what = "several configurations" if wanted is None else f"no configuration {wanted!r}"
        raise ConfigError(f"{where} has {what}; set config to one of: {', '.join(map(repr, configs))}.")
    return wanted


def _card_configs(card: str, where: str) -> dict[str, dict[str, Any]]:
    """Parse the `configs` in the front matter of README.md, by name."""
    head = re.match(r"\ufeff?---\s*\n(.*?)\n---\s*(\n|$)", card.replace("\r\n", "\n"), re.DOTALL)
    try:
        content = yaml.safe_load(head[1]) if head else None
    except yaml.YAMLError as error:
        raise DataError(
            f"{where}: the front matter of README.md is not valid YAML ({first_line(error)}); correct it."
        ) from error
    configs = content.get("configs") if isinstance(content, dict) else None
    entries = configs if isinstance(configs, list) else []
    return {str(entry["config_name"]): entry for entry in entries if isinstance(entry, dict) and "config_name" in entry}


def _split_patterns(data_files: Any, where: str) -> dict[str, list[str]]:
    """Parse patterns by split, in any form a card may use; patterns without a split mean `train`."""
    found: dict[str, list[str]] = {}
    for entry in data_files if isinstance(data_files, list) else [data_files]:
        split, paths = (entry.get("split"), entry.get("path")) if isinstance(entry, dict) else ("train", entry)
        for pattern in paths if isinstance(paths, list) else [paths]:
            if not isinstance(split, str) or not isinstance(pattern, str):
                raise DataError(f"{where}: data_files in README.md must be patterns, or pairs of split and path.")
            found.setdefault(split, []).append(pattern)
    return found


def _match_splits(names: list[str], patterns: dict[str, list[str]]) -> dict[str, list[str]]:
    return {
        split: [name for name in names if any(_matches(_parts(name), _parts(pattern)) for pattern in listed)]
        for split, listed in patterns.items()
    }


def _parts(path: str) -> list[str]:
    return list(PurePosixPath(path).parts)


def _matches(name: list[str], pattern: list[str]) -> bool:
    """Match folder by folder: ** matches any number of folders, * stays within one."""
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(_matches(name[start:], pattern[1:]) for start in range(len(name) + 1))
    return bool(name) and fnmatchcase(name[0], pattern[0]) and _matches(name[1:], pattern[1:])


def _default_splits(names: list[str]) -> dict[str, list[str]]:
    """Find the splits of a dataset whose card lists none, by the first of the Hub's rules that matches any file."""
    splits: dict[str, list[str]] = {}
    for name in names:
        if match := _SHARDED.fullmatch(name):
            splits.setdefault(match[1], []).append(name)
    # Folders named after a split, then files.
    for ending, parts in ((r"(?:[-._ 0-9].*)?", slice(None, -1)), (r"[-._ 0-9].*", slice(-1, None))):
        if not splits:
            for split, words in _SPLIT_WORDS.items():
                test = re.compile(rf"(?:.*[-._ 0-9])?(?:{words}){ending}")
                if found := [name for name in names if any(map(test.fullmatch, _parts(name)[parts]))]:
                    splits[split] = found
    return splits or {"train": names}


def _most_frequent_format(names: list[str]) -> list[str]:
    counts = Counter(map(_format, names))
    usual = max(_FORMATS, key=lambda form: counts[form])
    return [name for name in names if _format(name) == usual]


# The Hub


def _find_remote(source: HfSource, looked_for: Path) -> list[Path]:
    # Slow to import, and needed only here.
    import huggingface_hub as hub
    from huggingface_hub.errors import RepositoryNotFoundError

    name = f"dataset {source.path!r} on the Hub"
    try:
        revision, names = _list_files(hub.HfApi(), source.path, source.revision)
        if source.revision == _CONVERTED:
            chosen = _choose_converted(source, names)
        else:
            card = ""
            if "README.md" in names:
                file = hub.hf_hub_download(source.path, "README.md", repo_type="dataset", revision=revision)
                card = Path(file).read_text(encoding="utf-8", errors="replace")
            chosen = _choose_files(source, names, card, name)
        if not chosen and source.revision is None:
            # The converted branch always belongs to the newest commit, so it cannot replace a requested revision.
            revision, names = _list_files(hub.HfApi(), source.path, _CONVERTED)
            chosen = _choose_converted(source, names)
    except (ConfigError, DataError):
        raise
    except RepositoryNotFoundError as error:
        hint = "check the name, or log in with `hf auth login` if it is private"
        raise ConfigError(f"path {source.path!r}: no folder {looked_for} and no such {name}; {hint}.") from error
    except Exception as error:
        # Versions of huggingface_hub raise the errors of three HTTP libraries, which have no common base class.
        command = f"hf download --repo-type dataset {source.path} --local-dir FOLDER"
        raise ConfigError(
            f"path {source.path!r}: no folder {looked_for}, and {name} cannot be read ({first_line(error)}); "
            f"without a network, run `{command}` on a machine that has one and give that folder as path."
        ) from error
    if not chosen:
        raise ConfigError(
            f"{name} holds no Parquet, JSONL or Arrow files for split {source.split!r}; correct path or split."
        )
    return sorted(hub_path(source.path, revision, name) for name in chosen)


def _list_files(api: Any, name: str, revision: str | None) -> tuple[str, list[str]]:
    """Return the current commit and its files, so that all files come from the same commit."""
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
