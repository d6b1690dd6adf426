"""Our long tasks as tasks of lm-eval: a folder of task files with frozen prompts, for `lm-eval --include_path`.

In: a plan. Out: one YAML and one JSONL per task and length, and the few lines of Python that lm-eval calls to score.
Promise: prompts are those of `prompts.jsonl`, as text, and scores are the suite's own.
Price: lm-eval tokenises the text itself, so a model with another tokenizer reads another number of tokens.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from unspool.base.lookup import lookup
from unspool.base.sizes import format_size
from unspool.eval.plan import Plan
from unspool.eval.suites import SUITES
from unspool.eval.task import Asked

# lm-eval loads this file by its path and looks the function up by name.
SCORER = '''"""Scores of these tasks, as Unspool gives them."""

from unspool.eval.lm_tasks import process_results

__all__ = ["process_results"]
'''


def write_tasks(plan: Plan, out_dir: Path) -> list[str]:
    """The names of the tasks written."""
    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / "scorer.py").write_text(SCORER, encoding="utf-8")
    names = []
    for questions in plan.questions.values():
        for length in sorted(questions.config.lengths):
            for task in questions.tasks.values():
                name = f"unspool_{questions.suite.name}_{task.name}_{format_size(length).lower()}"
                wanted = [one for one in questions.wanted if (one.task, one.length) == (task.name, length)]
                docs = [_doc(questions.suite.name, task.name, questions.asked(one)) for one in wanted]
                data = out_dir / f"{name}.jsonl"
                data.write_text("".join(json.dumps(doc) + "\n" for doc in docs), encoding="utf-8")
                (out_dir / f"{name}.yaml").write_text(
                    _yaml(name, data, questions.answer_tokens(task)), encoding="utf-8"
                )
                names.append(name)
    return names


def process_results(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Called by lm-eval for every answer; what only a judge can score gives nothing."""
    task = lookup(lookup(SUITES, doc["suite"], kind="suite").tasks, doc["task"], kind="task")
    asked = Asked(
        context=doc["context"],
        question=doc["question"],
        prefix=doc["prefix"],
        references=tuple(doc["references"]),
        depth=doc["depth"],
        meta=json.loads(doc["meta"]),
    )
    value = task.score(results[0], asked)
    return {} if value is None else {"score": float(value)}


def _doc(suite: str, task: str, asked: Asked) -> dict[str, Any]:
    return {
        "suite": suite,
        "task": task,
        "context": asked.context,
        "question": asked.question,
        "prefix": asked.prefix,
        "references": list(asked.references),
        "depth": asked.depth,
        # As text, since the columns of a data set must be alike in all lines and these are not.
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
    # The tag is lm-eval's own and cannot be dumped.
    return yaml.safe_dump(options, sort_keys=False) + "process_results: !function scorer.process_results\n"
