"""Export a model to a folder that plain `transformers` loads, and check that it computes the same logits there.

A `transformers` config cannot express a base per head. The folder of such a model has a model_type and an architecture
that no engine knows, so other engines fail instead of computing other positions. The folder also holds
modeling_harpe.py, which `transformers` runs with trust_remote_code=True.
"""

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import modeling_utils

from unspool.core.artifacts import write_atomic
from unspool.core.errors import UnspoolError
from unspool.models import modeling_harpe
from unspool.models.rotary import head_bases
from unspool.models.tensor_files import TensorFile, write_tensor_files
from unspool.rope.tables import STORES_ORIGINAL_LEN, global_parameters, old_fields, tables

HARPE_TYPE = modeling_harpe.MODEL_TYPE
# Larger models are split into several files, which are written in parallel.
SHARD_SIZE = "4GB"


def save_model(model: Any, tokenizer: Any, folder: Path, *, dtype: torch.dtype) -> None:
    """Write `model` and `tokenizer` to `folder` in `dtype`; the model itself does not change."""
    folder.mkdir(parents=True, exist_ok=True)
    with _collect_shards() as shards:
        model.save_pretrained(folder, state_dict=_converted(model, dtype), max_shard_size=SHARD_SIZE)
    write_tensor_files(shards)
    # The tokenizer would truncate texts to the original context length otherwise.
    tokenizer.model_max_length = max(tokenizer.model_max_length, model.config.max_position_embeddings)
    tokenizer.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    # `save_pretrained` writes the dtype of the model in memory, which engines would use for the file.
    config["dtype"] = str(dtype).removeprefix("torch.")
    bases = head_bases(model)
    if bases is not None:
        config |= _harpe_config(config, bases)
        shutil.copyfile(modeling_harpe.__file__, folder / Path(modeling_harpe.__file__).name)
    else:
        config = _add_old_fields(config)
    write_atomic(path, json.dumps(config, indent=2, sort_keys=True) + "\n")


@contextmanager
def _collect_shards() -> Iterator[list[TensorFile]]:
    """Inside the context, `save_pretrained` chooses names and shards, and the caller writes the files."""
    shards: list[TensorFile] = []

    def collect(tensors: dict[str, Tensor], path: str, metadata: dict[str, str]) -> None:
        shards.append(TensorFile(Path(path), tensors, metadata))

    write = modeling_utils.safe_save_file
    modeling_utils.safe_save_file = collect
    try:
        yield shards
    finally:
        modeling_utils.safe_save_file = write


def _harpe_config(plain: dict[str, Any], bases: Any) -> dict[str, Any]:
    file = Path(modeling_harpe.__file__).stem
    model, config = modeling_harpe.HarpeForCausalLM.__name__, modeling_harpe.HarpeConfig.__name__
    return {
        "model_type": HARPE_TYPE,
        "plain_type": plain["model_type"],
        "head_bases": bases,
        # Converters and engines may read only this name, so it must not be the plain architecture's.
        "architectures": [model],
        "auto_map": {"AutoConfig": f"{file}.{config}", "AutoModelForCausalLM": f"{file}.{model}"},
        # For transformers before v5, which must refuse it too.
        "rope_scaling": plain["rope_parameters"],
    }


def _add_old_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Add RoPE settings in the format of transformers before v5, if that format can express them."""
    parameters, max_positions = config.get("rope_parameters") or {}, config["max_position_embeddings"]
    fields = (old_fields(parameters, max_positions) if parameters else None) or {}
    scaling = fields.get("rope_scaling")
    if config["model_type"] == "phi3" and scaling:
        # Phi-3 before v5 allows three fields, and computes the attention factor from the two lengths. If that factor
        # differs, all fields are written, so that old versions refuse the config.
        three = {key: scaling[key] for key in ("type", "short_factor", "long_factor")}
        only = {key: value for key, value in parameters.items() if key not in ("factor", "attention_factor")}
        own = tables(only, 2 * len(three["short_factor"]), max_positions=max_positions)
        if math.isclose(own.attention_factor, scaling["attention_factor"], rel_tol=1e-9):
            fields["rope_scaling"] = three
    # Remove fields that an earlier export wrote for other settings.
    repeated = {"rope_theta", "rope_scaling"}
    if parameters and global_parameters(config)["rope_type"] not in STORES_ORIGINAL_LEN:
        repeated.add("original_max_position_embeddings")
    return {key: value for key, value in config.items() if key not in repeated} | fields


def _converted(model: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the weights in `dtype`; tied weights still share memory, so they are written once."""
    converted: dict[tuple[int, torch.Size], Tensor] = {}
    weights = {}
    for name, tensor in model.state_dict().items():
        key = tensor.data_ptr(), tensor.shape
        if key not in converted:
            converted[key] = tensor.to(dtype) if tensor.is_floating_point() else tensor
        weights[name] = converted[key]
    return weights


# Logits from plain `transformers`, in a process without Unspool


SCRIPT = Path(__file__).with_name("plain_logits.py")


class PlainError(RuntimeError):
    """The error message of plain `transformers`."""


