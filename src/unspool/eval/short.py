"""Short context, before and after: lm-eval's own tasks with a model of ours.

In: a model, names of lm-eval's tasks. Out: a summary with a cell per task.
Promise: prompts and scores are lm-eval's. It is not needed for anything else, so it is asked for only here.
Price: a model with a base per head attends through us, which knows no padding: one text at a time.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from unspool.base.errors import ConfigError
from unspool.eval.stats import Z
from unspool.eval.stretch import Stretch
from unspool.model.load import load_model
from unspool.model.tokenizer import first_line, load_tokenizer

TASKS = ("hellaswag", "mmlu", "arc_challenge", "winogrande", "gsm8k")
# A task may have several numbers; the first of these that it has is the one that papers print.
METRICS = ("acc_norm", "exact_match", "acc", "em", "f1", "pass@1", "score")
BATCH = 8


def run_short(
    ref: str,
    tasks: list[str],
    *,
    samples: int | None,
    include: str | None,
    device: torch.device,
    dtype: torch.dtype,
    stretch: Stretch | None = None,
) -> dict[str, Any]:
    """`include`: a folder with further task files of lm-eval, such as ones that read local data."""
    evaluator, managers, models = (_part(name) for name in ("evaluator", "tasks", "models.huggingface"))
    manager = managers.TaskManager(include_path=include)
    unknown = [name for name in tasks if not manager.match_tasks([name])]
    if unknown:
        raise ConfigError(f"--tasks {unknown[0]}: lm-eval knows no task of that name; `lm-eval ls tasks` lists them.")
    model = load_model(ref, device=device, dtype=dtype)
    name = Path(ref).name or ref
    if stretch is not None:
        stretch.apply(model)
        name = stretch.name_of(name)
    batch = BATCH
    if any(getattr(part, "head_inv_freq", None) is not None for part in model.modules()):
        batch = 1
    else:
        model.set_attn_implementation("sdpa")
    wrapped = models.HFLM(pretrained=model, tokenizer=load_tokenizer(ref), batch_size=batch)
    try:
        found = evaluator.simple_evaluate(model=wrapped, tasks=tasks, limit=samples, task_manager=manager)
    except (OSError, ConnectionError) as error:
        raise ConfigError(
            f"short: a task's data could not be read ({first_line(error)}). Without network, give a folder of task "
            "files that name local data: --path tasks=DIR."
        ) from error
    return {"model": name, "cells": cells(found)}


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
                "low": low,
                "high": high,
            }
        )
    return made


def _part(name: str) -> Any:
    try:
        return import_module(f"lm_eval.{name}")
    except ImportError as error:
        raise ConfigError(f"--suite short needs lm-eval ({first_line(error)}); pip install 'unspool[eval]'.") from error
