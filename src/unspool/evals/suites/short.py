"""Run lm-eval tasks to get short-context scores, and write Unspool's tasks as lm-eval tasks.

Prompts and scores of short tasks come from lm-eval. Only this module needs lm-eval.
"""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from unspool.core.config import lookup
from unspool.core.errors import ConfigError
from unspool.core.http_client import check_url
from unspool.core.sizes import format_size
from unspool.core.stats import Z
from unspool.evals.backends.base import BackendOptions, build_backend, check_options
from unspool.evals.backends.openai import OpenAiBackend
from unspool.evals.eval_plan import EvalPlan
from unspool.evals.suite import Question
from unspool.evals.suites import SUITES
from unspool.evals.task_suite import PlannedTasks
from unspool.models.load import load_model
from unspool.models.location import first_line
from unspool.models.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

# A task may have several metrics. Use the first available one in this list, which papers report.
METRICS = ("acc_norm", "exact_match", "acc", "em", "f1", "pass@1", "pass_at_1", "score")
BATCH = 8


def run_short(
    options: BackendOptions, tasks: list[str], *, samples: int | None, include: str | None, sandboxed: bool = False
) -> dict[str, Any]:
    """Run lm-eval tasks (NAME or NAME:SHOTS) on a local model or a server. The summary has one cell per task.

    `include` is a folder with more lm-eval task files, for example tasks that read local data.
    """
    check_options(options)
    is_server = options.kind == "openai"
    if is_server and options.url is not None:
        check_url(options.url)
    evaluator, manager = _part("evaluator"), check_tasks(tasks, include)
    shots = dict(map(_shots, tasks))
    if sandboxed:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"  # without it, loading these tasks fails
    try:
        lm = _server_lm(options, manager.load(list(shots))["tasks"]) if is_server else _local_lm(options)
        found = evaluator.simple_evaluate(
            model=lm,
            tasks=[name if count is None else _with_shots(manager, name, count) for name, count in shots.items()],
            limit=samples,
            task_manager=manager,
            confirm_run_unsafe_code=sandboxed,
        )
    except (OSError, ConnectionError) as error:
        raise ConfigError(
            f"short: a task's data could not be read ({first_line(error)}). Without network, pass a folder of task "
            "files that use local data: `paths`, such as tasks=DIR."
        ) from error
    name = Path(options.model).name or options.model
    return {"model": name if options.rope is None else options.rope.name_of(name), "cells": cells(found)}


def check_tasks(tasks: Sequence[str], include: str | None) -> Any:
    """lm-eval's task manager. Raises ConfigError if lm-eval is missing or does not know a task."""
    manager = _part("tasks").TaskManager(include_path=include)
    unknown = [name for name, _ in map(_shots, tasks) if not manager.match_tasks([name])]
    if unknown:
        raise ConfigError(f"`tasks={unknown[0]!r}`: lm-eval has no such task; `lm-eval ls tasks` lists all tasks.")
    return manager


def _shots(task: str) -> tuple[str, int | None]:
    """Split NAME:SHOTS. Without SHOTS, lm-eval's default applies."""
    name, colon, count = task.partition(":")
    if colon and not (count.isascii() and count.isdigit()):
        raise ConfigError(f"`tasks={task!r}`: write NAME or NAME:SHOTS, such as gsm8k:4.")
    return name, int(count) if colon else None


def _with_shots(manager: Any, name: str, count: int) -> Any:
    """A task or group of lm-eval with `count` solved examples per prompt."""
    loaded = manager.load([name])
    for task in loaded["tasks"].values():
        task.set_config(key="num_fewshot", value=count)
    return loaded.get("groups", {}).get(name) or loaded["tasks"][name]


def _local_lm(options: BackendOptions) -> Any:
    assert options.device is not None and options.dtype is not None, "the command sets both"
    models = _part("models.huggingface")
    model = load_model(options.model, device=options.device, dtype=options.dtype)
    if options.rope is not None:
        options.rope.apply(model)
    batch = BATCH
    # Models with a RoPE base per head need Unspool's attention. It computes left-padded rows one by one.
    if any(getattr(part, "head_inv_freq", None) is not None for part in model.modules()):
        batch = 1
    else:
        model.set_attn_implementation("sdpa")
    return models.HFLM(pretrained=model, tokenizer=load_tokenizer(options.model), batch_size=batch)


