"""`unspool.judge` and `unspool.check_judge`: let a model grade answers, and compare its grades with human grades."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict, Unpack

from rich.console import Console

from unspool.core.config import lookup
from unspool.core.errors import ConfigError
from unspool.core.lock import lock_output
from unspool.core.result import Result
from unspool.evals.judge.run import (
    JUDGEMENTS,
    Agreement,
    Estimate,
    Judge,
    JudgeReplies,
    estimate,
    judge_folder,
    local_judge,
    measure_agreement,
    read_samples,
    replies_for,
    reply_tokens,
    scores_folders,
)
from unspool.models.location import model_path
from unspool.reporting.score_tables import print_scores

logger = logging.getLogger(__name__)


class JudgeSettings(TypedDict, total=False):
    """Which model judges: a server (`url` and `model_name`), or a `model` in this process."""

    url: str | None  # such as http://localhost:8000/v1
    model_name: str | None  # of the judge on the server
    model: str | None  # folder or Hub id of a judge in this process
    requests: int  # concurrent requests to the server; 8 by default
    timeout: float  # seconds to wait for a reply; 600 by default
    again: str | None  # unparsable: ask once more for replies that could not be parsed


@dataclass(frozen=True, kw_only=True)
class JudgeResult(Result):
    """Estimated requests and new scores of every judged folder, by the folder's name.

    Example:
        >>> import unspool
        >>> unspool.JudgeResult().to_dict()
        []
    """

    estimates: Mapping[str, Estimate] = field(default_factory=dict)
    summaries: Mapping[str, dict[str, Any]] = field(default_factory=dict)  # as in summary.json; none after a dry run

    def to_dict(self) -> list[dict[str, Any]]:
        return list(self.summaries.values())

    def print(self, console: Console) -> None:
        for summary in self.summaries.values():
            console.print(summary["model"], highlight=False, soft_wrap=True)
            print_scores(console, summary)


def judge(
    run: str | Path,
    *,
    dry_run: bool = False,
    price_in: float = 0.0,
    price_out: float = 0.0,
    **settings: Unpack[JudgeSettings],
) -> JudgeResult:
    """Let a model grade answers that no rule can score, by HELMET's protocols.

    Replies are cached next to the scores, so a killed call resumes and no request is sent twice. The grades replace the
    missing scores in the folder.

    Args:
        run: A run's folder, or a folder of `evaluate(..., out=...)`.
        dry_run: Only estimate the number of requests and their cost.
        price_in: Price of a million prompt tokens, for the estimate.
        price_out: Price of a million reply tokens.
        **settings: `url` and `model_name` of a server, or `model` in this process; `requests`, `timeout`, `again`.

    Returns:
        Estimates, and the new summaries unless `dry_run`.

    Raises:
        ConfigError: There are no scores in `run`, or no judge was given.
        DataError: The folder with the scores is damaged.

    Example:
        >>> import tempfile, unspool
        >>> folder = tempfile.mkdtemp()
        >>> _ = unspool.evaluate("asset:tiny-base", "niah", [256], samples=1, backend="oracle", out=folder)
        >>> result = unspool.judge(folder, url="http://localhost:8000/v1", model_name="judge", dry_run=True)
        >>> [found.calls for found in result.estimates.values()]  # niah is scored by a rule
        [0]
    """
    repeats = _repeats(settings)
    _check_settings(settings)
    folders = scores_folders(Path(run))  # before a judge is loaded
    chosen = _judge(settings)
    estimates, summaries = {}, {}
    with lock_output(Path(run)):
        for folder in folders:
            with replies_for(folder, chosen.name) as replies:
                planned = estimates[folder.name] = estimate(read_samples(folder), replies, again=repeats)
            price = f", about {planned.cost(price_in, price_out):.2f}" if price_in or price_out else ""
            logger.info(f"{folder.name}: {planned}{price}")
            if not dry_run:
                summaries[folder.name] = judge_folder(folder, chosen, again=repeats)
    return JudgeResult(estimates=estimates, summaries=summaries)


def check_judge(graded: str | Path, **settings: Unpack[JudgeSettings]) -> Agreement:
    """Compare a judge's grades with human grades from 0 to 3.

    Args:
        graded: JSONL with question, references, output and label (0 to 3). Replies are cached in a file next to it.
        **settings: `url` and `model_name` of a server, or `model` in this process; `requests`, `timeout`, `again`.

    Returns:
        The share of equal grades and Cohen's kappa, with n.

    Raises:
        ConfigError: No judge was given.
        DataError: A line of the file lacks a field.

    Example:
        >>> import unspool
        >>> try:
        ...     unspool.check_judge("graded.jsonl")
        ... except unspool.ConfigError as error:
        ...     print(str(error).split(";")[0])
        no judge was given
    """
    repeats = _repeats(settings)
    _check_settings(settings)
    chosen = _judge(settings)
    path = Path(graded)
    beside = path.with_name(f"{path.name}.{JUDGEMENTS}")
    with lock_output(beside), JudgeReplies(beside, chosen.name) as replies:
        return measure_agreement(path, chosen, replies, again=repeats)


def _repeats(settings: JudgeSettings) -> bool:
    again = settings.get("again")
    return again is not None and lookup({"unparsable": True}, again, kind="`again`")


def _check_settings(settings: JudgeSettings) -> None:
    url, model = settings.get("url"), settings.get("model")
    if url is None and model is None:
        raise ConfigError("no judge was given; give a server (`url` and `model_name`) or a `model`.")
    if url is not None and model is not None:
        raise ConfigError("`url` and `model` both give a judge; give one of them.")
    if url is not None and settings.get("model_name") is None:
        raise ConfigError("`url` needs `model_name`, the name of the judge on the server.")


def _judge(settings: JudgeSettings) -> Judge:
    from unspool.core.http_client import RetryPolicy
    from unspool.evals.backends.openai import Server

    tokens = reply_tokens(_repeats(settings))
    url, model, model_name = settings.get("url"), settings.get("model"), settings.get("model_name")
    if url is not None and model_name is not None:
        width = settings.get("requests", 8)
        server = Server(url=url, model=model_name, retry=RetryPolicy(seconds=settings.get("timeout", 600)), width=width)
        return Judge(name=model_name, ask=lambda prompt: server.chat(prompt, tokens), width=width)
    from unspool.evals.backends.transformers import ModelBackend  # import late: it loads torch
    from unspool.models.extend import pick_device, pick_dtype
    from unspool.models.weight_files import check_weights

    path = model_path(str(model), Path())
    check_weights(path)
    device = pick_device("auto")
    backend = ModelBackend(path, device=device, dtype=pick_dtype(None, device))
    return Judge(name=str(model), ask=local_judge(backend, tokens))
