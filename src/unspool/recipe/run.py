"""A recipe, box by box: corpus and rows (prepare.py), stages, scores, report; each is skipped while it still matches.

Promise: safe to re-run and to kill; what is done is said, with the reason. On several ranks all of them train; every
other box is the leader's, while the others wait.
"""

import json
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from unspool import __version__
from unspool.core.artifacts import MANIFEST, write_atomic
from unspool.core.errors import ConfigError
from unspool.core.progress import console, say
from unspool.data.corpus.build import build_corpus
from unspool.data.corpus.executors import check_engine
from unspool.data.packing.build import build_rows
from unspool.data.packing.config import DatasetConfig
from unspool.data.sources.config import RecallSource, Source, SyntheticSource
from unspool.evals.contexts import Plan, runnable
from unspool.evals.run import Scoring, score_model
from unspool.models.load import model_digest, original_context
from unspool.models.presets import NewModel
from unspool.models.tokenizer import load_tokenizer
from unspool.recipe.load import LoadedRecipe, check_inputs
from unspool.recipe.schema import dump_recipe
from unspool.reporting.comparisons import headline
from unspool.reporting.gather import gather
from unspool.reporting.page import write_report
from unspool.training.checkpoint.resume import OPTIMIZER
from unspool.training.config import StageConfig
from unspool.training.distill.distill import check_distillation
from unspool.training.parallel.apply import check_fit
from unspool.training.parallel.mesh import from_leader, single_rank
from unspool.training.parallel.ranks import Ranks
from unspool.training.stage import StageInputs, run_stage, stage_reason

# The boxes of a recipe that need no model: corpora and rows.


class Preparation:
    """Corpora and rows of one recipe. Building one checks everything that can be checked without work."""

    def __init__(self, loaded: LoadedRecipe) -> None:
        check_inputs(loaded)
        check_engine(loaded.recipe.engine)
        self.loaded = loaded
        self.recipe = loaded.recipe
        self.out = self.recipe.out
        self.model = self._model()
        self.tokenizer = load_tokenizer(self.model if isinstance(self.model, str) else self.model.tokenizer)
        # Nothing is written before everything is checked.
        self._begin(self._facts())

    def _facts(self) -> dict[str, Any]:
        """What is worth noting about this run from the start."""
        return {}

    def _begin(self, facts: dict[str, Any]) -> None:
        """The folder of the run, with what is known of it already."""
        self.out.mkdir(parents=True, exist_ok=True)
        write_atomic(self.out / "recipe.yaml", dump_recipe(self.recipe))
        self._note(**facts)

    def corpora(self) -> dict[str, dict[str, Any]]:
        """Tokenised documents of every source that some rows use; returns their counts."""
        counts = {}
        used = {source for config in self.recipe.datasets.values() for source in config.shares}
        self._generate(self.loaded.generated(used))
        for name in (name for name in self.recipe.sources if name in used):
            with self._timed(f"corpus/{name}"):
                counts[name] = self._corpus(name, self.out / "corpus" / name)
        return counts

    def _generate(self, sets: list[str]) -> None:
        """Conversations that sources of this recipe read, and that it makes itself."""
        if not sets:
            return
        # Only here: it loads torch.
        from unspool.recipe.synthesize import Synthesis

        generation = Synthesis(self.loaded, sets)
        generation.corpora()
        generation.make()

    def _corpus(self, name: str, folder: Path) -> dict[str, Any]:
        return build_corpus(
            self._resolved(self.recipe.sources[name]),
            folder,
            tokenizer=self.tokenizer,
            root=Path(),
            engine=self.recipe.engine,
            seed=self.recipe.seed,
        )

    def rows(self) -> dict[str, dict[str, Any]]:
        """Training rows; returns their counts."""
        counts = {}
        for name in self.recipe.datasets:
            with self._timed(f"datasets/{name}"):
                counts[name] = self._rows(name, self.out / "datasets" / name)
        return counts

    def _rows(self, name: str, folder: Path) -> dict[str, Any]:
        config = self.recipe.datasets[name]
        return build_rows(
            config,
            {source: self.out / "corpus" / source for source in config.shares},
            folder,
            tokenizer=self.tokenizer,
            seed=self.recipe.seed,
            embed=self._embed(config),
        )

    def _embed(self, config: DatasetConfig) -> Any:
        """What makes vectors of texts, for rows that are filled with what is near by them."""
        if config.nextlong is None or config.nextlong.model is None:
            return None
        # Only here: all other rows are made without torch.
        import torch

        from unspool.models.embed import Embedder

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return Embedder(self.loaded.path(config.nextlong.model), tokenizer=self.tokenizer, device=device)

    def _model(self) -> str | NewModel:
        model = self.recipe.model
        if isinstance(model, str):
            return self.loaded.path(model)
        return model.model_copy(update={"tokenizer": self.loaded.path(model.tokenizer)})

    def _resolved(self, source: Source) -> Source:
        key = "prose" if isinstance(source, RecallSource | SyntheticSource) else "path"
        keys = [name for name in (key, "template") if getattr(source, name, None) is not None]
        return source.model_copy(update={name: self.loaded.path(getattr(source, name)) for name in keys})

    @contextmanager
    def _timed(self, box: str) -> Iterator[None]:
        manifest = self.out / box / MANIFEST
        before = manifest.stat().st_mtime_ns if manifest.is_file() else None
        began = time.perf_counter()
        yield
        # A box that was up to date keeps the time it took when it was made.
        if manifest.is_file() and manifest.stat().st_mtime_ns != before:
            seconds = round(time.perf_counter() - began, 1)
            self._note(seconds=self._notes().get("seconds", {}) | {box: seconds})

    def _notes(self) -> dict[str, Any]:
        path = self.out / "run.json"
        try:
            notes: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
        except ValueError:
            return {}
        return notes

    def _note(self, **notes: Any) -> None:
        write_atomic(self.out / "run.json", json.dumps(self._notes() | notes, indent=1) + "\n")


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
        self.ranks = ranks or single_rank(pick_device(loaded.recipe.device))
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
            row_lens = (
                {name: self.recipe.datasets[name].seq_len for name in stage.attention_distillation.shares}
                if stage.attention_distillation
                else {}
            )
            start = self.model if self._earlier(stage) is None else None
            check_distillation(stage, start, row_lens, world_size=self.ranks.world_size)

    def _check_evals(self) -> None:
        """Find a suite that cannot work (too short a text or length) now, not after hours of training."""
        evals = runnable(self.loaded.evals())
        Plan(evals, self.tokenizer, seed=self.recipe.seed, root=Path()).check()

    def _original_context(self) -> int:
        return original_context(self.model) if isinstance(self.model, str) else self.model.context_length

    def _earlier(self, stage: StageConfig) -> StageConfig | None:
        """The stage that `stage` starts from; None if it starts from the recipe's model."""
        names = [other.name for other in self.recipe.stages]
        index = names.index(stage.name)
        start = stage.init
        if start == "previous":
            start = names[index - 1] if index else "base"
        return None if start == "base" else self.recipe.stages[names.index(start)]

    def _inputs(self, stage: StageConfig) -> StageInputs:
        earlier = self._earlier(stage)
        rows = self.out / "datasets"
        folder = None if earlier is None else self._stage_dir(earlier.name)
        return StageInputs(
            model=self.model if folder is None else str(folder / "model"),
            datasets={name: rows / name for name in stage.mix},
            moments=folder and folder / OPTIMIZER,
            validation=rows / stage.validation.dataset if stage.validation else None,
            attention_distillation={name: rows / name for name in stage.attention_distillation.shares}
            if stage.attention_distillation
            else {},
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
