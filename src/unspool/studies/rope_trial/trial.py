"""`unspool.try_rope`: try RoPE methods on a model and a text, without training or after a short one."""

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unspool.core.artifacts import digest
from unspool.core.errors import BusyError, ConfigError, DataError, UnspoolError
from unspool.core.formatting import format_duration
from unspool.core.lock import lock_output
from unspool.core.progress import progress_bar
from unspool.core.sizes import format_count, format_size, parse_size
from unspool.evals.backends.base import BackendOptions, RopeOverride
from unspool.models.config import config_values
from unspool.models.location import model_path, path_exists, short_name
from unspool.rope.tables import RopeMethod, RopeShape, shape_of
from unspool.studies.rope_trial.candidates import (
    Candidate,
    default_candidates,
    left_out,
    read_candidates,
    refusal,
)
from unspool.studies.rope_trial.losses import file_name, measure, read_losses
from unspool.studies.rope_trial.ranking import range_edges, rank
from unspool.studies.rope_trial.result import RopeTrial
from unspool.studies.rope_trial.training import TrialTraining, bundled_text
from unspool.studies.rope_trial.windows import (
    MIN_WINDOWS,
    Windows,
    draw_windows,
    files_of,
    text_path,
    write_rest,
)

logger = logging.getLogger(__name__)

WINDOWS = 8
LOSSES, TRAINING, RESULT = "losses", "training", "trial.json"
REST = "text.jsonl"  # documents to train on
UNCHANGED = "unchanged"


def try_rope(
    model: str | Path,
    context_length: int | str,
    candidates: Sequence[str | RopeMethod] = (),
    *,
    tokens: int | str | None = None,
    text: str | Path | None = None,
    train_text: str | Path | None = None,
    windows: int = WINDOWS,
    stage_settings: Mapping[str, Any] | None = None,
    seed: int = 0,
    device: str = "auto",
    out: str | Path | None = None,
) -> RopeTrial:
    """Try RoPE methods on a model and a text, and rank them by the loss beyond the model's context.

    All methods read the same windows of text, each within one document. By default nothing is trained. With `tokens`,
    each method is first trained for that many tokens, on the same rows in the same order. Everything that is measured
    is kept in `out`, so an interrupted trial continues, and a repeated one measures only what is new.

    Args:
        model: A model folder, a run or one of its stages, a `.gguf` file, a Hub id, or `asset:tiny-base`.
        context_length: Context length to extend to, such as `"64K"`.
        candidates: Methods, such as `YaRN()`, `"yarn"` or `"abf:base=8e6"`. `"default"` stands for the default ones:
            unchanged, ntk, abf at two bases, pi, yarn, llama3, cope and harpe.
        tokens: Tokens to train each method for, such as `"2M"`. By default nothing is trained.
        text: Files or a pattern, JSONL or plain text, with long documents. By default two bundled books.
        train_text: Files to train on. By default the documents of `text` that no window is from, or bundled books.
        windows: Number of windows, at least 2.
        stage_settings: Further keys of the training stage, such as `{"lr": 1e-4}`.
        seed: Seed of the windows and of the training.
        device: `auto`, `cpu` or `cuda`.
        out: Folder for the results, `runs/rope-MODEL-CONTEXT` by default.

    Returns:
        The ranking: print it, `save` it as JSON, or take `to_dict()`, `best`, `ties` and `lines`.

    Raises:
        ConfigError: An argument is wrong, or no candidate fits the model.
        DataError: The text is too short for so many windows.

    Example:
        >>> import tempfile, unspool
        >>> methods = ["unchanged", unspool.NTK()]
        >>> trial = unspool.try_rope("asset:tiny-base", "512", methods, windows=2, out=tempfile.mkdtemp())
        >>> [one.label for one in trial.ranked]
        ['ntk', 'unchanged']
    """
    request = _check(model, context_length, tokens=tokens, windows=windows)
    chosen, skipped = _choose(request, candidates)
    folder = Path(out) if out is not None else request.default_folder()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; give another folder as `out`.")
    text, train_text = text_path(None if text is None else str(text)), None if train_text is None else str(train_text)
    with lock_output(folder):
        training = _training(request, text, train_text, folder, settings=stage_settings or {}, seed=seed, device=device)
        stage = None if training is None else training.check(chosen[0]).model_dump(mode="json")
        found = _read_text(request, text, training, train_text, seed=seed)
        trial = _Trial(request=request, windows=found, training=training, folder=folder, device=device, skipped=skipped)
        trial.measure(chosen)
        result = trial.result(chosen, text=text, stage=stage)
        result.save(folder / RESULT)
    return result


@dataclass(frozen=True, kw_only=True)
class _Request:
    """The checked arguments that most steps need."""

    model: str  # path or Hub id
    rope: RopeShape
    context_len: int
    tokens: int | None
    num_windows: int

    @property
    def old_len(self) -> int:
        return self.rope.max_positions

    def default_folder(self) -> Path:
        name = short_name(self.model).replace("/", "-")
        return Path("runs") / f"rope-{name}-{format_size(self.context_len)}"


def _check(model: str | Path, context: int | str, *, tokens: int | str | None, windows: int) -> _Request:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("a trial of RoPE methods runs in one process; start it without torchrun.")
    context_len = _size(context, "context_length")
    num_tokens = None if tokens is None else _size(tokens, "tokens")
    if windows < MIN_WINDOWS:
        raise ConfigError(f"`windows={windows}`: differences need at least {MIN_WINDOWS} windows; give more.")
    path = model_path(str(model), Path())
    rope = shape_of(config_values(path))
    if context_len <= rope.max_positions:
        raise ConfigError(
            f"`context_length={str(context)!r}`: the model's context is {format_size(rope.max_positions)} already; "
            "give a longer one."
        )
    return _Request(model=path, rope=rope, context_len=context_len, tokens=num_tokens, num_windows=windows)


def _size(value: int | str, name: str) -> int:
    try:
        return parse_size(value)
    except ValueError as error:
        raise ConfigError(f"`{name}={str(value)!r}`: {error}.") from None


def _choose(request: _Request, given: Sequence[str | RopeMethod]) -> tuple[list[Candidate], dict[str, str]]:
    """Return the candidates that may fit the model, and why the others are skipped."""
    rope, context_len = request.rope, request.context_len

    def defaults() -> list[Candidate]:
        with progress_bar("RoPE bases tried", None) as advance:
            return default_candidates(rope, context_len, advance=lambda done: advance(done))

    found, with_defaults = read_candidates(given, defaults)
    skipped = dict.fromkeys(left_out(found) if with_defaults else (), "no settings for this model")
    if "harpe" in skipped and rope.num_kv_heads == 1:
        skipped["harpe"] = "this model has a single KV head, so only one base"
    for candidate in found:
        reason = refusal(candidate, rope, context_len, trained=request.tokens is not None)
        if reason is not None:
            skipped[candidate.label] = reason
    chosen = [candidate for candidate in found if candidate.label not in skipped]
    if not chosen:
        raise ConfigError(_no_candidate(skipped))
    return chosen, skipped


def _no_candidate(skipped: Mapping[str, str]) -> str:
    label, reason = next(iter(skipped.items()))
    return f"no candidate fits this model: {label}: {reason.rstrip('.')}; give other `candidates`."


def _training(
    request: _Request,
    text: str | None,
    train_text: str | None,
    folder: Path,
    *,
    settings: Mapping[str, Any],
    seed: int,
    device: str,
) -> TrialTraining | None:
    if request.tokens is None:
        for name, value in (("train_text", train_text), ("stage_settings", settings)):
            if value:
                raise ConfigError(f"`{name}` works only with `tokens`, which trains the candidates; give it too.")
        return None
    work = (folder / TRAINING).absolute()
    source = str(work / REST)
    if train_text is not None:
        source = _absolute(text_path(train_text) or "")
        files_of(source)  # refuses a path without files
    elif text is None:
        source = bundled_text()
    return TrialTraining(
        model=_absolute(request.model),
        context_len=request.context_len,
        tokens=request.tokens,
        text=source,
        settings=settings,
        seed=seed,
        device=device,
        folder=work,
    )


def _absolute(path: str) -> str:
    """Recipes look up relative paths next to themselves first."""
    return str(Path(path).absolute()) if path_exists(path) else path


def _read_text(
    request: _Request, text: str | None, training: TrialTraining | None, train_text: str | None, *, seed: int
) -> Windows:
    """Draw the windows, and write the rest of the text if it is to be trained on."""
    from unspool.models.tokenizer import load_tokenizer  # import late: it loads transformers

    tokenizer = load_tokenizer(request.model)
    windows = draw_windows(text, tokenizer, length=request.context_len, count=request.num_windows, seed=seed)
    if training is None:
        return windows
    if train_text is None and text is not None:
        write_rest(text, windows, Path(training.text), tokens=training.tokens)
    elif train_text is not None and text is not None:
        both = set(files_of(text).values()) & set(files_of(training.text).values())
        if both:
            raise ConfigError(
                "`train_text` has a file of `text`, so the windows would be trained on; leave out `train_text`, which "
                "trains on the documents without windows, or give other files."
            )
    return windows


@dataclass(kw_only=True)
class _Trial:
    """A trial in its folder."""

    request: _Request
    windows: Windows
    training: TrialTraining | None
    folder: Path
    device: str
    skipped: dict[str, str]
    edges: list[int] = field(init=False)
    names: dict[str, str] = field(default_factory=dict)  # by label: name of a candidate's files

    def __post_init__(self) -> None:
        self.edges = range_edges(self.request.old_len, self.request.context_len)

    def measure(self, chosen: Sequence[Candidate]) -> None:
        """Measure every candidate that is not measured yet."""
        self._name(chosen)
        waiting = [candidate for candidate in chosen if len(self._stored(candidate)) < len(self.windows)]
        self._announce(len(chosen), len(chosen) - len(waiting))
        began = time.monotonic()
        for at, candidate in enumerate(waiting):
            left = (time.monotonic() - began) / at * (len(waiting) - at) if at else 0
            eta = f", about {format_duration(left)} left" if at else ""
            logger.info(f"[{at + 1}/{len(waiting)}] {candidate.label}{eta}")
            try:
                reason = self._measure(candidate)
            except (KeyboardInterrupt, SystemExit):  # a stage ends in SystemExit, after it has saved a checkpoint
                done = len(chosen) - len(waiting) + at
                logger.warning(
                    f"interrupted; {done} of {len(chosen)} candidates are measured in {self.folder}; run the same "
                    "command again to continue"
                )
                raise
            if reason is None:
                (one,) = rank({candidate.label: self._stored(candidate)}, self.edges)
                logger.info(f"{candidate.label}: loss {one.beyond:.3f} beyond {format_size(self.request.old_len)}")
            else:
                self.skipped[candidate.label] = reason
                logger.warning(f"skipping {candidate.label}: {reason}")

    def result(self, chosen: Sequence[Candidate], *, text: str | None, stage: Mapping[str, Any] | None) -> RopeTrial:
        measured = {each.label: self._stored(each) for each in chosen if each.label not in self.skipped}
        if not measured:
            raise ConfigError(_no_candidate(self.skipped))
        return RopeTrial(
            model=short_name(self.request.model),
            old_len=self.request.old_len,
            context_len=self.request.context_len,
            ranked=rank(measured, self.edges, reference=UNCHANGED),
            candidates={each.label: each for each in chosen},
            skipped=self.skipped,
            edges=self.edges,
            text=text,
            num_documents=len(self.windows.documents),
            stage=stage,
            folder=self.folder,
        )

    def _announce(self, count: int, done: int) -> None:
        request = self.request
        logger.info(
            f"{short_name(request.model)} from {format_size(request.old_len)} to {format_size(request.context_len)}: "
            f"{count} candidates, {len(self.windows)} windows of {format_size(request.context_len)} tokens"
            + (f"; {done} candidates were measured before" if done else "")
        )
        if self.training is not None:
            stage = self.training.stage()
            batch = parse_size(stage["batch_tokens"])
            logger.info(
                f"training each candidate: {self.training.tokens // batch} steps of {format_count(batch)} tokens, lr "
                f"{float(stage['lr']):g} (`stage_settings` changes it)"
            )

    def _name(self, chosen: Sequence[Candidate]) -> None:
        from unspool.models.extend import pick_device  # import late: it loads torch
        from unspool.models.weight_files import model_digest

        shared = {
            "model": model_digest(self.request.model),
            "context": self.request.context_len,
            "edges": self.edges,
            "device": pick_device(self.device).type,
            "training": None if self.training is None else self._training_facts(self.training),
        }
        for each in chosen:
            key = digest({**shared, "rope": each.method.model_dump(mode="json")})
            self.names[each.label] = file_name(each.label, key)

    def _training_facts(self, training: TrialTraining) -> dict[str, Any]:
        return {"stage": training.stage(), "seed": training.seed, "text": sorted(files_of(training.text).values())}

    def _stored(self, candidate: Candidate) -> dict[str, tuple[float, ...]]:
        return read_losses(self._path(candidate), self.windows)

    def _path(self, candidate: Candidate) -> Path:
        return self.folder / LOSSES / f"{self.names[candidate.label]}.jsonl"

    def _measure(self, candidate: Candidate) -> str | None:
        """Train the candidate if wanted, and measure it; return why it is skipped."""
        from unspool.models.extend import pick_device, pick_dtype

        request, name = self.request, self.names[candidate.label]
        model, override = request.model, RopeOverride(rope=candidate.method, context_length=request.context_len)
        device = pick_device(self.device)
        options = BackendOptions(model=model, rope=override, device=device, dtype=pick_dtype(None, device))
        try:
            if self.training is not None:
                options = replace(options, model=str(self.training.train(candidate, name)), rope=None)
            measure(options, self.windows, self.edges, self._path(candidate), label=candidate.label)
        except UnspoolError as error:
            if isinstance(error, BusyError | DataError) or isinstance(error.__cause__, OSError):
                raise  # would stop the other candidates too
            reason = str(error).partition("; ")[0]
        else:
            reason = None
        if self.training is not None:
            self.training.forget(name)
        return reason
