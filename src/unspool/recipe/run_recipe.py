"""`unspool.run`: a recipe from raw text to a scored model, or a part of it. Imports no torch until it is needed."""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unspool.core.artifacts import check_writable
from unspool.core.config import lookup
from unspool.core.lock import lock_run
from unspool.core.phases import process_seconds
from unspool.recipe.load import LoadedRecipe, Overrides, check_inputs, load_recipe

logger = logging.getLogger(__name__)

STEPS = ("tokenize", "pack", "train", "report")


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """Results of a run, in its folder.

    Example:
        >>> import unspool
        >>> unspool.RunResult(folder="runs/tiny").models
        {}
    """

    folder: str | Path
    corpora: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # counts of each tokenized source
    datasets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # counts of each packed dataset
    models: Mapping[str, Path] = field(default_factory=dict)  # model folder of each trained stage
    headline: Sequence[str] = ()  # the main results in words
    report: Path | None = None  # the page
    is_leader: bool = True  # False on every rank but the first

    def dataset(self, name: str) -> Any:
        """The packed rows of a dataset."""
        from unspool.recipe.packed_dataset import PackedDataset

        lookup(self.datasets, name, kind="dataset")
        return PackedDataset(Path(self.folder) / "datasets" / name)

    def __str__(self) -> str:
        where = f"report: {self.report.absolute()}" if self.report else f"folder: {Path(self.folder).absolute()}"
        return "\n".join([*self.headline, where])


def run(
    recipe: str | Path,
    overrides: Overrides = None,
    *,
    until: str = "report",
    stage: str | None = None,
    format: str | None = None,
    from_process_start: bool = False,
) -> RunResult:
    """Run a recipe end to end: tokenize, pack, train, evaluate, report.

    You can kill it at any time and run it again. It skips finished steps, resumes an unfinished stage from its last
    checkpoint, and redoes steps whose recipe settings or inputs changed.

    Args:
        recipe: A recipe file, or the name of a bundled recipe such as `tiny`.
        overrides: Changes to the recipe, such as `{"stages.0.lr": 2e-5, "out": "runs/other-lr"}`.
        until: Stop after this step: `tokenize`, `pack`, `train` or `report`.
        stage: With `until="train"`, train only this stage; by default all stages, in order.
        format: With `until="pack"`, also write every dataset to `formats/FORMAT/` of the run: `arrow`, `parquet`,
            `mds` or `megatron`.
        from_process_start: Count the time since this process began as start-up, in run.json.

    Returns:
        Counts, model folders, the headline and the page, as far as they were made.

    Raises:
        ConfigError: The recipe is wrong, or an input is missing. Raised before any work starts.

    Example:
        >>> import tempfile, unspool
        >>> folder = tempfile.mkdtemp()
        >>> result = unspool.run("tiny", {"out": folder}, until="pack")
        >>> result.dataset("utk-2k").seq_len
        2048
    """
    lookup(dict.fromkeys(STEPS), until, kind="`until`")
    loaded = load_recipe(recipe, overrides)
    check_inputs(loaded)
    if until in ("tokenize", "pack"):
        return _prepare(loaded, until, format)
    with _opened(loaded, from_process_start) as context:
        from unspool.recipe import run as steps

        if until == "report":
            outcome = steps.run(context)
            found: dict[str, Any] = {"headline": outcome.headline, "report": outcome.report}
            trained = context.recipe.stages
        else:
            found = {}
            trained = steps.train_stages(context, stage)
    models = {entry.name: steps.stage_dir(context, entry.name) / "model" for entry in trained}
    return RunResult(folder=loaded.recipe.out, models=models, is_leader=context.is_leader, **found)


def _prepare(loaded: LoadedRecipe, until: str, format: str | None) -> RunResult:
    from unspool.data.packing.formats import FORMATS, write_format
    from unspool.recipe import prepare

    if format is not None:
        lookup(FORMATS, format, kind="`format`")
    with lock_run(loaded.recipe.out):
        context = prepare.open_data_run(loaded)
        corpora = prepare.tokenize(context)
        datasets = prepare.pack(context) if until == "pack" else {}
        if format is not None:
            for name in datasets:
                folder = context.out / "formats" / format / name
                written = write_format(context.out / "datasets" / name, folder, format)
                logger.info(f"{folder}: {'written' if written else 'up to date'}")
    return RunResult(folder=loaded.recipe.out, corpora=corpora, datasets=datasets)


@contextmanager
def _opened(loaded: LoadedRecipe, from_process_start: bool) -> Iterator[Any]:
    """Open the run of a recipe in this process, or on all ranks of the job that it is part of."""
    check_writable(loaded.recipe.out, "out")
    if isinstance(loaded.recipe.model, str) and os.environ.get("RANK", "0") == "0":
        from unspool.models.weight_files import hash_ahead

        hash_ahead(loaded.path(loaded.recipe.model))
    _keep_compiled(loaded.recipe.out)
    # Import late, so that recipe errors appear immediately: these load torch.
    from unspool.models.extend import pick_device
    from unspool.recipe.run import open_run
    from unspool.training.parallel.ranks import init_ranks

    with (
        init_ranks(pick_device(loaded.recipe.device).type) as these,
        lock_run(loaded.recipe.out) if these.is_leader else nullcontext(),  # rank 0 locks for all
    ):
        started = process_seconds() if from_process_start else None
        context = open_run(loaded, these)
        if started is not None:
            context.phases.add_before("start-up", started)
        yield context
        logger.info(f"{loaded.recipe.name}: finished in {context.phases.text()}")


def _keep_compiled(out: Path) -> None:
    """Keep compiled kernels next to the run folder, for later starts and runs, unless the user has set a folder.

    They are not inside the run folder, because they are code, and users share run folders.
    """
    folder = out.absolute().parent / ".compile-cache"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))
