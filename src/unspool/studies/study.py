"""`unspool.study` and `unspool.plan_study`: run the arms of a study under every seed, or only list the runs."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from unspool.core.lock import lock_run, wait_for_lock
from unspool.core.result import Result
from unspool.recipe.load import Overrides
from unspool.studies.load import Study, StudyRun, check_arms, check_study_inputs, load_study, pick_runs
from unspool.studies.merged_arms import check_sources, merge_weights
from unspool.studies.study_tables import measures_table, plan_summary, ranking_table, runs_table, shared_table

if TYPE_CHECKING:
    from unspool.studies.run import RunState


@dataclass(frozen=True, kw_only=True)
class StudyPlan(Result):
    """The runs of a study, what they share and the tokens to train, as `plan_study` returns it.

    Example:
        >>> import unspool
        >>> plan = unspool.plan_study("tiny")
        >>> plan.to_dict()["name"]
        'tiny-study'
    """

    plan: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return dict(self.plan)

    def print(self, console: Console) -> None:
        console.print(f"{self.plan['name']}, into {self.plan['out']}\n", soft_wrap=True)
        for table in (runs_table(self.to_dict()), shared_table(self.to_dict())):
            console.print(table, end="\n\n")
        console.print(plan_summary(self.to_dict()), soft_wrap=True)


@dataclass(frozen=True, kw_only=True)
class StudyResult(Result):
    """The ranking of a study's arms with tests, as `study` returns it.

    Example:
        >>> import unspool
        >>> unspool.StudyResult(folder="runs/abf", result={"name": "abf", "runs": []}).failed
        ()
    """

    folder: str | Path  # holds study.json, study.md, the report and the runs
    result: Mapping[str, Any]  # as in study.json
    failed: tuple[str, ...] = ()  # names of the runs that failed, of those that were chosen

    def to_dict(self) -> dict[str, Any]:
        return dict(self.result)

    def print(self, console: Console) -> None:
        from unspool.studies.study_report import seeds_sentence

        result, folder = self.to_dict(), Path(self.folder).absolute()
        for table in (ranking_table(result), measures_table(result)):
            if table is not None:
                console.print(table, end="\n\n")
        for kind, names in result["ranked_by"].items():
            if names:
                console.print(f"{kind}: the mean of {', '.join(names)}", soft_wrap=True)
        console.print(seeds_sentence(result), soft_wrap=True)
        if "paper" in result:
            source = result["paper"]["source"]
            console.print(f"comparison with {source}: in study.md and in the report", soft_wrap=True)
        for entry in result["runs"]:
            if entry["state"] != "finished" and not entry["compared"]:
                error = f": {entry['error'].splitlines()[0]}" if entry["error"] else ""
                console.print(f"{entry['run']}: {entry['state']}{error}", soft_wrap=True)
        console.print(f"\nall numbers: {folder / 'study.md'}", soft_wrap=True)
        if result["report"]:
            console.print(f"report: {folder / result['report']}", soft_wrap=True)


def study(
    study: str | Path,
    overrides: Overrides = None,
    *,
    only: Sequence[str] = (),
    seeds: Sequence[int] = (),
    out: str | Path | None = None,
    report_only: bool = False,
) -> StudyResult:
    """Run the arms of a study under every seed, and rank them with tests.

    An arm is one recipe with changes. Arms share corpora, datasets and the scores of the base model where their
    settings are equal. A killed study resumes, and an arm that fails does not stop the others.

    Args:
        study: A study file, or the name of a bundled study.
        overrides: Changes to the recipe of every arm, such as `{"engine.workers": 8}`.
        only: Run only these arms (`utk`) or runs (`abf-s1`).
        seeds: Seeds of every arm, in place of the study's: `[3, 4, 5]` repeats it with new ones.
        out: Folder of the study, `runs/NAME` by default.
        report_only: Compare the runs that are in the folder, including copied ones; run nothing.

    Returns:
        The ranking, the measures and their comparisons; `failed` names the runs that failed.

    Raises:
        ConfigError: The study is wrong, or an input is missing.

    Example:
        >>> import tempfile, unspool
        >>> result = unspool.study("tiny", out=tempfile.mkdtemp(), report_only=True)
        >>> {run["state"] for run in result.to_dict()["runs"]}
        {'not begun'}
    """
    loaded = load_study(study, overrides=overrides, seeds=seeds, out=None if out is None else Path(out))
    chosen = pick_runs(loaded, only)
    # Import late, so that errors in the study file appear immediately: this loads torch.
    from unspool.studies.run import is_done, states

    if not report_only:
        waiting = [run for run in chosen if not is_done(loaded, run)]
        check_sources(loaded, waiting)
        trained = [run for run in waiting if run.merge is None]
        check_study_inputs(trained)
        check_arms(trained)
    from unspool.studies.study_report import publish_study

    # Several processes may share the arms of a study by `only`.
    with nullcontext() if report_only else lock_run(loaded.out, shared=bool(only)):
        found = states(loaded) if report_only else _run(loaded, chosen)
        with wait_for_lock(loaded.out / ".report.lock"):
            result = publish_study(loaded, found, checked=not report_only)
    failed = tuple(one.run.name for one in found if one.run in chosen and one.state == "failed")
    return StudyResult(folder=loaded.out, result=result, failed=failed)


def _run(study: Study, chosen: Sequence[StudyRun]) -> "list[RunState]":
    """Run the trained arms, then the arms that average their weights; return the state of every run."""
    from unspool.studies.run import run_study

    found = run_study(study, [run for run in chosen if run.merge is None])
    averages = [run for run in chosen if run.merge is not None]
    if not averages:
        return found
    merged = [run for run in averages if merge_weights(study, run)]
    check_study_inputs(merged)
    later = run_study(study, merged)
    return [one if one.state == "running elsewhere" else other for one, other in zip(found, later, strict=True)]


def plan_study(
    study: str | Path,
    overrides: Overrides = None,
    *,
    only: Sequence[str] = (),
    seeds: Sequence[int] = (),
    out: str | Path | None = None,
) -> StudyPlan:
    """List the runs of a study, what they share and the tokens to train; run nothing.

    Args:
        study: A study file, or the name of a bundled study.
        overrides: Changes to the recipe of every arm.
        only: Count only these arms or runs as to be run.
        seeds: Seeds of every arm, in place of the study's.
        out: Folder of the study, `runs/NAME` by default.

    Returns:
        The plan: print it, or take `to_dict()`.

    Raises:
        ConfigError: The study is wrong.

    Example:
        >>> import unspool
        >>> len(unspool.plan_study("tiny").to_dict()["runs"]) > 1
        True
    """
    loaded = load_study(study, overrides=overrides, seeds=seeds, out=None if out is None else Path(out))
    chosen = pick_runs(loaded, only)
    from unspool.studies.run import study_plan  # import late: it loads torch

    return StudyPlan(plan=study_plan(loaded, chosen))
