"""Check the arguments of a trial, and choose its candidates, its text and its training, before any work."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any

from unspool.core.errors import ConfigError
from unspool.core.progress import progress_bar
from unspool.core.sizes import format_size, parse_size
from unspool.evals.heldout import check_text
from unspool.models.config import config_values
from unspool.models.location import model_path, path_exists, resolve_path, short_name
from unspool.models.weight_files import check_weights
from unspool.rope.tables import RopeMethod, RopeShape, shape_of
from unspool.studies.rope_trial.candidates import (
    Candidate,
    default_candidates,
    left_out,
    read_candidates,
    refusal,
)
from unspool.studies.rope_trial.training import TrialTraining, bundled_text
from unspool.studies.rope_trial.windows import MIN_WINDOWS, Windows, draw_windows, files_of, write_rest

WINDOWS = 8
LOSSES, RESULT, TRAINING = "losses", "trial.json", "training"
REST = "text.jsonl"  # documents to train on


@dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments of `try_rope`, except the candidates."""

    model: str
    context: int | str
    tokens: int | str | None
    text: str | None
    train_text: str | None
    windows: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    seed: int
    device: str
    out: str | Path | None

    @cached_property
    def context_len(self) -> int:
        return _size(self.context, "context_length")

    @cached_property
    def num_tokens(self) -> int | None:
        return None if self.tokens is None else _size(self.tokens, "tokens")

    @cached_property
    def rope(self) -> RopeShape:
        return shape_of(config_values(self.model))

    @property
    def old_len(self) -> int:
        return self.rope.max_positions

    @property
    def folder(self) -> Path:
        name = short_name(self.model).replace("/", "-")
        default = Path("runs") / f"rope-{name}-{format_size(self.context_len)}"
        return default if self.out is None else Path(self.out)


def check_request(given: Request) -> Request:
    """Return the request with its paths resolved; ConfigError if an argument is wrong."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("a trial of RoPE methods runs in one process; start it without torchrun.")
    if not isinstance(given.windows, Integral) or given.windows < MIN_WINDOWS:
        raise ConfigError(f"`windows={given.windows}`: write a whole number of at least {MIN_WINDOWS}.")
    if not isinstance(given.seed, Integral) or given.seed < 0:
        raise ConfigError(f"`seed={given.seed}`: write a whole number of at least 0.")
    for name, path in (("text", given.text), ("train_text", given.train_text)):
        if path is not None and not path.strip():
            raise ConfigError(f"`{name}` is empty; give a file, a folder or a pattern, or leave it out.")
    for name, value in (("train_text", given.train_text), ("stage_settings", given.settings)):
        if value and given.num_tokens is None:
            raise ConfigError(f"`{name}` works only with `tokens`, which trains the candidates; give it too.")
    request = replace(
        given,
        model=model_path(given.model, Path()),
        text=None if given.text is None else resolve_path(given.text, Path()),
        train_text=None if given.train_text is None else resolve_path(given.train_text, Path()),
    )
    if request.context_len <= request.old_len:
        raise ConfigError(
            f"`context_length={str(request.context)!r}`: the model's context is {format_size(request.old_len)} "
            "already; give a longer one."
        )
    for name, path in (("text", request.text), ("train_text", request.train_text)):
        if path is not None:
            check_text(name, path)
    check_weights(request.model)
    _check_folder(request.folder)
    return request


def _check_folder(folder: Path) -> None:
    """Refuse a folder with other files than a trial's: a finished trial has its result, an interrupted one does not."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ConfigError(f"{folder} is a file; give another folder as `out`.")
    names = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    if not (RESULT in names or names <= {LOSSES, TRAINING}):
        raise ConfigError(f"{folder} exists and holds other files than a trial's; give a new folder as `out`.")


def _size(value: int | str, name: str) -> int:
    try:
        return parse_size(value)
    except ValueError as error:
        raise ConfigError(f"`{name}={str(value)!r}`: {error}.") from None


def choose_candidates(
    request: Request, given: str | RopeMethod | Sequence[str | RopeMethod]
) -> tuple[list[Candidate], dict[str, str]]:
    """Return the candidates that may fit the model, and why the others are skipped."""
    rope, context_len = request.rope, request.context_len

    def defaults() -> list[Candidate]:
        with progress_bar("RoPE bases tried", None) as advance:
            return default_candidates(rope, context_len, advance=lambda done: advance(done))

    several = [given] if isinstance(given, str | RopeMethod) else given
    found, with_defaults = read_candidates(several, defaults)
    skipped = dict.fromkeys(left_out(found) if with_defaults else (), "no settings for this model")
    if "harpe" in skipped and rope.num_kv_heads == 1:
        skipped["harpe"] = "this model has a single KV head, so only one base"
    for candidate in found:
        reason = refusal(candidate, rope, context_len, trained=request.tokens is not None)
        if reason is not None:
            skipped[candidate.label] = reason
    chosen = [candidate for candidate in found if candidate.label not in skipped]
    if not chosen:
        raise ConfigError(no_candidate(skipped))
    return chosen, skipped


def no_candidate(skipped: Mapping[str, str]) -> str:
    label, reason = next(iter(skipped.items()))
    return f"no candidate fits this model: {label}: {reason.rstrip('.')}; give other `candidates`."


def build_training(request: Request) -> TrialTraining | None:
    """Return what the training of the candidates has in common; None without one."""
    if request.num_tokens is None:
        return None
    work = (request.folder / TRAINING).absolute()
    source = str(work / REST)
    if request.train_text is not None:
        source = _absolute(request.train_text)
        files_of(source)  # refuses a path without files
    elif request.text is None:
        source = bundled_text()
    return TrialTraining(
        model=_absolute(request.model),
        context_len=request.context_len,
        tokens=request.num_tokens,
        text=source,
        settings=request.settings,
        seed=request.seed,
        device=request.device,
        folder=work,
    )


def _absolute(path: str) -> str:
    """Recipes look up relative paths next to themselves first."""
    return str(Path(path).absolute()) if path_exists(path) else path


def read_text(request: Request, training: TrialTraining | None) -> Windows:
    """Draw the windows, and write the rest of the text if it is to be trained on."""
    from unspool.models.tokenizer import load_tokenizer  # import late: it loads transformers

    text, tokenizer = request.text, load_tokenizer(request.model)
    if training is not None and text is not None and request.train_text is not None:
        _check_apart(text, training.text)
    windows = draw_windows(text, tokenizer, length=request.context_len, count=request.windows, seed=request.seed)
    if training is not None and text is not None and request.train_text is None:
        write_rest(text, windows, Path(training.text), tokens=training.tokens)
    return windows


def _check_apart(text: str, train_text: str) -> None:
    if set(files_of(text).values()) & set(files_of(train_text).values()):
        raise ConfigError(
            "`train_text` has a file of `text`, so the windows would be trained on; leave out `train_text`, which "
            "trains on the documents without windows, or give other files."
        )
