"""The blocks of a report page, and the sections of a run in page order.

HTML and Markdown are both written from blocks, so they agree. A sentence replaces each missing part.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from unspool.core.charts import Figure
from unspool.core.formatting import excerpt, format_percent, printable
from unspool.core.html import picture
from unspool.core.sizes import format_size
from unspool.core.table import Table
from unspool.reporting.comparisons import compare, comparison_table, not_paired
from unspool.reporting.data_section import audit
from unspool.reporting.distance_figures import distance_figures
from unspool.reporting.figures import (
    Line,
    artifact_table,
    facts_table,
    heat_figure,
    loss_figure,
    loss_table,
    recall_figure,
    recall_table,
    score_kind,
    timing_table,
)
from unspool.reporting.measures import key_measures
from unspool.reporting.overview import category_tables, length_table, trade_off
from unspool.reporting.rope_section import position_figures, position_tables, ropes
from unspool.reporting.run_results import Prompt, RunResults, Sample, task_of
from unspool.reporting.score_curves import curve_figures
from unspool.reporting.suite_titles import suite_title
from unspool.reporting.training_section import training_figures, training_table, validation_figures, wrong_steps

Legend = list[tuple[str, int]]  # (label, style)


@dataclass(frozen=True, kw_only=True)
class Text:
    kind: ClassVar[str] = "text"
    text: str
    role: str = "sub"  # or "note" (a warning), "missing"


@dataclass(frozen=True, kw_only=True)
class Group:
    """Charts with their legend, and tables, side by side on wide screens."""

    kind: ClassVar[str] = "group"
    title: str = ""
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    legend: Legend = field(default_factory=list)
    keys: tuple[str, str] | None = None  # meaning of the two bars of each pair
    wide: bool = False  # stacked vertically
    small: bool = False  # three in one line
    folded: str = ""  # title of the collapsed block; empty if it is open


@dataclass(frozen=True, kw_only=True)
class Heat:
    """One heatmap per model."""

    kind: ClassVar[str] = "heat"
    title: str
    note: str
    old_context: str
    figures: Sequence[tuple[int, Figure]]
    folded: str = ""


@dataclass(frozen=True, kw_only=True)
class Answer:
    model: str
    style: int
    mark: str
    output: str


@dataclass(frozen=True, kw_only=True)
class Question:
    place: str
    reference: str
    answers: Sequence[Answer]
    prompt: str = ""


@dataclass(frozen=True, kw_only=True)
class Questions:
    kind: ClassVar[str] = "questions"
    title: str
    questions: Sequence[Question]


@dataclass(frozen=True, kw_only=True)
class Code:
    kind: ClassVar[str] = "code"
    text: str
    label: str
    folded: str = ""


Block = Text | Group | Heat | Questions | Code


@dataclass(frozen=True, kw_only=True)
class Section:
    anchor: str
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True, kw_only=True)
class TileRow:
    model: str
    style: int
    value: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class Tile:
    title: str
    note: str
    rows: Sequence[TileRow]


@dataclass(frozen=True, kw_only=True)
class RunView:
    """Everything the page shows about one run."""

    anchor: str
    name: str
    contexts: str
    base_model: str
    lines: Sequence[str]
    notes: Sequence[str]
    tiles: Sequence[Tile]
    sections: Sequence[Section]


@dataclass(frozen=True, kw_only=True)
class PageView:
    title: str
    runs: Sequence[RunView]
    together: Section | None  # comparison of all runs
    version: str


MAX_QUESTIONS = 80
PROMPT_START, PROMPT_END = 600, 900  # characters; the end is longer because it holds the question


def question_blocks(results: RunResults, styles: dict[str, int]) -> list[Questions]:
    blocks: list[Questions] = []
    left = MAX_QUESTIONS
    for suite in results.recall_suites:
        asked = _same_question(results, suite)[:left]
        left -= len(asked)
        if asked:
            questions = [_question(answers, styles) for answers in asked]
            blocks.append(Questions(title=suite_title(suite), questions=questions))
    return blocks


def _same_question(results: RunResults, suite: str) -> list[list[tuple[str, Sample]]]:
    """All models' answers to each prompt. A model may lack some."""
    asked: dict[str, list[tuple[str, Sample]]] = {}
    for model in results.models:
        for sample in model.samples:
            if sample.suite == suite:
                asked.setdefault(sample.hash, []).append((model.name, sample))
    return list(asked.values())


def _question(answers: list[tuple[str, Sample]], styles: dict[str, int]) -> Question:
    first = answers[0][1]
    depth = f", depth {format_percent(first.depth)}" if first.depth is not None else ""
    tokens = f", {first.prompt_tokens:,} tokens" if first.prompt_tokens is not None else ""
    prompt = next((sample.prompt for _, sample in answers if sample.prompt is not None), None)
    return Question(
        place=f"{format_size(first.length)}{depth}{tokens}",
        reference=excerpt(first.reference),
        answers=[
            Answer(model=name, style=styles[name], mark=mark(sample.score), output=excerpt(sample.output))
            for name, sample in answers
        ],
        prompt=shown_prompt(prompt) if prompt else "",
    )