def _server_lm(options: BackendOptions, tasks: Mapping[str, Any]) -> Any:
    """lm-eval's interface to a server. Raises ConfigError if a task needs more than the server supports."""
    from unspool.evals.suites.short_server import build_lm

    backend = build_backend(options)
    assert isinstance(backend, OpenAiBackend)
    backend.connect()
    by_kind = {task.OUTPUT_TYPE: name for name, task in tasks.items()}
    others = [name for kind, name in by_kind.items() if kind != "generate_until"]
    if others and not backend.has_losses:
        raise ConfigError(
            f"`suite='short'`: the task {others[0]} needs log-probabilities of token ids, which {backend.server.url} "
            "does not return; choose tasks that generate text, such as `tasks='gsm8k'`, or score the local model with "
            "`backend='transformers'`."
        )
    if "loglikelihood_rolling" in by_kind:
        raise ConfigError(
            f"`suite='short'`: the task {by_kind['loglikelihood_rolling']} needs the likelihood of whole documents; "
            "use `suite='perplexity'` or `backend='transformers'`."
        )
    return build_lm(_part("api.model").TemplateLM, backend)


def cells(found: dict[str, Any]) -> list[dict[str, Any]]:
    """One cell per task or group of lm-eval's results."""
    made = []
    for task, numbers in found["results"].items():
        known = {name.split(",")[0]: name for name in numbers if "_stderr" not in name}
        metric = next((name for name in METRICS if name in known), None)
        value = None if metric is None else numbers[known[metric]]
        error = None if metric is None else numbers.get(known[metric].replace(metric, f"{metric}_stderr", 1))
        half = Z * error if isinstance(error, int | float) else None
        low, high = (None, None) if value is None or half is None else (max(0.0, value - half), min(1.0, value + half))
        made.append(
            {
                "suite": "short",
                "task": task,
                "metric": metric or "none",
                "length": 0,
                "depth": None,
                "value": value,
                "n": int(found.get("n-samples", {}).get(task, {}).get("effective", 0)),
                "shots": found.get("n-shot", {}).get(task),
                "low": low,
                "high": high,
            }
        )
    return made


def _part(name: str) -> Any:
    try:
        return import_module(f"lm_eval.{name}")
    except ImportError as error:
        raise ConfigError(
            f"`suite='short'` needs lm-eval ({first_line(error)}); pip install 'unspool[eval]'."
        ) from error


# lm-eval loads this file by its path and looks the function up by name.
SCORER = '''"""Scores of these tasks, computed by Unspool."""

from unspool.evals.suites.short import process_results

__all__ = ["process_results"]
'''


def write_tasks(plan: EvalPlan, out_dir: Path) -> list[str]:
    """Write every task at every length. Returns the names of the lm-eval tasks."""
    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / "scorer.py").write_text(SCORER, encoding="utf-8")
    names = []
    for planned in plan.evals:
        assert isinstance(planned, PlannedTasks), "the caller refuses suites without tasks"
        for length in sorted(planned.config.lengths):
            for task in planned.tasks.values():
                name = f"unspool_{planned.suite.name}_{task.name}_{format_size(length).lower()}"
                questions = [one for one in planned.question_ids if (one.task, one.length) == (task.name, length)]
                docs = [_doc(planned.suite.name, task.name, planned.question(one)) for one in questions]
                data = out_dir / f"{name}.jsonl"
                data.write_text("".join(json.dumps(doc) + "\n" for doc in docs), encoding="utf-8")
                (out_dir / f"{name}.yaml").write_text(_yaml(name, data, planned.answer_tokens(task)), encoding="utf-8")
                names.append(name)
    return names


def process_results(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Score one answer; called by lm-eval. Returns {} if only a judge can score it."""
    task = lookup(lookup(SUITES, doc["suite"], kind="suite").tasks, doc["task"], kind="task")
    asked = Question(
        context=doc["context"],
        question=doc["question"],
        prefix=doc["prefix"],
        references=tuple(doc["references"]),
        depth=doc["depth"],
        meta=json.loads(doc["meta"]),
    )
    value = task.score(results[0], asked)
    return {} if value is None else {"score": float(value)}


def _doc(suite: str, task: str, asked: Question) -> dict[str, Any]:
    return {
        "suite": suite,
        "task": task,
        "context": asked.context,
        "question": asked.question,
        "prefix": asked.prefix,
        "references": list(asked.references),
        "depth": asked.depth,
        # Store as text, because columns of a dataset must have the same type in all lines.
        "meta": json.dumps(dict(asked.meta)),
    }


def _yaml(name: str, data: Path, answer_tokens: int) -> str:
    options = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data.resolve())}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{context}}{{question}}",
        "gen_prefix": "{{prefix}}",
        "doc_to_target": "{{references[0]}}",
        "target_delimiter": "",
        "generation_kwargs": {"until": [], "do_sample": False, "max_gen_toks": answer_tokens},
        "metric_list": [{"metric": "score", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1},
    }
    # yaml cannot dump lm-eval's own tag.
    return yaml.safe_dump(options, sort_keys=False) + "process_results: !function scorer.process_results\n"
