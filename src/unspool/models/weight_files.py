"""Check the weight files of a model folder before use. Imports no torch.

Every reader of weights calls `check_weights`. It always checks headers and sizes, and digests if the folder has a
manifest. An index may only name safetensors files in its own folder.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

from safetensors import SafetensorError, safe_open

from unspool.core.artifacts import digest, digest_once, folder_digest, read_manifest
from unspool.core.errors import ConfigError
from unspool.models.location import first_line

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SUFFIX = ".safetensors"
# Other types are quantized weights, whose values are meaningless without their scales.
_FLOATS = ("F64", "F32", "F16", "BF16")
MERGE_KIND = "merge"  # of a folder of `unspool merge`
# Files of an exported folder that a user may edit; they do not change the model.
_FREE = ("README.md",)


def check_weights(ref: str, *, digests: bool = True) -> None:
    """Refuse a folder whose weights are damaged; ConfigError names the file.

    `transformers` checks Hub ids and GGUF files, and the caller handles folders without weights. `digests=False` reads
    only headers.
    """
    folder = Path(ref)
    if not folder.is_dir():
        return
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(f"model {ref}: it is an adapter (adapter_config.json); merge it into its base model first.")
    named = _config(folder).get("transformers_weights")
    if named is not None:
        raise ConfigError(
            f"model {ref}: its config.json names the weights {named!r}, but only {SINGLE} and {INDEX} are read; remove "
            "transformers_weights."
        )
    if (folder / SINGLE).is_file() or (folder / INDEX).is_file():
        weight_files(folder)
    _check_written(folder, digests=digests)


def weight_files(folder: Path) -> dict[str, Path]:
    """Return the file of every tensor by tensor name, after checking each file's header and size.

    Of a folder with both a single file and an index, the single file is read, as in `transformers`.
    """
    if (folder / SINGLE).is_file():
        header = read_header(folder / SINGLE)
        _check_types(folder, SINGLE, header)
        return dict.fromkeys(header, folder / SINGLE)
    if not (folder / INDEX).is_file():
        raise ConfigError(f"model {folder}: holds neither {SINGLE} nor {INDEX}; convert it to safetensors.")
    by_name = _read_index(folder)
    found: dict[str, Path] = {}
    for name in sorted(set(by_name.values())):
        header = read_header(folder / name)
        _check_types(folder, name, header)
        twice = next((tensor for tensor in header if tensor in found), None)
        if twice is not None:
            raise _damaged(folder, f"{twice} is stored both in {found[twice].name} and in {name}")
        found |= dict.fromkeys(header, folder / name)
    for tensor, name in by_name.items():
        if tensor not in found:
            raise _damaged(folder, f"{INDEX} lists {tensor}, and {name} does not hold it")
        if found[tensor].name != name:
            raise _damaged(folder, f"{INDEX} lists {tensor} in {name}, and {found[tensor].name} holds it")
    return found


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Return dtype and shape of every tensor in a safetensors file; ConfigError if its header or size is wrong."""
    try:
        # Opening checks the header's length, offsets, shapes and the file's size, but not repeated names.
        with safe_open(path, framework="np"):
            pass
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(size), object_pairs_hook=_unique)
    except (OSError, ValueError, SafetensorError) as error:
        raise _damaged(path.parent, f"{path.name} is damaged ({first_line(error)})") from error
    header.pop("__metadata__", None)
    return header


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} is listed twice in its header")
        found[name] = value
    return found


def _check_types(folder: Path, name: str, header: dict[str, dict[str, Any]]) -> None:
    odd = next((one for one in header if one.endswith(".weight") and header[one]["dtype"] not in _FLOATS), None)
    if odd is not None and not _config(folder).get("quantization_config"):
        raise _damaged(
            folder,
            f"{odd} in {name} has type {header[odd]['dtype']} and not one of {', '.join(_FLOATS)}, though its "
            "config.json names no quantization",
        )


def _config(folder: Path) -> dict[str, Any]:
    """Return config.json; empty if it cannot be read, which `read_config_file` reports."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _read_index(folder: Path) -> dict[str, str]:
    """Return the file name of every tensor; ConfigError for a file that is not read."""
    try:
        by_name = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        if not by_name or not all(isinstance(name, str) for name in by_name.values()):
            raise ValueError("weight_map is not a mapping to file names")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise _damaged(folder, f"{INDEX} cannot be read ({first_line(error)})") from error
    names = sorted(set(by_name.values()))
    for name in names:
        if name != Path(name).name or not _is_inside(folder, folder / name):
            raise ConfigError(f"model {folder}: {INDEX} names {name!r}, outside of its folder; copy the file into it.")
        if not name.endswith(SUFFIX):
            raise ConfigError(
                f"model {folder}: {INDEX} names {name!r}, but only {SUFFIX} files are read; convert it to safetensors."
            )
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise _damaged(folder, f"{len(missing)} of {len(names)} shards are missing: {', '.join(missing[:3])}{more}")
    return dict(by_name)


def _is_inside(folder: Path, path: Path) -> bool:
    """Return whether a link leads to a file in this folder, or in the Hub cache that contains the folder."""
    own, found = folder.resolve(), path.resolve()
    return found.parent == own or (own.parent.name == "snapshots" and found.parent == own.parents[1] / "blobs")


# Manifests


def _check_written(folder: Path, *, digests: bool) -> None:
    for path, entry in _written(folder):
        if not path.is_file() or path.stat().st_size != entry["bytes"]:
            problem = "is missing or has another size than when it was written"
        elif digests and digest_once(path) != entry["sha256"]:
            problem = "has changed since it was written"
        else:
            continue
        raise ConfigError(
            f"model {folder}: {path.name} {problem}; export or train the model again. If you changed it on purpose, "
            "use a copy of the folder without manifest.json."
        )


def _written(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the files of an exported folder or of a stage's model, with their manifest entries."""
    holders = (("export", folder, ""), (MERGE_KIND, folder, ""), ("stage", folder.parent, f"{folder.name}/"))
    for kind, holder, prefix in holders:
        manifest = read_manifest(holder) or {}
        if manifest.get("kind") == kind and "unspool" in manifest:
            for name, entry in manifest.get("files", {}).items():
                if name.startswith(prefix) and name not in _FREE:
                    yield holder / name, entry


def check_written_file(path: Path) -> None:
    """Refuse a damaged safetensors file of a stage, such as its optimizer's state."""
    read_header(path)
    entry = (read_manifest(path.parent) or {}).get("files", {}).get(path.name)
    if entry is not None and digest_once(path) != entry["sha256"]:
        raise _damaged(path.parent, f"{path.name} has changed since it was written")


def model_digest(ref: str) -> str:
    """Hash a model's files, or the name alone of a Hub id."""
    path = Path(ref)
    if path.is_dir():
        return folder_digest(path, digest_once)
    return digest_once(path) if path.is_file() else digest(ref)


def hash_ahead(ref: str) -> None:
    """Compute `model_digest` in a thread for later callers: hashing an 8B model takes as long as the imports."""

    def compute() -> None:
        with suppress(OSError):  # the later caller gets the error
            model_digest(ref)

    Thread(target=compute, name="unspool-hash-ahead", daemon=True).start()


def _damaged(folder: Path, problem: str) -> ConfigError:
    return ConfigError(f"model {folder}: {problem}; download or export the model again.")
