"""A suite of generated questions: one task with a context for every question, one with shared contexts, one from a set
of labelled items, one that needs a judge."""

import json
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from unspool.core.errors import ConfigError
from unspool.evals.prompts import encode
from unspool.evals.suite import Ask, Question, Task
from unspool.evals.suites.ruler import RulerEval
from unspool.evals.task_suite import TaskSuite

LABELS = ["red", "green", "blue"]


def _filler(tokenizer: Any, tokens: int, name: str) -> str:
    if tokens < 16:
        raise ConfigError("toy: too short a length; use at least 64.")
    text = f"{name}: " + "bela dora mita. " * (tokens // 8)
    assert len(encode(tokenizer, text)) <= tokens
    return text


def _lone(sources: Any, ask: Ask) -> Question:
    value = str(1000 + ask.index)
    end = f"\nWhat is the number of {ask.index}?"
    text = _filler(sources["tokenizer"], ask.length - ask.overhead - 8 - 60, f"The number of {ask.index} is {value}")
    return Question(
        context=text,
        question=end,
        prefix=" It is",
        references=(value,),
        depth=(ask.index % 10) / 9,
    )


def _shared(sources: Any, ask: Ask) -> Question:
    text = _filler(sources["tokenizer"], ask.length - ask.overhead - 8 - 60, f"Story {ask.index // 4}, end")
    return Question(context=text, question=f"\nQuestion {ask.index % 4}?", references=(f"answer{ask.index % 4}",))


def _labelled(sources: Any, ask: Ask) -> Question:
    label = LABELS[ask.index % 3]
    return Question(
        context=f"Item {ask.index} is {label}.", question=" Its colour:", references=(label,), meta={"label": label}
    )


def _judged(sources: Any, ask: Ask) -> Question:
    return Question(
        context=f"A story about number {ask.index}.",
        question=" What is it about?",
        references=(f"number {ask.index}",),
        meta={"question": "What is it about?", "key_points": [f"number {ask.index}"]},
    )


def _score(output: str, asked: Question) -> float:
    return float(asked.references[0] in output)


def _half(output: str, asked: Question) -> float:
    return 0.5 * _score(output, asked) + 0.5 * bool(output)


def _load(tokenizer: Any, paths: Mapping[str, str]) -> dict[str, Any]:
    return {"tokenizer": tokenizer, "paths": dict(paths)}


TOY = TaskSuite(
    name="ruler",
    title="RULER",
    config=RulerEval,
    version=3,
    tasks={
        "lone": Task(name="lone", metric="recall", answer_tokens=8, build=_lone, score=_score, chat=True),
        "shared": Task(name="shared", metric="F1", answer_tokens=8, build=_shared, score=_half),
        "labelled": Task(
            name="labelled",
            metric="accuracy",
            answer_tokens=4,
            build=_labelled,
            score=_score,
            size=lambda sources: 30,
            stratum=lambda sources, index: LABELS[index % 3],
        ),
        "judged": Task(
            name="judged", metric="judge", answer_tokens=16, build=_judged, score=lambda *_: None, judge="qa"
        ),
    },
    load=_load,
)


def entry(**options) -> RulerEval:
    return RulerEval.model_validate({"suite": "ruler", "lengths": [256, 512], "samples": 12, **options})


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def cell_of(summary: dict, task: str | None, length: int, depth: float | None = None) -> dict:
    found = [c for c in summary["cells"] if (c["task"], c["length"], c["depth"]) == (task, length, depth)]
    assert len(found) == 1
    return found[0]


class JsonAnswers(BaseHTTPRequestHandler):
    """Answers of a server in JSON, without a log."""

    def _send(self, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass
