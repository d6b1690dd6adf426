"""Average the weights of two models, tensor by tensor, so that neither model is ever whole in memory.

The first model gives everything but the weights: config with RoPE settings and context length, tokenizer, data type
and the layout of its files. The second model, such as the base model, may have other RoPE settings; they are not used.
"""

import json
import logging
import shutil
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from unspool.core.artifacts import publish, read_manifest, remove
from unspool.core.errors import ConfigError, naming
from unspool.core.formatting import format_duration
from unspool.core.lock import lock_output
from unspool.core.progress import long_bar
from unspool.core.sizes import format_size
from unspool.models.config import config_values
from unspool.models.export import TEXT
from unspool.models.location import GGUF, location, model_path
from unspool.models.tensor_files import TORCH_TYPES, TensorFile, write_streamed
from unspool.models.tokenizer import load_tokenizer
from unspool.models.weight_files import INDEX, MERGE_KIND, check_weights, model_digest, read_header, weight_files
from unspool.rope.tables import config_frequencies, shape_of

logger = logging.getLogger(__name__)

# Files of the first model that the merged folder needs besides weights.
_FILES = (
    *("config.json", "generation_config.json", "modeling_harpe.py", "tokenizer*", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.*", "merges.txt", "chat_template*", "*.model"),
)
# Config keys in which the two models may differ.
_ROPE = ("rope_parameters", "rope_theta", "rope_scaling", "rope_local_base_freq", "head_bases")
_LENGTHS = ("max_position_embeddings", "original_max_position_embeddings")
_FREE = (
    *("vocab_size", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache", "architectures"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "auto_map", "plain_type"),
)
# Parts of the names of tensors with one row per token.
_TOKEN_ROWS = ("embed", "lm_head", "wte")


@dataclass(frozen=True, kw_only=True)
class Merged:
    """A folder with averaged weights, and what it took from which model."""

    folder: Path
    first: str
    second: str
    weight: float  # of the first model; the second has the rest
    tensors: int
    own_tokens: int  # tokens that only the first model has; their rows are not averaged
    num_bytes: int
    context_length: int
    rope: str  # of the first model, and so of the merged model
    second_rope: str
    same_rope: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"folder": str(self.folder)}


@dataclass(frozen=True, kw_only=True)
class _Side:
    """One of the two models: config values, tokenizer, and the file and header entry of every tensor."""

    ref: str
    folder: Path
    values: dict[str, Any]
    vocabulary: dict[str, int]
    sample: list[int]
    files: dict[str, Path]
    entries: dict[str, dict[str, Any]]


def merge(first: str | Path, second: str | Path, *, weight: float, out: str | Path) -> Merged:
    """Average the weights of two models: `weight` × first + (1 − `weight`) × second.

    The first model gives config, RoPE settings, context length, tokenizer and data type. So give the extended model
    first, and its base second: the base's RoPE settings are not used. Averages are computed in fp32, one tensor at a
    time. A weight of 1 or 0 copies one side's values. Tokens that only the first model has keep their rows.

    Args:
        first: A model folder, a run or one of its stages, a Hub id, or `asset:tiny-base`.
        second: A model of the same architecture.
        weight: Share of the first model, from 0 to 1.
        out: The folder to write; an earlier merge there is replaced, anything else is refused.

    Returns:
        The folder, and the RoPE settings of both sides.

    Raises:
        ConfigError: The models differ in architecture, shapes or tokenizer, or the folder is in use.

    Example:
        >>> import tempfile, unspool
        >>> base = "asset:tiny-base"
        >>> merged = unspool.merge(base, base, weight=0.9, out=tempfile.mkdtemp() + "/merged")
        >>> merged.weight, merged.same_rope
        (0.9, True)
    """
    if not 0 <= weight <= 1:
        raise ConfigError(
            f"`weight={weight:g}` is not between 0 and 1; give the share of the first model, such as 0.9."
        )
    out_dir = Path(out)
    _check_out(out_dir)
    sides = _read(str(first)), _read(str(second))
    own_tokens = _check_same(*sides)
    lengths = [shape_of(side.values).max_positions for side in sides]
    ropes = [config_frequencies(side.values, length)[1] for side, length in zip(sides, lengths, strict=True)]
    with lock_output(out_dir):
        _publish(out_dir, *sides, weight=weight, own_tokens=own_tokens)
    if lengths[0] < lengths[1]:
        logger.warning(
            f"merge: {first} has the shorter context ({format_size(lengths[0])}, and {second} "
            f"{format_size(lengths[1])}), which the merged model keeps; to keep the longer one, swap the models"
        )
    return Merged(
        folder=out_dir,
        first=sides[0].ref,
        second=sides[1].ref,
        weight=weight,
        tensors=len(sides[0].entries),
        own_tokens=len(own_tokens),
        num_bytes=sum(path.stat().st_size for path in out_dir.iterdir()),
        context_length=lengths[0],
        rope=ropes[0],
        second_rope=ropes[1],
        same_rope=all(sides[0].values.get(key) == sides[1].values.get(key) for key in _ROPE),
    )


def _check_out(out_dir: Path) -> None:
    if not out_dir.exists() or (read_manifest(out_dir) or {}).get("kind") == MERGE_KIND:
        return
    if not out_dir.is_dir() or any(out_dir.iterdir()):
        raise ConfigError(
            f"{out_dir} exists and is not a merge of Unspool; give a new folder, so that no files are lost."
        )


# Reading and comparing


def _read(given: str) -> _Side:
    ref = model_path(given, Path())
    if ref.endswith(GGUF):
        raise ConfigError(f"model {given}: merging reads safetensors; export the .gguf file to a folder first.")
    values = config_values(ref)
    if values.get("quantization_config"):
        raise ConfigError(
            f"model {given}: its weights are quantized, and averages of codes mean nothing; dequantize it."
        )
    tokenizer = load_tokenizer(ref)
    folder = _local_folder(ref)
    check_weights(str(folder))
    tied = values.get("tie_word_embeddings") and "lm_head.weight"
    # Old files also store the RoPE table. A stored copy of tied weights is not read either.
    files = {
        name: path for name, path in weight_files(folder).items() if not name.endswith(".inv_freq") and name != tied
    }
    headers = {path: read_header(path) for path in set(files.values())}
    return _Side(
        ref=given,
        folder=folder,
        values=values,
        vocabulary=tokenizer.get_vocab(),
        sample=tokenizer(TEXT)["input_ids"],
        files=files,
        entries={name: headers[path][name] for name, path in files.items()},
    )


def _local_folder(ref: str) -> Path:
    """Return the folder of a model; a Hub id is downloaded into the Hub's cache."""
    found = Path(location(ref)["pretrained_model_name_or_path"])
    if found.is_dir():
        return found
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(ref, allow_patterns=["*.safetensors", INDEX, *_FILES]))
    except Exception as error:  # of three HTTP libraries without a common base class
        raise ConfigError(f"model {ref}: the download failed ({error}); try again.") from error


def _check_same(first: _Side, second: _Side) -> list[int]:
    """Refuse models that do not belong together; return the tokens that only the first one has."""
    pair = f"{first.ref} and {second.ref}"
    free = {*_ROPE, *_LENGTHS, *_FREE}
    for key in sorted({*first.values} & {*second.values} - free):
        if first.values[key] != second.values[key]:
            raise ConfigError(
                f"merge: {pair} have different architectures: {key} is {first.values[key]!r} and "
                f"{second.values[key]!r}; give models that were trained from the same base."
            )
    differing = {*first.entries} ^ {*second.entries}
    if differing:
        name = min(differing)
        side = first if name in first.entries else second
        raise ConfigError(
            f"merge: {len(differing)} tensors are in only one of {pair}, such as {name} in {side.ref}; give models "
            "that were trained from the same base."
        )
    other = [token for token, number in second.vocabulary.items() if first.vocabulary.get(token) != number]
    if other or first.sample != second.sample:
        what = f", such as for {min(other)!r}" if other else ""
        raise ConfigError(
            f"merge: the tokenizers of {pair} give other tokens{what}, so their embeddings cannot be averaged; give "
            "the model with added tokens first, or models with one tokenizer."
        )
    for name in first.entries:
        _check_tensor(name, first, second)
    return sorted({*first.vocabulary.values()} - {*second.vocabulary.values()})


def _check_tensor(name: str, first: _Side, second: _Side) -> None:
    ours, theirs = (side.entries[name]["shape"] for side in (first, second))
    longer = _has_token_rows(name) and ours[1:] == theirs[1:] and ours[:1] > theirs[:1]
    if ours != theirs and not longer:
        raise ConfigError(
            f"merge: {name} has shape {tuple(ours)} in {first.ref} and {tuple(theirs)} in {second.ref}; give models "
            "that were trained from the same base, the one with added tokens first."
        )
    for side in (first, second):
        if side.entries[name]["dtype"] not in TORCH_TYPES:
            raise ConfigError(f"merge: {name} of {side.ref} has type {side.entries[name]['dtype']}, which is not read.")


