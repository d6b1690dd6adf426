"""`unspool.evaluate`: score a model by context length."""

import io
import json
import logging
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from unspool.core.artifacts import read_manifest, write_atomic
from unspool.core.console import PlainConsole
from unspool.core.errors import ConfigError
from unspool.core.formatting import format_duration
from unspool.core.html import element
from unspool.core.lock import lock_output
from unspool.core.sizes import format_size
from unspool.evals.backends.base import Backend, BackendOptions, build_backend
from unspool.evals.eval_plan import EvalPlan
from unspool.evals.eval_request import TASK_SUITES, EvalRequest, EvalSettings, Length, check_request
from unspool.evals.one_look import MAX_SAMPLES, OneLook, default_folder, look_evals, look_lengths
from unspool.evals.run import Scoring, compare_backends, recorded_backend, score
from unspool.evals.suites import SUITES
from unspool.models.location import short_name
from unspool.models.weight_files import check_weights
from unspool.reporting.look_page import write_look
from unspool.reporting.page import write_report
from unspool.reporting.score_tables import COLUMNS, print_look, print_scores, table_rows

if TYPE_CHECKING:
    import pandas
    from rich.console import Console
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

BUDGET = "10m"
UNITS = {"s": 1, "m": 60, "h": 3600}
READS_WEIGHTS = ("transformers", "vllm")  # of the backends; the others need only the tokenizer


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """Scores with n and 95% intervals. `str(result)` is the table; notebooks display it.

    Example:
        >>> import unspool
        >>> result = unspool.evaluate("asset:tiny-base", "niah", [256], samples=1, backend="oracle")
        >>> result.cells()[0]["value"]
        1.0
    """

    summary: Mapping[str, Any]  # as in summary.json
    folder: Path  # samples.jsonl, summary.json and prompts.jsonl
    scratch: tempfile.TemporaryDirectory[str] | None = None  # holds the folder unless `out` was given

    @property
    def effective_length(self) -> int | None:
        """Longest tested length with 85% of the short-length score; None if not measured."""
        found = self.summary.get("look", {}).get("effective_length")
        return None if found is None else int(found["value"])

    def print(self, console: "Console") -> None:
        if "look" in self.summary:
            print_look(console, self.summary["look"])
        else:
            print_scores(console, self.summary)

    def table(self) -> str:
        """The scores as text, one line per suite, length and depth.

        Example:
            >>> import unspool
            >>> result = unspool.evaluate("asset:tiny-base", "niah", [256], samples=1, backend="oracle")
            >>> "100%" in result.table()
            True
        """
        out = io.StringIO()
        self.print(PlainConsole(file=out, width=120))
        return out.getvalue()

    __str__ = table

    def cells(self) -> list[dict[str, Any]]:
        """One dict per suite, task, length and depth: metric, value, low, high, n."""
        return [dict(cell) for cell in self.summary["cells"]]

    def to_frame(self) -> "pandas.DataFrame":
        """The cells as a pandas data frame.

        Raises:
            ConfigError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ConfigError(
                "to_frame needs pandas: run `pip install pandas`, or use cells(), which needs no package."
            ) from error
        return pandas.DataFrame(self.cells())

    def save(self, path: str | Path) -> Path:
        """Write an HTML page (`.html`), the summary (`.json`) or a folder with every answer. Returns the path.

        Example:
            >>> import tempfile, unspool
            >>> result = unspool.evaluate("asset:tiny-base", "niah", [256], samples=1, backend="oracle")
            >>> result.save(tempfile.mkdtemp() + "/scores.json").name
            'scores.json'
        """
        path = Path(path)
        if path.suffix in (".html", ".htm"):
            if "look" in self.summary:
                write_look(self.summary, path)
            else:
                write_report([self.folder], path)
        elif path.suffix == ".json":
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, json.dumps(self.summary, indent=1) + "\n")
        else:
            check_folder(path)
            if path.absolute() != self.folder.absolute():
                shutil.copytree(self.folder, path, dirs_exist_ok=True)
        return path

    def _repr_html_(self) -> str:
        def row(name: str, texts: Sequence[str]) -> Any:
            return element("tr", *(element(name, text) for text in texts))

        return element("table", row("th", COLUMNS), *(row("td", each) for each in table_rows(self.summary)))


def evaluate(
    model: "str | Path | PreTrainedModel",
    suite: str | Sequence[str] | None = None,
    lengths: Sequence[Length] | None = None,
    *,
    tokenizer: Any = None,
    out: str | Path | None = None,
    **settings: Unpack[EvalSettings],
) -> EvalResult:
    """Score a model by suite and context length, or measure its effective context length.

    Without `suite` and `lengths`, it measures the effective length: it asks questions of three kinds at doubling
    lengths up to the claimed context, within `budget`.

    Args:
        model: A model folder, a run, a Hub id, a model of `unspool.load`, or the address of a server
            (`http://localhost:8000/v1`), which needs `model_name` and `tokenizer`.
        suite: One or several of niah, key_value, perplexity, longppl, mrcr, graphwalks, indirect_needle, ruler,
            helmet, lveval, infbench, nocha, longbench_v2, oolong; or short.
        lengths: Context lengths in tokens, such as `["4K", "32K"]`.
        tokenizer: The tokenizer of a server's model, by folder or Hub id, or of a model in memory.
        out: Folder for the answers and scores; a killed evaluation resumes from it. By default nothing is kept.
        **settings: `samples`, `tasks`, `preset`, `rope`, `seed`, `device`, `processes`, `backend`, … (`EvalSettings`);
            the same as the options of `unspool eval`.

    Returns:
        The scores: print them, or take `table()`, `cells()`, `to_frame()`, `save(…)`.

    Raises:
        ConfigError: An argument is invalid, or two arguments cannot be combined.

    Example:
        >>> import unspool
        >>> result = unspool.evaluate("asset:tiny-base", suite="niah", lengths=[256], samples=2, value="words")
        >>> [cell["n"] for cell in result.cells() if cell["depth"] is None]
        [2]
    """
    address = isinstance(model, str) and model.startswith(("http://", "https://"))
    if address and tokenizer is None:
        raise ConfigError(
            f"evaluate: {model} is a server; pass tokenizer=…, the folder or Hub id of the server's model."
        )
    if address:
        settings |= {"url": str(model), "backend": "openai"}
    live = None if isinstance(model, str | Path) else model
    ref = str(tokenizer if address else model) if live is None else live.name_or_path
    request = check_request(ref, suite, lengths, settings)
    out_dir = None if out is None else Path(out)
    if live is None:
        return _run(request, _checked_options(request), None, out_dir)
    options = request.options()
    for name in ("backend", "rope", "processes"):
        if name in settings:
            raise ConfigError(
                f"evaluate: {name} works only with a model on disk, and this model is in memory; remove {name}."
            )
    from unspool.evals.backends.transformers import LiveBackend  # import late: it loads torch

    backend = LiveBackend(live, tokenizer)
    with backend.answering():
        return _run(request, replace(options, weights=backend.weights), backend, out_dir)


def _checked_options(request: EvalRequest) -> BackendOptions:
    """Check the model's files, which are hashed in any case, before prompts are built; return the backend's options."""
    options = request.options()
    if options.kind in READS_WEIGHTS:
        check_weights(request.model)
    return options


def _run(request: EvalRequest, options: BackendOptions, backend: Backend | None, out: Path | None) -> EvalResult:
    if request.is_short:
        if backend is not None:
            raise ConfigError("evaluate: suite `short` needs a model on disk; export this model first.")
        return _score_short(request, options, out)
    backend = backend or build_backend(options)
    if request.is_look:
        return _look(request, options, backend, out)
    backend.connect(None if out is None else recorded_backend(out))
    evals = request.evals
    if not request.named_suites and not backend.has_losses:
        evals = [config for config in evals if not SUITES[config.suite].needs_losses]
    name = short_name(request.model)
    scratch = tempfile.TemporaryDirectory(prefix="unspool-") if out is None else None
    folder = out or Path(scratch.name if scratch else "") / Path(name).name
    with lock_output(folder):
        check_folder(folder)
        scoring = Scoring(
            model=name if request.rope is None else request.rope.name_of(name),
            model_hash=options.identity,
            evals=evals,
            seed=request.seed,
            out_dir=folder,
            root=Path.cwd(),
        )
        return EvalResult(summary=score(scoring, backend), folder=folder, scratch=scratch)


def _score_short(request: EvalRequest, options: BackendOptions, out: Path | None) -> EvalResult:
    from unspool.evals.suites.short import run_short
    from unspool.evals.suites.short_suite import chosen_tasks

    given = request.settings
    sandboxed = given.get("sandboxed", False)
    scratch = tempfile.TemporaryDirectory(prefix="unspool-") if out is None else None
    folder = out or Path(scratch.name if scratch else "") / "short"
    with lock_output(folder):
        names = chosen_tasks(list(given.get("tasks") or []), given.get("preset"), sandboxed=sandboxed)
        include = dict(given.get("paths") or {}).get("tasks")
        summary = run_short(options, names, samples=given.get("samples"), include=include, sandboxed=sandboxed)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / "summary.json", json.dumps(summary, indent=1) + "\n")
    return EvalResult(summary=summary, folder=folder, scratch=scratch)


def _look(request: EvalRequest, options: BackendOptions, backend: Backend, out: Path | None) -> EvalResult:
    """Measure the effective length within the time budget."""
    name, given = short_name(request.model), request.settings
    seconds = parse_duration(given.get("budget") or BUDGET)
    folder = out or default_folder(name, options.identity)
    backend.connect()
    context = backend.context_limit
    lengths = look_lengths(None if context is None else context.tokens)
    claimed = f"context {context.tokens} ({context.source})" if context else "context unknown"
    logger.info(
        f"{name}: {claimed}; testing {format_size(lengths[0])} to {format_size(lengths[-1])} tokens for at most "
        f"{format_duration(seconds)}"
    )
    with lock_output(folder):
        check_folder(folder)
        scoring = Scoring(
            model=name if options.rope is None else options.rope.name_of(name),
            model_hash=options.identity,
            evals=look_evals(lengths, samples=given.get("samples") or MAX_SAMPLES, text=given.get("text")),
            seed=request.seed,
            out_dir=folder,
            root=Path.cwd(),
        )
        try:
            summary = OneLook(scoring, backend, budget=seconds).run()
        except KeyboardInterrupt:
            logger.warning(f"interrupted; answers so far are in {folder}.work; run the same command again to resume")
            raise
    return EvalResult(summary=summary, folder=folder)


def compare_with_transformers(
    model: str, suite: Sequence[str] | None, lengths: Sequence[Length] | None, **settings: Unpack[EvalSettings]
) -> dict[str, Any]:
    """Compare 20 answers of a backend with the answers of transformers."""
    request = check_request(model, suite, lengths, settings, may_look=False)
    check_weights(request.model)
    options = request.options()
    first = build_backend(options)
    first.connect(None)
    evals = request.evals
    if not request.named_suites and not first.has_losses:
        evals = [config for config in evals if not SUITES[config.suite].needs_losses]
    ours = BackendOptions(model=request.model, rope=request.rope, device=options.device, dtype=options.dtype)
    plan = EvalPlan(evals, first.tokenizer, seed=request.seed, root=Path.cwd(), form=first.form)
    return compare_backends(plan, first, build_backend(ours))


def write_lm_eval_tasks(request: EvalRequest, folder: Path) -> list[str]:
    """Write suites as lm-eval tasks into a folder. Returns the task names."""
    from unspool.evals.suites.short import write_tasks
    from unspool.models.tokenizer import load_tokenizer

    if not all(SUITES[config.suite].tasks for config in request.evals):
        raise ConfigError(f"`lm_eval` works only with suites that have tasks: {', '.join(TASK_SUITES)}.")
    plan = EvalPlan(request.evals, load_tokenizer(request.model), seed=request.seed, root=Path.cwd())
    return write_tasks(plan, folder)


def parse_duration(text: str) -> float:
    """Seconds of a duration such as `90s`, `10m` or `1.5h`; ConfigError for anything else."""
    found = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([smh])", text.strip().lower())
    seconds = float(found[1]) * UNITS[found[2]] if found else 0.0
    if not 1 <= seconds <= 30 * 86_400:
        raise ConfigError(f"`budget` {text!r} is not a duration from 1s to 720h; write for example 90s, 10m or 2h.")
    return seconds


def check_folder(out_dir: Path) -> None:
    """Refuse a folder that holds other files, because the scores replace the whole folder."""
    if not out_dir.exists():
        return
    holds_scores = (read_manifest(out_dir) or {}).get("kind") == "scores"
    if not out_dir.is_dir() or (any(out_dir.iterdir()) and not holds_scores):
        raise ConfigError(
            f"{out_dir} exists and is not a folder of scores; give a new folder, because this one would be replaced."
        )
