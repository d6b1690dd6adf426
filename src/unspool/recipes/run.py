"""A recipe, box by box: corpus and rows (prepare.py), stages, scores, report; each is skipped while it still matches.

Promise: safe to re-run and to kill; what is done is said, with the reason. On several ranks all of them train; every
other box is the leader's, while the others wait.
"""

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from unspool import __version__
from unspool.base.errors import ConfigError
from unspool.base.progress import console, say
from unspool.eval.plan import Plan, runnable
from unspool.eval.run import Scoring, score_model
from unspool.model.load import model_digest, original_context
from unspool.model.scratch import NewModel
from unspool.recipes.check import LoadedRecipe
from unspool.recipes.prepare import Preparation
from unspool.report.gather import gather
from unspool.report.headline import headline
from unspool.report.render import write_report
from unspool.train.config import StageConfig
from unspool.train.handover import OPTIMIZER
from unspool.train.layout import check_fit
from unspool.train.ranks import Ranks
from unspool.train.refit import check_refit
from unspool.train.stage import StageInputs, run_stage, stage_reason
from unspool.train.team import from_leader, one_rank

BASE = "base"
REPORT = "report.html"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a person wants to see when a run is over."""

    report: Path
    headline: list[str]


class Run(Preparation):
    """The boxes of one recipe. Building one checks everything that can be checked without work."""

    def __init__(self, loaded: LoadedRecipe, ranks: Ranks | None = None) -> None:
        """`ranks`: those of the job, of which this process is one; without them it is alone."""
        self.ranks = ranks or one_rank(pick_device(loaded.recipe.device))
        self.device = self.ranks.device
        if not self.ranks.is_leader:
            console.quiet = True  # what is said is said once
        self._fresh: set[str] = set()  # stages that are known to be as the recipe has them
        super().__init__(loaded)

    def _facts(self) -> dict[str, Any]:
        return {
            "original_context": self._original_context(),
            "base_model": str(self.recipe.model),
            "versions": versions(),
        }

    def _begin(self, facts: dict[str, Any]) -> None:
        self._check_layouts()
        from_leader(self.ranks, lambda: super(Run, self)._begin(facts))

    def _note(self, **notes: Any) -> None:
        if self.ranks.is_leader:
            super()._note(**notes)

    def corpora(self) -> dict[str, dict[str, Any]]:
        return from_leader(self.ranks, super().corpora)

    def rows(self) -> dict[str, dict[str, Any]]:
        return from_leader(self.ranks, super().rows)

    def everything(self) -> Outcome:
        count = len(self.recipe.stages)
        say(f"{self.recipe.name}: {count} stage{'s' * (count != 1)} on {self.device.type}, into {self.out}")
        from_leader(self.ranks, self._check_evals)
        self.corpora()
        self.rows()
        self.score(BASE)
        for stage in self.recipe.stages:
            self.train(stage)
            self.score(stage.name)
        return self.report()

    def train(self, stage: StageConfig) -> None:
        """Train one stage; the one it starts from must be there as the recipe has it now."""
        earlier = self._earlier(stage)
        if earlier is not None and earlier.name not in self._fresh:
            self._check_fresh(earlier, needed_by=stage)
        with self._timed(f"stages/{stage.name}"):
            run_stage(
                stage,
                self._inputs(stage),
                self._stage_dir(stage.name),
                seed=self.recipe.seed,
                device=self.device,
                ranks=self.ranks,
            )
        self._fresh.add(stage.name)

    def score(self, name: str) -> None:
        """Score the untouched model (`base`) or a finished stage; a new model has nothing before it."""
        from_leader(self.ranks, lambda: self._score(name))

    def _score(self, name: str) -> None:
        ref = self.model if name == BASE else str(self._stage_dir(name) / "model")
        if not self.recipe.evals or isinstance(ref, NewModel):
            return
        scoring = Scoring(
            model=name,
            model_hash=model_digest(ref),
            evals=self.loaded.evals(),
            seed=self.recipe.seed,
            out_dir=self.out / "scores" / name,
            root=Path(),
        )
        with self._timed(f"scores/{name}"):
            self._scores(ref, scoring)

    def _scores(self, ref: str, scoring: Scoring) -> None:
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        score_model(ref, scoring, device=self.device, dtype=dtype)

    def report(self) -> Outcome:
        def write() -> list[str]:
            write_report([self.out], self.out / REPORT)
            return headline(gather(self.out))

        return Outcome(report=self.out / REPORT, headline=from_leader(self.ranks, write))

    def _check_layouts(self) -> None:
        """Find a stage that does not fit the ranks of this job before anything is made for it."""
        for stage in self.recipe.stages:
            check_fit(stage, self.model, {}, world_size=self.ranks.world_size)
            row_lens = {name: self.recipe.rows[name].length for name in stage.refit.shares} if stage.refit else {}
            start = self.model if self._earlier(stage) is None else None
            check_refit(stage, start, row_lens, world_size=self.ranks.world_size)

    def _check_evals(self) -> None:
        """Find a suite that cannot work (too short a text or length) now, not after hours of training."""
        evals = runnable(self.loaded.evals())
        Plan(evals, self.tokenizer, seed=self.recipe.seed, root=Path()).check()

    def _original_context(self) -> int:
        return original_context(self.model) if isinstance(self.model, str) else self.model.context

    def _earlier(self, stage: StageConfig) -> StageConfig | None:
        """The stage that `stage` starts from; None if it starts from the recipe's model."""
        names = [other.name for other in self.recipe.stages]
        index = names.index(stage.name)
        start = stage.start
        if start == "previous":
            start = names[index - 1] if index else "model"
        return None if start == "model" else self.recipe.stages[names.index(start)]

    def _inputs(self, stage: StageConfig) -> StageInputs:
        earlier = self._earlier(stage)
        rows = self.out / "rows"
        folder = None if earlier is None else self._stage_dir(earlier.name)
        return StageInputs(
            model=self.model if folder is None else str(folder / "model"),
            rows={name: rows / name for name in stage.mix},
            moments=folder and folder / OPTIMIZER,
            validation=rows / stage.validation.rows if stage.validation else None,
            refit={name: rows / name for name in stage.refit.shares} if stage.refit else {},
        )

    def _check_fresh(self, stage: StageConfig, *, needed_by: StageConfig) -> None:
        """Refuse to go on from weights that the recipe no longer describes. Training them again is not ours to begin:
        it may take days."""
        folder = self._stage_dir(stage.name)
        if not folder.is_dir():
            raise ConfigError(
                f"stage {needed_by.name} starts from stage {stage.name}, which is not trained yet; train it first."
            )
        earlier = self._earlier(stage)
        if earlier is not None and earlier.name not in self._fresh:
            self._check_fresh(earlier, needed_by=stage)
        reason = from_leader(
            self.ranks,
            lambda: stage_reason(stage, self._inputs(stage), folder, seed=self.recipe.seed, device=self.device),
        )
        if reason is not None:
            raise ConfigError(
                f"stage {needed_by.name} starts from stage {stage.name}, which is not what the recipe says now "
                f"({reason}); train it first: --stage {stage.name}, or no --stage for all stages in order."
            )
        self._fresh.add(stage.name)

    def _stage_dir(self, name: str) -> Path:
        return self.out / "stages" / name


def pick_device(wanted: str) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda is not available here; use auto or cpu.")
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


def versions() -> dict[str, str]:
    """What a result depends on besides the recipe."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {
        "unspool": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": device,
    }