def _has_token_rows(name: str) -> bool:
    return any(part in name for part in _TOKEN_ROWS)


# Writing


def _publish(out_dir: Path, first: _Side, second: _Side, *, weight: float, own_tokens: list[int]) -> None:
    inputs = {"first": model_digest(str(first.folder)), "second": model_digest(str(second.folder))}
    with publish(out_dir, kind=MERGE_KIND, inputs=inputs, settings={"weight": weight}) as draft:
        try:
            _write(draft.folder, first, second, weight=weight, own_tokens=own_tokens)
            draft.counts = {"tensors": len(first.entries), "own_tokens": len(own_tokens)}
        except BaseException:
            remove(draft.folder)
            raise


def _write(folder: Path, first: _Side, second: _Side, *, weight: float, own_tokens: list[int]) -> None:
    for pattern in _FILES:
        for path in first.folder.glob(pattern):
            with naming(folder / path.name):
                shutil.copyfile(path, folder / path.name)
    shards: dict[Path, list[str]] = {}
    for name, path in first.files.items():
        shards.setdefault(path, []).append(name)
    began, total, done = time.monotonic(), len(first.files), 0
    with long_bar("merge", total) as advance:
        for path, names in shards.items():
            with ExitStack() as stack:
                opened = _Opened(stack, first, second)

                def averaged(name: str, opened: "_Opened" = opened) -> Tensor:
                    nonlocal done
                    found = average(*opened.pair(name), weight, own_tokens if _has_token_rows(name) else [])
                    if found.is_floating_point() and not found.isfinite().all():
                        raise ConfigError(
                            f"merge: the average of {name} is not finite; check the weights of both models."
                        )
                    done += 1
                    advance(1, f"eta {format_duration((time.monotonic() - began) / done * (total - done))}")
                    return found

                write_streamed(_shard(folder / path.name, names, first), averaged)
    if len(shards) > 1 or (first.folder / INDEX).is_file():
        _write_index(folder / INDEX, shards)


class _Opened:
    """The open weight files of both models."""

    def __init__(self, stack: ExitStack, first: _Side, second: _Side) -> None:
        self._stack, self._sides = stack, (first, second)
        self._files: dict[Path, Any] = {}

    def pair(self, name: str) -> tuple[Tensor, Tensor]:
        found = [self._open(side.files[name]).get_tensor(name) for side in self._sides]
        return found[0], found[1]

    def _open(self, path: Path) -> Any:
        if path not in self._files:
            self._files[path] = self._stack.enter_context(safe_open(path, framework="pt"))
        return self._files[path]


def average(first: Tensor, second: Tensor, weight: float, own_rows: list[int]) -> Tensor:
    """Return `weight` × first + (1 − `weight`) × second in the type of `first`, computed in fp32.

    `own_rows`, and rows that only `first` has, are copied from it. A weight of 1 or 0 copies the values of one side.
    """
    if weight == 1 or not first.is_floating_point():
        return first
    shared = first[: len(second)] if first.dim() else first
    if weight == 0:
        mixed = second.to(first.dtype)
    else:
        wide = torch.float64 if first.dtype == torch.float64 else torch.float32
        mixed = shared.to(wide).mul_(weight) if shared.dtype != wide else shared * weight
        mixed = mixed.add_(second.to(wide), alpha=1 - weight).to(first.dtype)
    if len(mixed.shape) and (len(mixed) < len(first) or own_rows):
        mixed = torch.cat((mixed, first[len(mixed) :]))
        rows = torch.tensor([row for row in own_rows if row < len(first)], dtype=torch.int64)
        mixed[rows] = first[rows]
    return mixed


def _shard(path: Path, names: list[str], side: _Side) -> TensorFile:
    """A file whose tensors have shapes and types but no values yet."""
    shapes = {name: (side.entries[name]["shape"], TORCH_TYPES[side.entries[name]["dtype"]]) for name in names}
    empty = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in shapes.items()}
    return TensorFile(path, empty, {"format": "pt"})


def _write_index(path: Path, shards: dict[Path, list[str]]) -> None:
    by_name = {name: shard.name for shard, names in shards.items() for name in names}
    size = sum(_data_bytes(path.parent / shard.name) for shard in shards)
    content = {"metadata": {"total_size": size}, "weight_map": by_name}
    with naming(path):
        path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _data_bytes(path: Path) -> int:
    with path.open("rb") as file:
        return path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")
