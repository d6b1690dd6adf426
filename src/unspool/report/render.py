"""Write the report: one HTML file that needs nothing else, from the result files of one or several runs.

Promise: no network, no scripts (a content policy in the page forbids both), every text from a file
escaped, the file replaced in one step.
"""

from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from unspool.base.errors import ConfigError
from unspool.base.html import templates_in, write_html
from unspool.report.bars import bar_key
from unspool.report.charts import MODEL_STYLES, heat_scale, swatch
from unspool.report.gather import gather
from unspool.report.results import RunResults
from unspool.report.view import page_view
from unspool.report.wording import plain_text, unbroken


def write_report(run_dirs: list[Path], out_file: Path) -> None:
    """One page for one run, or for several with a comparison on top."""
    if not run_dirs:
        raise ConfigError("A report needs at least one run folder, such as runs/tiny.")
    check_file(out_file, "report.html")
    write_html(out_file, render([gather(run_dir) for run_dir in run_dirs]))


def check_file(out_file: Path, name: str) -> None:
    if out_file.is_dir():
        raise ConfigError(f"{out_file} is a folder. Name the file to write, such as {out_file / name}.")


def render(runs: Sequence[RunResults]) -> str:
    environment = templates_in(Path(__file__).parent)
    # Beside escaping: no text may hide or turn around what stands next to it.
    environment.finalize = lambda value: (
        plain_text(value) if isinstance(value, str) and not isinstance(value, Markup) else value
    )
    environment.filters["unbroken"] = unbroken
    environment.globals.update(swatch=swatch, bar_key=bar_key, heat_scale=heat_scale, styles=MODEL_STYLES)
    return environment.get_template("page.html.j2").render(page=page_view(runs))
