"""The three lines that matter, in plain text: recall, loss, and which arm is ahead."""

from unspool.base.sizes import format_count, format_size
from unspool.report.measures import Measure, key_measures
from unspool.report.paired import ahead_of_all
from unspool.report.results import BASE, LOSS, Cell, RunResults
from unspool.report.wording import inside_sentence, listing, show_full, show_n, suite_title

# Arms stop on whole batches, so that equal budgets may differ by less than this share.
EQUAL_TOKENS = 0.01


def headline(results: RunResults) -> list[str]:
    """Recall beyond the old context, loss there and inside it, and the arms against each other."""
    title = f"{results.name}{_extension(results)}"
    if not results.models:
        return [f"{title}. No scores yet: run the recipe's evals to see before and after."]
    measures = key_measures(results)
    groups = [
        [m for m in measures if m.higher_is_better],
        [m for m in measures if not m.higher_is_better],
    ]
    lines = [_sentence([_before_after(measure, results) for measure in group]) for group in groups if group]
    if not lines:
        return [f"{title}. The scores hold no numbers."]
    lines[0] = f"{title}. {lines[0]}"
    return [*lines, *_arms(measures, results)]


def _extension(results: RunResults) -> str:
    if results.original_context and results.target_context:
        return f": {format_size(results.original_context)} → {format_size(results.target_context)}"
    return f": {format_size(results.target_context)}" if results.target_context else ""


def _sentence(parts: list[str]) -> str:
    return "; ".join([parts[0], *(inside_sentence(part) for part in parts[1:])]) + "."


def _before_after(measure: Measure, results: RunResults) -> str:
    """`Needle recall at 2K: 0% (0–9) → abf 84% (71–93), utk 91% (80–97), n = 40`."""
    before = measure.cells.get(BASE)
    after = [f"{model.name} {show_full(measure.cells.get(model.name))}" for model in results.arms]
    shown = [before, *(measure.cells.get(model.name) for model in results.arms)]
    counts = list(dict.fromkeys(show_n(cell) for cell in shown if cell is not None and cell.value is not None))
    start = show_full(before) if results.before and after else f"base {show_full(before)}" if results.before else ""
    change = " → ".join(filter(None, [start, ", ".join(after)]))
    return f"{measure.title}: {change}" + (f", {' / '.join(counts)}" if counts else "")


def _arms(measures: list[Measure], results: RunResults) -> list[str]:
    names = [model.name for model in results.arms]
    if len(names) < 2:
        return []
    models = {model.name: model for model in results.arms}
    won: dict[str | None, list[str]] = {}
    paired = []
    for measure in measures:
        if not all(_has_interval(measure.cells.get(name)) for name in names):
            continue
        best, by_answers = ahead_of_all(measure, models)
        won.setdefault(best, []).append(inside_sentence(measure.title))
        paired.append(by_answers)
    verdicts = [f"{name} wins on {listing(titles)}" for name, titles in won.items() if name is not None]
    if None in won:
        # Of three, one may well be far behind.
        close = "too close to call" if len(names) == 2 else "no arm is ahead of all others"
        verdicts.append(f"{close} on {listing(won[None])}" + ("" if all(paired) else " (intervals overlap)"))
    if not verdicts:
        return []
    how = ", answer by answer" if all(paired) else ""
    return [f"{listing(names)} {_budget(names, results)}{how}: {'; '.join(verdicts)}."]


def _has_interval(cell: Cell | None) -> bool:
    return cell is not None and cell.low is not None and cell.high is not None


def _budget(names: list[str], results: RunResults) -> str:
    tokens = {name: results.trained_tokens(name) for name in names}
    if min(tokens.values()) == 0:
        return "(tokens not recorded)"
    if max(tokens.values()) - min(tokens.values()) <= EQUAL_TOKENS * max(tokens.values()):
        return f"at equal tokens ({format_count(max(tokens.values()))} each)"
    return "at unequal tokens (" + ", ".join(f"{name} {format_count(count)}" for name, count in tokens.items()) + ")"


def missing_parts(results: RunResults) -> list[str]:
    """What a reader could expect and this run does not have (yet), one sentence each."""
    notes = []
    if results.recipe_text is None:
        notes.append("No recipe.yaml: stages are listed by name.")
    if results.original_context is None:
        notes.append("The original context is not recorded (run.json), so nothing is marked as inside or beyond it.")
    if results.models and results.before is None:
        notes.append("The base model was not scored, so there is no “before”.")
    unscored = [stage.name for stage in results.stages if stage.name not in {m.name for m in results.models}]
    if results.models and unscored:
        notes.append(f"Not scored: {listing(unscored)}.")
    for suite in [*results.recall_suites, LOSS]:
        sets = {m.name: m.question_sets[suite] for m in results.models if suite in m.question_sets}
        if len(set(sets.values())) > 1:
            notes.append(
                f"{suite_title(suite)}: the models answered different questions, so differences may come from those."
            )
    return notes
