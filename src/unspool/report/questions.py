"""Questions on the page: what was asked, what was expected, what each model answered.

In: the samples that were chosen to be shown. Out: blocks.
Promise: all of it is text, clipped, with control and direction-changing characters made visible.
"""

from unspool.base.sizes import format_size
from unspool.report.blocks import Answer, Asked, Question
from unspool.report.results import Prompt, RunResults, Sample
from unspool.report.wording import plain_text, show_percent, suite_title, visible

MAX_QUESTIONS = 80
PROMPT_START, PROMPT_END = 600, 900  # characters: the question stands at the end


def asked_blocks(results: RunResults, styles: dict[str, int]) -> list[Asked]:
    blocks: list[Asked] = []
    left = MAX_QUESTIONS
    for suite in results.recall_suites:
        asked = _same_question(results, suite)[:left]
        left -= len(asked)
        if asked:
            questions = [_question(answers, styles) for answers in asked]
            blocks.append(Asked(title=suite_title(suite), questions=questions))
    return blocks


def _same_question(results: RunResults, suite: str) -> list[list[tuple[str, Sample]]]:
    """What each model answered to one prompt, together; a model may lack some."""
    asked: dict[str, list[tuple[str, Sample]]] = {}
    for model in results.models:
        for sample in model.samples:
            if sample.suite == suite:
                asked.setdefault(sample.hash, []).append((model.name, sample))
    return list(asked.values())


def _question(answers: list[tuple[str, Sample]], styles: dict[str, int]) -> Question:
    first = answers[0][1]
    depth = f", depth {show_percent(first.depth)}" if first.depth is not None else ""
    tokens = f", {first.prompt_tokens:,} tokens" if first.prompt_tokens is not None else ""
    prompt = next((sample.prompt for _, sample in answers if sample.prompt is not None), None)
    return Question(
        place=f"{format_size(first.length)}{depth}{tokens}",
        reference=visible(first.reference),
        answers=[
            Answer(model=name, style=styles[name], mark=mark(sample.score), output=visible(sample.output))
            for name, sample in answers
        ],
        prompt=shown_prompt(prompt) if prompt else "",
    )


def shown_prompt(prompt: Prompt) -> str:
    """Both ends of a prompt, with what lies between them counted."""
    if not prompt.end and len(prompt.start) <= PROMPT_START + PROMPT_END:
        return plain_text(prompt.start)
    if not prompt.end:
        cut = len(prompt.start) - PROMPT_START - PROMPT_END
        start, end, between = prompt.start[:PROMPT_START], prompt.start[-PROMPT_END:], f"{cut:,} characters"
    else:
        start, end, between = prompt.start[:PROMPT_START], prompt.end[-PROMPT_END:], f"{prompt.cut_tokens:,} tokens"
    return f"{plain_text(start)}\n[… {between} …]\n{plain_text(end)}"


def mark(score: float | None) -> str:
    if score is None:
        return "–"
    return "✓" if score >= 1 else "✗" if score <= 0 else show_percent(score)