def shown_prompt(prompt: Prompt) -> str:
    """Start and end of a prompt, with the length of the omitted middle."""
    if not prompt.end and len(prompt.start) <= PROMPT_START + PROMPT_END:
        return printable(prompt.start)
    if not prompt.end:
        cut = len(prompt.start) - PROMPT_START - PROMPT_END
        start, end, between = prompt.start[:PROMPT_START], prompt.start[-PROMPT_END:], f"{cut:,} characters"
    else:
        start, end, between = prompt.start[:PROMPT_START], prompt.end[-PROMPT_END:], f"{prompt.cut_tokens:,} tokens"
    return f"{printable(start)}\n[… {between} …]\n{printable(end)}"


def mark(score: float | None) -> str:
    if score is None:
        return "–"
    return "✓" if score >= 1 else "✗" if score <= 0 else format_percent(score)


MANY = 4  # with more models, tables are stacked vertically
MAX_HEATMAPS = 64
OPEN_HEATMAPS = 2  # heatmaps of further tasks are collapsed


def sections(results: RunResults, styles: dict[str, int], anchor: str) -> list[Section]:
    lines = lines_of(results, styles)
    named: list[tuple[str, str, Sequence[Block]]] = [
        ("scores", "Scores", _scores(results, lines)),
        ("depths", "Length and depth", _depths(results, styles)),
        ("loss", "Loss by position", _loss(lines, results.original_context)),
        ("paired", "Paired comparison", _paired(results, lines)),
        ("tradeoff", "Long and short context", _trade_off(results, lines)),
        ("training", "Training", _training(results, styles)),
        ("positions", "RoPE", _positions(results, styles)),
        ("attention", "Attention", _attention(results)),
        ("data", "Data", _data(results)),
        ("samples", "Samples", _samples(results, styles)),
        ("numbers", "All numbers", _numbers(results, lines)),
        ("recipe", "Recipe", _recipe(results)),
        ("provenance", "Provenance", _provenance(results)),
    ]
    return [Section(anchor=f"{anchor}-{name}", title=title, blocks=blocks) for name, title, blocks in named if blocks]


def lines_of(results: RunResults, styles: dict[str, int]) -> list[Line]:
    return [
        Line(label=model.name, style=styles[model.name], scores=model, context=results.context_of(model.name))
        for model in results.models
    ]


def legend_of(lines: Sequence[Line]) -> Legend:
    return [(line.label, line.style) for line in lines]


def missing(text: str) -> Text:
    return Text(text=text, role="missing")


def _scores(results: RunResults, lines: list[Line]) -> list[Block]:
    if not results.recall_suites:
        short = category_tables(lines)
        absent = missing("Recall was not scored: add niah or key_value to the recipe's evals.")
        return [absent, *([Group(tables=short, wide=True)] if short else [])]
    figures = [recall_figure(lines, suite, results.original_context) for suite in results.main_suites]
    tables = [length_table(lines, suite) for suite in results.main_suites]
    blocks: list[Block] = [Group(tables=tables, wide=True), Group(figures=figures, legend=legend_of(lines))]
    categories = category_tables(lines)
    return [*blocks, *([Group(tables=categories, wide=True)] if categories else [])]


