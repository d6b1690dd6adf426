"""`unspool.report`: the results of one run, or of several side by side, as a page, Markdown and JSON."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from unspool.core.errors import ConfigError
from unspool.core.result import Result
from unspool.reporting.comparisons import compare, comparison_lines, headline, not_paired
from unspool.reporting.gather import gather
from unspool.reporting.measures import measures_for
from unspool.reporting.page import lines_together, render, shared_context
from unspool.reporting.run_results import RunResults
from unspool.reporting.text_formats import render_markdown, report_values

MAX_SENTENCES = 12  # of paired comparisons; the page has all


@dataclass(frozen=True, kw_only=True)
class Report(Result):
    """The results of one or several runs. Its `str` is the headline, and notebooks show the page.

    Example:
        >>> import tempfile, unspool
        >>> folder = tempfile.mkdtemp()
        >>> _ = unspool.evaluate("asset:tiny-base", "niah", [256], samples=1, backend="oracle", out=folder)
        >>> unspool.report(folder).save(folder + ".md").suffix
        '.md'
    """

    runs: Sequence[RunResults]

    def lines(self) -> list[str]:
        """The main results in words: each run's headline, then paired comparisons of all runs."""
        found = [line for run in self.runs for line in headline(run)]
        if len(self.runs) > 1:
            lines = lines_together(self.runs)
            measures = measures_for({line.label: line.scores for line in lines}, shared_context(self.runs))
            found += [*comparison_lines(compare(lines, measures)[:MAX_SENTENCES]), *not_paired(lines)]
        return found

    def print(self, console: Console) -> None:
        for line in self.lines():
            console.print(line, soft_wrap=True)

    def to_dict(self) -> dict[str, Any]:
        """Every number of the page, unrounded."""
        return report_values(self.runs)

    def renderers(self) -> Mapping[str, Callable[[], str]]:
        return {"html": lambda: render(self.runs), "markdown": lambda: render_markdown(self.runs)}


def report(runs: str | Path | Sequence[str | Path]) -> Report:
    """Gather the results of one run, or of several to compare.

    Args:
        runs: A run's folder, or a folder of `evaluate(..., out=...)`; or several of them.

    Returns:
        The report: print it, `save` it as a page, Markdown or JSON, or take `to_dict()`.

    Raises:
        ConfigError: A folder holds no results.

    Example:
        >>> import tempfile, unspool
        >>> folder = tempfile.mkdtemp()
        >>> _ = unspool.evaluate("asset:tiny-base", "niah", [256], samples=1, backend="oracle", out=folder)
        >>> report = unspool.report(folder)
        >>> report.save(folder + "/report.html").name
        'report.html'
    """
    paths = [runs] if isinstance(runs, str | Path) else list(runs)
    if not paths:
        raise ConfigError("`runs` is empty; give at least one run folder, such as runs/tiny.")
    return Report(runs=[gather(Path(path)) for path in paths])
