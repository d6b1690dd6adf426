"""`unspool.try_rope`: try RoPE methods on a model and a text, without training or after a short one."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unspool.core.artifacts import digest
from unspool.core.errors import BusyError, ConfigError, DataError, UnspoolError
from unspool.core.formatting import format_duration
from unspool.core.lock import lock_output
from unspool.core.sizes import format_count, format_size, parse_size
from unspool.evals.backends.base import BackendOptions, RopeOverride
from unspool.models.location import short_name
from unspool.rope.tables import RopeMethod
from unspool.studies.rope_trial.candidates import Candidate
from unspool.studies.rope_trial.losses import file_name, measure, read_losses
from unspool.studies.rope_trial.ranking import range_edges, rank
from unspool.studies.rope_trial.request import (
    LOSSES,
    RESULT,
    WINDOWS,
    Request,
    build_training,
    check_request,
    choose_candidates,
    no_candidate,
    read_text,
)
from unspool.studies.rope_trial.result import RopeTrial
from unspool.studies.rope_trial.training import TrialTraining
from unspool.studies.rope_trial.windows import Windows, files_of

logger = logging.getLogger(__name__)

UNCHANGED = "unchanged"


def try_rope(
    model: str | Path,
    context_length: int | str,
    candidates: str | RopeMethod | Sequence[str | RopeMethod] = (),
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
    request = check_request(
        Request(
            model=str(model),
            context=context_length,
            tokens=tokens,
            text=None if text is None else str(text),
            train_text=None if train_text is None else str(train_text),
            windows=windows,
            settings=dict(stage_settings or {}),
            seed=seed,
            device=device,
            out=out,
        )
    )
    chosen, skipped = choose_candidates(request, candidates)
    with lock_output(request.folder):
        training = build_training(request)
        stage = None if training is None else training.check(chosen[0]).model_dump(mode="json")
        found = read_text(request, training)
        trial = _Trial(request=request, windows=found, training=training, skipped=skipped)
        trial.measure(chosen)
        result = trial.result(chosen, stage=stage)
        result.save(request.folder / RESULT)
    return result


@dataclass(kw_only=True)
class _Trial:
    """A trial in its folder."""

    request: Request
    windows: Windows
    training: TrialTraining | None
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
                    f"interrupted; {done} of {len(chosen)} candidates are measured in {self.request.folder}; run the "
                    "same command again to continue"
                )
                raise
            if reason is None:
                (one,) = rank({candidate.label: self._stored(candidate)}, self.edges)
                logger.info(f"{candidate.label}: loss {one.beyond:.3f} beyond {format_size(self.request.old_len)}")
            else:
                self.skipped[candidate.label] = reason
                logger.warning(f"skipping {candidate.label}: {reason}")

    def result(self, chosen: Sequence[Candidate], *, stage: Mapping[str, Any] | None) -> RopeTrial:
        measured = {each.label: self._stored(each) for each in chosen if each.label not in self.skipped}
        if not measured:
            raise ConfigError(no_candidate(self.skipped))
        return RopeTrial(
            model=short_name(self.request.model),
            old_len=self.request.old_len,
            context_len=self.request.context_len,
            ranked=rank(
                measured,
                self.edges,
                reference=UNCHANGED,
                documents=dict(zip(self.windows.names, self.windows.documents, strict=True)),
            ),
            candidates={each.label: each for each in chosen},
            skipped=self.skipped,
            edges=self.edges,
            text=self.request.text,
            num_documents=len(set(self.windows.documents)),
            stage=stage,
            folder=self.request.folder,
        )

    def _announce(self, count: int, done: int) -> None:
        request = self.request
        logger.info(
            f"{short_name(request.model)} from {format_size(request.old_len)} to {format_size(request.context_len)}: "
            f"{count} candidate{'s' * (count != 1)}, {len(self.windows)} windows of "
            f"{format_size(request.context_len)} tokens" + (f"; {done} measured before" if done else "")
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
            "device": pick_device(self.request.device).type,
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
        return self.request.folder / LOSSES / f"{self.names[candidate.label]}.jsonl"

    def _measure(self, candidate: Candidate) -> str | None:
        """Train the candidate if wanted, and measure it; return why it is skipped."""
        from unspool.models.extend import pick_device, pick_dtype

        request, name = self.request, self.names[candidate.label]
        reason: str | None = None
        model, override = request.model, RopeOverride(rope=candidate.method, context_length=request.context_len)
        device = pick_device(self.request.device)
        options = BackendOptions(model=model, rope=override, device=device, dtype=pick_dtype(None, device))
        try:
            if self.training is not None:
                options = replace(options, model=str(self.training.train(candidate, name)), rope=None)
            measure(options, self.windows, self.edges, self._path(candidate), label=candidate.label)
        except UnspoolError as error:
            if isinstance(error, BusyError | DataError) or isinstance(error.__cause__, OSError):
                raise  # would stop the other candidates too
            reason = str(error).partition("; ")[0]
        if self.training is not None:
            self.training.forget(name)
        return reason