def _depths(results: RunResults, styles: dict[str, int]) -> list[Block]:
    deep = [suite for suite in results.recall_suites if results.depths(suite)]
    per_suite = max(1, len(results.models))
    shown = deep[: max(1, MAX_HEATMAPS // per_suite)]
    blocks: list[Block] = []
    num_tasks = 0
    for suite in shown:
        num_tasks += bool(task_of(suite)[1])
        folded = bool(task_of(suite)[1]) and num_tasks > OPEN_HEATMAPS
        blocks.append(_heat(results, suite, styles, folded=folded))
    if len(deep) > len(shown):
        blocks.append(Text(text=f"{len(deep) - len(shown)} more tasks are only in “All numbers”."))
    return blocks


def _heat(results: RunResults, suite: str, styles: dict[str, int], *, folded: bool) -> Heat:
    cells = [cell for model in results.models for cell in model.cells if cell.suite == suite and cell.depth is not None]
    counts = sorted({cell.n for cell in cells if cell.n})
    per_cell = f"{counts[0]}–{counts[-1]}" if len(counts) > 1 else str(counts[0]) if counts else "0"
    title = f"{suite_title(suite)} by length and depth"
    return Heat(
        title=title,
        figures=[
            (styles[model.name], heat_figure(results, model, suite))
            for model in results.models
            if any(cell.suite == suite for cell in model.cells)
        ],
        note=f"{score_kind(suite)} in percent; n = {per_cell} in each cell; “all” is the mean over depths",
        old_context=f"original context {format_size(results.original_context)}" if results.original_context else "",
        folded=title if folded else "",
    )


def _loss(lines: list[Line], old: int | None) -> list[Block]:
    with_loss = [line for line in lines if line.scores.losses()]
    if not with_loss:
        return [missing("Loss by position was not scored: add perplexity to the recipe's evals.")]
    return [
        Group(
            figures=[loss_figure(with_loss, old)],
            tables=[loss_table(with_loss)],
            legend=legend_of(with_loss),
            wide=len(with_loss) > MANY,
        )
    ]


def _paired(results: RunResults, lines: list[Line]) -> list[Block]:
    table = comparison_table(compare(lines, key_measures(results)))
    notes: list[Block] = [Text(text=note, role="note") for note in not_paired(lines)]
    return [*notes, *([Group(tables=[table], wide=True)] if table else [])]


def _trade_off(results: RunResults, lines: list[Line]) -> list[Block]:
    found = trade_off(lines, key_measures(results))
    if found is None:
        return []
    return [Group(figures=found.figures, legend=legend_of(lines)), Group(tables=[found.table], wide=True)]


def _training(results: RunResults, styles: dict[str, int]) -> list[Block]:
    if not results.stages:
        return [missing("This run has no training stages.")]
    figures = training_figures(results.stages, styles) + validation_figures(results.stages, styles)
    legend = [(stage.name, styles[stage.name]) for stage in results.stages if stage.steps]
    notes: list[Block] = [Text(text=note, role="note") for note in wrong_steps(results.stages)]
    curves: Block = Group(figures=figures, legend=legend) if figures else missing("No training steps yet.")
    scored = curve_figures(results, styles)
    names = [(name, styles[name]) for name in results.curves]
    scores: list[Block] = [Group(figures=scored, legend=names)] if scored else []
    return [*notes, curves, *scores, Group(tables=[training_table(results)], wide=True)]


def _positions(results: RunResults, styles: dict[str, int]) -> list[Block]:
    found = ropes(results, styles)
    if not found:
        return [missing("No config.json with RoPE was found for the models of this run.")]
    tables = position_tables(found, results)
    return [
        Group(
            figures=position_figures(found, results.original_context),
            legend=[(rope.label, rope.style) for rope in found],
        ),
        Group(tables=tables[:1], wide=True),
        Group(tables=tables[1:], wide=True, folded=tables[1].caption),
    ]


def _attention(results: RunResults) -> list[Block]:
    figures = [
        Figure(title=printable(name), note="", drawing=picture(drawing, f"Attention maps: {name}"))
        for name, drawing in results.attention_maps.items()
    ]
    return [Group(figures=figures, wide=True)] if figures else []


def _data(results: RunResults) -> list[Block]:
    found = audit(results)
    if not found.tables:
        return [missing("No corpus or dataset is finished yet.")]
    blocks: list[Block] = [Text(text=warning, role="note") for warning in found.warnings]
    if found.lengths:
        blocks.append(
            Group(title="Lengths", figures=found.lengths, keys=("share of documents", "share of tokens"), small=True)
        )
    distances = distance_figures(results.distances)
    if distances:
        title, keys = "Distances between tokens of one document", ("before chunks were moved", "after")
        blocks.append(Group(title=title, figures=distances, keys=keys, small=True))
    if found.mixes:
        blocks.append(Group(title="Mix", figures=found.mixes, keys=("requested", "realized"), small=True))
    blocks.append(Group(tables=found.tables, wide=True))
    if found.problems:
        blocks.append(Group(tables=[found.problems], wide=True, folded=found.problems.caption))
    return blocks


def _samples(results: RunResults, styles: dict[str, int]) -> list[Block]:
    asked = question_blocks(results, styles)
    if not asked:
        return [missing("No scored questions to show.")]
    how = "The first question of each depth at the longest length; scores play no role in the choice."
    return [Text(text=how), *asked]


def _numbers(results: RunResults, lines: list[Line]) -> list[Block]:
    if not results.models:
        return [missing("No scores yet.")]
    with_loss = [line for line in lines if line.scores.losses()]
    tables = [recall_table(lines, suite, [None]) for suite in results.recall_suites]
    tables += [loss_table(with_loss)] if with_loss else []
    deep = [suite for suite in results.recall_suites if results.depths(suite)]
    by_depth = [recall_table(lines, suite, results.depths(suite)) for suite in deep]
    how = "Numbers with 95% intervals; n is the number of questions for recall and of tokens for loss."
    return [
        Text(text=how),
        Group(tables=tables, wide=len(lines) > MANY),
        *(Group(tables=[table], wide=True, folded=table.caption) for table in by_depth),
    ]


def _recipe(results: RunResults) -> list[Block]:
    if results.recipe_text is None:
        return [missing("recipe.yaml is not in the run folder.")]
    num_lines = len(results.recipe_text.splitlines())
    return [Code(text=printable(results.recipe_text), label="Recipe", folded=f"recipe.yaml, {num_lines} lines")]


def _provenance(results: RunResults) -> list[Block]:
    facts = [table for table in (facts_table(results), timing_table(results)) if table]
    blocks: list[Block] = [Group(tables=facts)]
    if results.artifacts:
        blocks.append(Group(tables=[artifact_table(results.artifacts)], wide=True))
    return blocks
