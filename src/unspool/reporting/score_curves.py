"""Scores by trained tokens, for stages with `eval_every` (ProLong, Figure 4) and several runs (UtK, Figure 6)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from unspool.core.charts import Figure, Frame, Point, Series, line_chart, nice_ticks
from unspool.core.formatting import join_words
from unspool.core.sizes import format_count, format_size
from unspool.reporting.figures import Line, score_kind
from unspool.reporting.gather_scores import gather_model
from unspool.reporting.result_files import published
from unspool.reporting.run_results import BASE, ModelScores, RunResults, Stage, main_suites
from unspool.reporting.suite_titles import suite_title

CURVES = "curves"  # folder of a run: <stage>/step-000100/
Curve = dict[int, ModelScores]  # by tokens trained since the base model


def gather_curves(run_dir: Path, stages: Sequence[Stage]) -> dict[str, dict[int, ModelScores]]:
    """Scores by stage and by number of tokens trained in the stage."""
    found = {}
    for stage in stages:
        tokens = {step.step: step.tokens for step in stage.steps}
        scored = {int(folder.name.removeprefix("step-")): folder for folder in published(run_dir / CURVES / stage.name)}
        points = {tokens[step]: gather_model(folder) for step, folder in sorted(scored.items()) if step in tokens}
        if points:
            found[stage.name] = points
    return found


def curve_figures(results: RunResults, styles: Mapping[str, int]) -> list[Figure]:
    """Draw each suite's mean over its lengths, one line per stage that was scored during training."""
    lines = {stage.name: _curve(results, stage) for stage in results.stages if stage.name in results.curves}
    return _figures(lines, styles, "one line per stage")


def curves_together(runs: Sequence[RunResults], models: Sequence[Line]) -> list[Figure]:
    """Draw one line per final model, from its base model on; none if all trained on equal tokens."""
    lines, styles = {}, {}
    for run in runs:
        stages = {stage.name: stage for stage in run.stages}
        for line in models:
            if line.scores.name in stages and any(line.scores is model for model in run.arms):
                lines[line.label], styles[line.label] = _whole_curve(run, stages, line.scores.name), line.style
    amounts = {max(points) for points in lines.values() if points}
    if not any(run.curves for run in runs) and len(amounts) < 2:
        return []
    return _figures(lines, styles, "one line per model")


def _curve(results: RunResults, stage: Stage) -> Curve:
    """Scores during one stage, with the scores of its initial and final model."""
    before = results.trained_tokens(stage.parent) if stage.parent else 0
    models = {model.name: model for model in results.models}
    ends = {0: models.get(stage.parent or BASE), stage.tokens: models.get(stage.name)}
    found = results.curves.get(stage.name, {}) | {tokens: model for tokens, model in ends.items() if model is not None}
    return {before + tokens: model for tokens, model in sorted(found.items())}


def _whole_curve(results: RunResults, stages: Mapping[str, Stage], name: str) -> Curve:
    """Scores from the base model to the end of a stage."""
    points: Curve = {}
    left, stage = dict(stages), stages.get(name)  # guard against a cycle in a damaged recipe
    while stage is not None:
        points = _curve(results, stage) | points
        del left[stage.name]
        stage = left.get(stage.parent or "")
    return dict(sorted(points.items()))


def _figures(lines: Mapping[str, Curve], styles: Mapping[str, int], what: str) -> list[Figure]:
    suites = main_suites(model for points in lines.values() for model in points.values())
    return [_figure(suite, lines, styles, what) for suite in suites]


def _figure(suite: str, lines: Mapping[str, Curve], styles: Mapping[str, int], what: str) -> Figure:
    # Use only lengths that every point has; otherwise the means are not comparable.
    sets = [
        {cell.length for cell in model.cells if cell.suite == suite and cell.depth is None and cell.value is not None}
        for points in lines.values()
        for model in points.values()
    ]
    lengths = sorted(set.intersection(*(found for found in sets if found))) if any(sets) else []
    series = []
    for name, points in lines.items():
        means = [(tokens, _mean(model, suite, lengths)) for tokens, model in points.items()]
        shown = [
            Point(x=float(tokens), y=value, tooltip=f"{name}, {format_count(tokens)} tokens: {100 * value:.1f}%")
            for tokens, value in means
            if value is not None
        ]
        series.append(Series(label=name, style=styles[name], points=shown))
    most = float(max(tokens for points in lines.values() for tokens in points))
    title = f"{suite_title(suite)} by tokens trained"
    frame = Frame(
        label=f"{title}, {what}.",
        x_title="tokens trained since the base model",
        x_ticks=[(tick, format_count(tick) if tick else "0") for tick in nice_ticks(0.0, most)[:-1]],
        show_y=lambda value: f"{100 * value:.0f}%",
        y_range=(0.0, 1.0),
        dodge=False,
    )
    note = f"{score_kind(suite)}, mean over {join_words([format_size(length) for length in lengths])}"
    return Figure(title=title, note=note, drawing=line_chart(series, frame))


def _mean(model: ModelScores, suite: str, lengths: Sequence[int]) -> float | None:
    values = [cell.value for length in lengths if (cell := model.recall(suite, length)) and cell.value is not None]
    return fmean(values) if lengths and len(values) == len(lengths) else None
