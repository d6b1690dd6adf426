"""LongBench v2: multiple-choice questions about long texts, from the user's file.

A text that is too long for a length is cut in the middle, as in the published code. The wording is our own, with the
published form of the answer: "The correct answer is (A)". Chance is 25%.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import model_validator

from unspool.evals.config import TaskEval
from unspool.evals.fill import Meter, fill, room
from unspool.evals.suite import Ask, Question, Task
from unspool.evals.suites.records import Record, UserData, read_records
from unspool.evals.task_suite import TaskSuite

LETTERS = "ABCD"
DATA = UserData(
    suite="longbench_v2",
    source="data.json of zai-org/LongBench-v2 on the Hub (or hub:zai-org/LongBench-v2)",
    fields=("context", "question", *(f"choice_{letter}" for letter in LETTERS), "answer"),
    more="answer is A, B, C or D; domain, difficulty and length are optional",
)
ANSWER_TOKENS = 16
HEAD = "Read the text, then answer the multiple-choice question about it.\n\n<text>\n"
ASK = '\n</text>\n\nQuestion: {question}\n{choices}\n\nAnswer with one sentence: "The correct answer is (letter)".\n'
PREFIX = "The correct answer is ("
_ANSWER = re.compile(r"correct answer is:? *\(?([A-D])\b")


@dataclass(frozen=True)
class Sources:
    meter: Meter
    records: list[Record]


def load(tokenizer: Any, paths: Mapping[str, str]) -> Sources:
    records = DATA.check(read_records(paths["data"], split="train"), paths["data"])
    for record in records:
        if str(record["answer"]).strip() not in tuple(LETTERS):
            raise DATA.error(paths["data"], record, f"answer {record['answer']!r} is not A, B, C or D")
    return Sources(Meter(tokenizer, [str(record["context"])[:4000] for record in records[:20]]), records)


def build(sources: Sources, ask: Ask) -> Question:
    meter, record = sources.meter, sources.records[ask.index]
    text, letter = str(record["context"]).strip(), str(record["answer"]).strip()
    choices = "\n".join(f"({one}) {record[f'choice_{one}']}" for one in LETTERS)
    asked = ASK.format(question=str(record["question"]).strip(), choices=choices)
    used = meter.piece(HEAD) + meter.piece(asked + PREFIX)

    def build_within(budget: int) -> Question:
        kept = meter.cut_middle(text, max(0, budget - used))
        return Question(
            context=HEAD + kept,
            question=asked,
            prefix=PREFIX,
            references=(letter,),
            items=tuple(f"{one})" for one in LETTERS),
            meta={
                "mode": ask.mode,
                "oracle": f"{letter})",
                "cut": len(kept) < len(text),
                "groups": [str(record[key]) for key in ("difficulty", "length", "domain") if record.get(key)],
            },
        )

    return fill(build_within, meter, room(ask, ANSWER_TOKENS), what="longbench_v2", length=ask.length)


def score(output: str, question: Question) -> float:
    found = _ANSWER.search((question.prefix + output).replace("*", ""))
    return float(found is not None and found[1] == question.references[0])


class LongBenchV2Eval(TaskEval):
    """LongBench v2: multiple-choice questions about long texts, from the user's file."""

    suite: Literal["longbench_v2"]

    @model_validator(mode="after")
    def _has_data(self) -> Self:
        DATA.check_paths(self.paths)
        return self


SUITE = TaskSuite(
    name="longbench_v2",
    title="LongBench v2",
    config=LongBenchV2Eval,
    version=1,
    tasks={
        "questions": Task(
            name="questions",
            metric="accuracy",
            answer_tokens=ANSWER_TOKENS,
            build=build,
            score=score,
            chat=True,
            size=lambda sources: len(sources.records),
            stratum=lambda sources, index: (
                sources.records[index].get("difficulty"),
                sources.records[index].get("length"),
            ),
        )
    },
    load=load,
)