class PlainProcess(AbstractContextManager["PlainProcess"]):
    """`with PlainProcess() as plain: plain.answers(build_request(…))`"""

    def __init__(self) -> None:
        self._scratch = tempfile.TemporaryDirectory()
        self._child: subprocess.Popen[str] | None = None

    def answers(self, request: dict[str, Any]) -> dict[str, Tensor]:
        child = self._started()
        assert child.stdin is not None and child.stdout is not None
        out = Path(self._scratch.name) / "answers.safetensors"
        line = ""
        try:
            child.stdin.write(json.dumps(request | {"out": str(out)}) + "\n")
            child.stdin.flush()
            line = child.stdout.readline()
        except BrokenPipeError:
            pass  # the process has exited, and its error is read below
        if not line:
            code, lines = child.wait(), self._errors.read_text().strip().splitlines()
            raise PlainError(lines[-1] if lines else f"exit code {code}")
        error = json.loads(line)["error"]
        if error:
            raise PlainError(error)
        return load_file(out)

    @property
    def _errors(self) -> Path:
        return Path(self._scratch.name) / "errors.txt"

    def _started(self) -> "subprocess.Popen[str]":
        if self._child is None:
            with self._errors.open("w") as errors:
                self._child = subprocess.Popen(
                    # -P: modules next to the script belong to Unspool and must not be importable as top-level modules.
                    [sys.executable, "-P", str(SCRIPT)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    cwd=self._scratch.name,
                    env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": f"{self._scratch.name}/modules"},
                )
        return self._child

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            # The process exits when its input is closed.
            self._child.communicate()
        self._scratch.cleanup()


def build_request(
    folder: Path, passes: list[dict[str, Any]], *, text: str | None, device: torch.device
) -> dict[str, Any]:
    """Return a request to plain_logits.py for `passes`. The folder's own code may run, because Unspool wrote it."""
    config = json.loads((folder / "config.json").read_text())
    return {
        "folder": str(folder.resolve()),
        "remote_code": "auto_map" in config,
        "device": device.type,
        "text": text,
        "passes": passes,
    }


# Comparing an exported folder with the model in memory


TEXT = "The river runs past the old mill; 1, 2, 3.\n\nBeyond it, nothing."
SHORT, LONG, FAR = 16, 512, 64
KEEP = 64
# Relative to the largest logit. Both sides compute in fp32, so they differ only in the order of sums.
TOLERANCE = 2e-4
# For logits in the exported dtype against fp32 logits: rounding in many layers.
ROUNDING = {torch.bfloat16: 0.25, torch.float16: 0.1}


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Tokens with their positions, and our logits for the last `keep` tokens."""

    name: str
    ids: list[int]
    positions: list[int]
    logits: Tensor
    tolerance: float = TOLERANCE
    dtype: str = "float32"
    cached: bool = False  # compute the last `keep` tokens in a second call, with a cache of the others

    @property
    def keep(self) -> int:
        return len(self.logits)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One comparison: the largest difference of logits, relative to the largest logit."""

    name: str
    tokens: int
    last_position: int
    dtype: str
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance  # False for NaN


def round_weights(model: Any, dtype: torch.dtype) -> None:
    """Round the weights to the values that a file of `dtype` stores."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(tensor.to(dtype))


@torch.inference_mode()
def our_passes(model: Any, dtype: torch.dtype) -> list[Pass]:
    """Compute the logits of a model in fp32 whose weights are rounded to `dtype`."""
    context = int(model.config.max_position_embeddings)
    num_long = min(LONG, context)
    # A few tokens, at distances up to the context length.
    spread = torch.linspace(0, context - 1, min(FAR, context)).long().tolist()
    short = _computed(model, "short", list(range(min(SHORT, context))))
    long = _computed(model, "long", list(range(num_long)))
    cached = Pass(name="cached", ids=long.ids, positions=long.positions, logits=long.logits[-SHORT // 2 :], cached=True)
    passes = [short, long, cached, _computed(model, "far", spread)]
    if dtype in ROUNDING:
        name, tolerance = str(dtype).removeprefix("torch."), ROUNDING[dtype]
        passes.append(Pass(**vars(short) | {"name": f"in {name}", "dtype": name, "tolerance": tolerance}))
    return passes


@torch.inference_mode()
def live_pass(model: Any) -> Callable[[torch.dtype], Pass]:
    """Compute the logits of a model in memory; return the pass to compare with an exported file of some dtype."""
    computed = _computed(model, "in memory", list(range(min(SHORT, int(model.config.max_position_embeddings)))))

    def compare(dtype: torch.dtype) -> Pass:
        rounding = max(ROUNDING.get(each, TOLERANCE) for each in (dtype, model.dtype))
        return replace(computed, tolerance=rounding)

    return compare


def _computed(model: Any, name: str, positions: list[int]) -> Pass:
    # Tokens spread over the vocabulary: the stride is prime.
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = [7919 * number % vocabulary for number in range(1, len(positions) + 1)]
    tokens, places = (torch.tensor([values], device=model.device) for values in (ids, positions))
    logits = model(input_ids=tokens, position_ids=places, use_cache=False).logits[0, -KEEP:]
    return Pass(name=name, ids=ids, positions=positions, logits=logits.float().cpu())


def check_folder(folder: Path, passes: list[Pass], tokenizer: Any, *, device: torch.device) -> list[Compared]:
    """Compare `passes` with the logits that a new process computes from `folder`; UnspoolError if they differ."""
    fields = ("name", "ids", "positions", "keep", "dtype", "cached")
    requested = [{name: getattr(one, name) for name in fields} for one in passes]
    try:
        answers = _run_plain(build_request(folder, requested, text=TEXT, device=device))
    except PlainError as error:
        raise UnspoolError(
            f"the export could not be loaded in plain transformers, so nothing was published: {error}"
        ) from error
    if answers["text"].tolist() != tokenizer(TEXT)["input_ids"]:
        raise UnspoolError(f"{folder}: loaded in plain transformers, the tokenizer gives other tokens.")
    compared = [
        Compared(
            name=one.name,
            tokens=len(one.ids),
            last_position=one.positions[-1],
            dtype=one.dtype,
            error=float((answers[one.name] - one.logits).abs().max() / one.logits.abs().max()),
            tolerance=one.tolerance,
        )
        for one in passes
    ]
    failed = [one for one in compared if not one.passed]
    if failed:
        errors = ", ".join(f"{one.name} {one.error:.2g} (at most {one.tolerance:g})" for one in failed)
        raise UnspoolError(
            f"the export is not the same model in plain transformers, so nothing was published: largest difference "
            f"of logits, relative to the largest logit: {errors}."
        )
    return compared


def _run_plain(request: dict[str, Any]) -> dict[str, Tensor]:
    with PlainProcess() as process:
        return process.answers(request)
