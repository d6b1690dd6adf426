"""Check that all ranks run the same recipe, data, model, code and libraries.

Ranks on several machines may have different files or versions. A rank with another learning rate would train without an
error. So ranks compare their facts before the first step, and refuse the job if one differs.
"""

import hashlib
import platform
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import try_to_load_from_cache

import unspool
from unspool.core.artifacts import MANIFEST, digest, file_digest, read_manifest
from unspool.training.parallel.mesh import from_leader, gather_on_leader
from unspool.training.parallel.ranks import CommonError, Ranks

# Files up to this size are compared by content, larger files by size: every rank reads them before each stage.
MAX_HASHED = 1 << 20
# Most characters of a value in the message.
MAX_SHOWN = 60
MISSING = "missing"
UNKNOWN = "unknown"  # not compared


def require_agreement(ranks: Ranks, facts: Mapping[str, Any]) -> None:
    """Raise an error on all ranks if one has other facts than rank 0. All ranks must call this.

    Facts may be nested; a difference is named by its path, such as `stages.0.lr`.
    """
    found = gather_on_leader(ranks, dict(_leaves(facts)))
    problem = from_leader(ranks, lambda: _difference(found))
    if problem is not None:
        raise CommonError(problem)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping | list | tuple) and value:
        entries = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, entry in entries:
            yield from _leaves(entry, f"{path}.{key}" if path else str(key))
    else:
        yield path, value if isinstance(value, str | int | float | bool | None) else str(value)


def _difference(facts: list[dict[str, Any]]) -> str | None:
    first, *others = facts
    for rank, other in enumerate(others, 1):
        keys = [key for key in {**first, **other} if _differs(first, other, key)]
        if keys:
            key, more = keys[0], len(keys) - 1
            also = f" ({more} more difference{'s' * (more > 1)})" if more else ""
            return (
                f"rank {rank} disagrees with rank 0: {key} is {_shown(other, key)} there and {_shown(first, key)} on "
                f"rank 0{also}; start all ranks with the same recipe, data, model, code and library versions."
            )
    return None


def _differs(first: dict[str, Any], other: dict[str, Any], key: str) -> bool:
    values = first.get(key, MISSING), other.get(key, MISSING)
    return UNKNOWN not in values and values[0] != values[1]


def _shown(facts: dict[str, Any], key: str) -> str:
    text = repr(facts[key]) if key in facts else MISSING
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"


def version_facts() -> dict[str, str]:
    """Return the versions of code and libraries that results depend on."""
    return {
        "unspool version": unspool.__version__,
        "unspool source": _source_digest(),
        "torch version": torch.__version__,
        "transformers version": transformers.__version__,
        "python version": platform.python_version(),
    }


@cache
def _source_digest() -> str:
    root = Path(unspool.__file__).parent
    hashed = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        hashed.update(f"{path.relative_to(root)} {file_digest(path)}\n".encode())
    return hashed.hexdigest()[:16]


def dataset_facts(folders: Mapping[str, Path]) -> dict[str, str]:
    """Return a digest of the manifest of each dataset."""
    return {f"dataset {name}": digest(read_manifest(folder)) for name, folder in folders.items()}


def model_facts(ref: str) -> dict[str, Any]:
    """Return a stage's manifest, the files of another folder, or the commit of a Hub model in the local cache."""
    folder = Path(ref)
    if (folder.parent / MANIFEST).is_file():
        return {"model manifest": digest(read_manifest(folder.parent))}
    if folder.is_dir():
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return {f"model file {path.relative_to(folder)}": _file_fact(path) for path in files}
    if folder.is_file():
        return {"model file": _file_fact(folder)}
    cached = try_to_load_from_cache(ref, "config.json")
    return {f"model {ref}": Path(cached).parent.name if isinstance(cached, str) else UNKNOWN}


def _file_fact(path: Path) -> str:
    size = path.stat().st_size
    return file_digest(path)[:16] if size <= MAX_HASHED else f"{size:,} bytes"
