"""Write the results of a study: study.json, study.md, and one report page that compares all runs."""

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from unspool import __version__
from unspool.core.artifacts import write_atomic
from unspool.core.errors import ConfigError, UnspoolError
from unspool.core.stats import ALPHA
from unspool.core.table import markdown_lines, markdown_table
from unspool.recipe.load import load_recipe
from unspool.recipe.run import REPORT
from unspool.reporting.page import write_report
from unspool.studies.arm_comparison import compare_arms
from unspool.studies.arm_scores import Answers, read_answers
from unspool.studies.load import Study, StudyRun
from unspool.studies.paper_numbers import beside_paper, beside_table, read_short
from unspool.studies.run import RunState
from unspool.studies.shared_work import recipe_digest

logger = logging.getLogger(__name__)

RESULT, TEXT = "study.json", "study.md"
MISSING = "–"


def publish_study(study: Study, found: Sequence[RunState], *, checked: bool) -> dict[str, Any]:
    """Compare the finished runs and write the results; returns the content of study.json.

    Without `checked`, a run whose folder has scores and the study's recipe is also compared.
    """
    answers: dict[str, dict[int, Answers]] = {arm: {} for arm in study.arms}
    used: list[StudyRun] = []
    entries = []
    for one in found:
        taken = one.state == "finished" or (not checked and _has_recipe(study, one.run))
        scores = read_answers(study.run_dir(one.run) / "scores" / one.run.stage) if taken else None
        if scores is not None:
            answers[one.run.arm][one.run.seed] = scores
            used.append(one.run)
        entries.append(
            {"run": one.run.name, "arm": one.run.arm, "seed": one.run.seed, "state": one.state, "error": one.error}
            | {"compared": scores is not None}
        )
    contexts = [_context(study.run_dir(run)) for run in used]
    context = next((known for known in contexts if known is not None), None)
    result = {
        "name": study.name,
        "unspool": __version__,
        "context": context,
        "runs": entries,
        **compare_arms(study, answers, context=context),
    }
    if study.paper is not None:
        short = {arm: [read_short(study.run_dir(run)) for run in used if run.arm == arm] for arm in study.arms}
        result["paper"] = beside_paper(study.paper, study.arms, study.measures, result["measures"], short)
    study.out.mkdir(parents=True, exist_ok=True)
    result["report"] = _page(study, result, used)
    write_atomic(study.out / RESULT, json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    write_atomic(study.out / TEXT, markdown(result))
    return result


def _page(study: Study, result: dict[str, Any], used: Sequence[StudyRun]) -> str | None:
    """Write the page of `unspool report`, best arm first; None if there is nothing to show."""
    order = {entry["arm"]: at for at, entry in enumerate(result["ranking"])}
    folders = [study.run_dir(run) for run in sorted(used, key=lambda run: (order[run.arm], run.seed))]
    if not folders:
        return None
    try:
        beside = [beside_table(result["paper"])] if "paper" in result else []
        write_report(folders, study.out / REPORT, tables=beside)
    except UnspoolError as error:  # the numbers are complete without the page
        logger.warning(f"{study.name}: the report page could not be written: {error}")
        return None
    return REPORT


def _has_recipe(study: Study, run: StudyRun) -> bool:
    """Return whether a folder was made with this run's recipe, on this machine or another."""
    path = study.run_dir(run) / "recipe.yaml"
    if not path.is_file():
        return False
    try:
        same = recipe_digest(load_recipe(path), paths=False) == recipe_digest(run.loaded, paths=False)
    except ConfigError:
        same = False
    if not same:
        logger.warning(f"{run.name}: recipe.yaml differs from the study; skipping")
    return same


def _context(folder: Path) -> int | None:
    try:
        context = json.loads((folder / "run.json").read_text(encoding="utf-8")).get("original_context")
    except (OSError, ValueError):
        return None
    return context if isinstance(context, int) else None


# study.md, and the cells of the tables on the terminal.


def show_value(value: float | None, kind: str) -> str:
    if value is None:
        return MISSING
    return f"{value:.3f}" if kind == "loss" else f"{100 * value:.1f}%"


def show_mean(entry: dict[str, Any], kind: str) -> str:
    """Format mean and standard deviation over seeds: `61.5% ±2.1`; one seed has no deviation."""
    mean, deviation = entry["mean"], entry["deviation"]
    if mean is None or deviation is None:
        return show_value(mean, kind)
    spread = f"{deviation:.3f}" if kind == "loss" else f"{100 * deviation:.1f}"
    return f"{show_value(mean, kind)} ±{spread}"


def show_gap(one: dict[str, Any], kind: str) -> str:
    """Format a difference in points, or in nats for a loss: `+12.5 (3.1 to 21.9)`."""
    gap = one["difference"]
    if gap is None:
        return MISSING
    widest = one["seeds"] if one["of"] == "seeds" else one["prompts"]
    scale, digits = (1.0, 3) if kind == "loss" else (100.0, 1)
    shown = f"{scale * gap:+.{digits}f}"
    if widest["low"] is None:
        return shown
    return f"{shown} ({scale * widest['low']:.{digits}f} to {scale * widest['high']:.{digits}f})"


def show_p(one: dict[str, Any]) -> str:
    """Format the corrected p-value behind the verdict."""
    over_seeds = one["seeds"]["p_holm"] if one["of"] == "seeds" else None
    p = one["prompts"]["p_holm"] if over_seeds is None else over_seeds
    if p is None:
        return MISSING
    return "<0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def kind_of(result: dict[str, Any], name: str) -> str:
    return next(str(table["kind"]) for table in result["measures"] if table["measure"] == name)


def markdown(result: dict[str, Any]) -> str:
    lines = [f"# {result['name']}", "", *_intro(result), "", "## Ranking", "", *_ranking(result), ""]
    if "paper" in result:
        lines += ["## Compared with the paper", "", markdown_table(beside_table(result["paper"])), ""]
    for table in result["measures"]:
        if table["measure"] not in ("score", "loss"):
            lines += [f"## {table['measure']}", "", *_measure(table), ""]
    return "\n".join([*lines, "## Runs", "", *_runs(result), ""])


def _intro(result: dict[str, Any]) -> Iterator[str]:
    margin = result["margin"]
    yield (
        f"Baseline: {result['baseline']}. Differences are paired: the same prompts, the same seeds. p-values are "
        f"two-sided and corrected by Holm's method over the comparisons of a measure; the limit is {ALPHA}. "
        "± is the standard deviation over seeds. Intervals are 95%: over seeds if the verdict names seeds, else over "
        "prompts, that is, for these trained models only. Arms are equal if the interval is within "
        f"{100 * margin['score']:g} points, or {margin['loss']:g} nats of loss."
    )
    num = sum(one["prompts"]["p"] is not None for table in result["measures"] for one in table["comparisons"])
    yield ""
    yield f"{num} comparisons were made; there is no correction across measures."


def _ranking(result: dict[str, Any]) -> Iterator[str]:
    for kind, names in result["ranked_by"].items():
        if names:
            yield f"{kind.capitalize()}: the plain mean of {', '.join(names)}."
            yield ""
    yield seeds_sentence(result)
    yield ""
    yield from markdown_lines(*ranking_rows(result))


def seeds_sentence(result: dict[str, Any]) -> str:
    """Name the seeds behind the ranks; other seeds use other prompts."""
    seeds = result["ranked_seeds"]
    if not seeds:
        return "No seed is common to all arms, so ranks compare means over different prompts."
    return f"Arms are ranked on seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)}, which all arms have."


def ranking_rows(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the ranking table: one row per arm, and one more for each further comparison."""
    kinds = [kind for kind, names in result["ranked_by"].items() if names]
    rows = []
    for entry in result["ranking"]:
        measured = entry[kinds[0]]
        first = [str(entry["rank"] or MISSING), entry["arm"], *(show_mean(entry[kind], kind) for kind in kinds)]
        first += [str(measured["n"]), str(len(measured["by_seed"]))]
        if not entry["comparisons"]:
            rows.append([*first, *[MISSING] * 4, ""])
        for at, one in enumerate(entry["comparisons"]):
            kind = one["measure"]
            cells = [one["against"], kind, show_gap(one, kind), show_p(one), one["says"]]
            rows.append([*(first if at == 0 else [""] * len(first)), *cells])
    return ["rank", "arm", *kinds, "n", "seeds", "against", "in", "difference", "p", "verdict"], rows


def _measure(table: dict[str, Any]) -> list[str]:
    kind = table["kind"]
    known = [arm for arm, entry in table["arms"].items() if entry["mean"] is not None]
    order = sorted(known, key=lambda arm: table["arms"][arm]["mean"], reverse=table["higher_is_better"])
    rows = []
    for arm in [*order, *(arm for arm in table["arms"] if arm not in known)]:
        entry = table["arms"][arm]
        first = [arm, show_mean(entry, kind), str(entry["n"])]
        compared = [one for one in table["comparisons"] if one["arm"] == arm]
        if not compared:
            rows.append([*first, MISSING, MISSING, MISSING, MISSING])
        for at, one in enumerate(compared):
            cells = [one["against"], show_gap(one, kind), show_p(one), one["says"]]
            rows.append([*(first if at == 0 else ["", "", ""]), *cells])
    return markdown_lines(["arm", table["measure"], "n", "against", "difference", "p", "verdict"], rows)


def _runs(result: dict[str, Any]) -> list[str]:
    rows = [
        [entry["run"], entry["state"], "yes" if entry["compared"] else "no", (entry["error"] or "").split("\n")[0]]
        for entry in result["runs"]
    ]
    return markdown_lines(["run", "state", "compared", "error"], rows)
