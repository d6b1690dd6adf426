"""OOLONG: questions that need counting over a whole long text, from the user's file.

Records of OOLONG-synth have an `answer_type`, those of OOLONG-real do not. Texts are never cut, because every part
counts: a question is asked at a length if it needs more than half of its tokens. Both kinds are scored as published:
numbers get 0.75 to the power of their error, lists the share of items found, other answers must be equal.

`reference` reads answers like the published code: the text after the last colon, or for OOLONG-real the text in
\\boxed{}. `fixed` also ignores case and a final period, and finds an answer that is followed by more text.
"""

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any, Literal, Self

from pydantic import model_validator

from unspool.evals.config import TaskEval
from unspool.evals.fill import Meter
from unspool.evals.heldout import CHARS_PER_TOKEN
from unspool.evals.suite import Ask, Question, Task
from unspool.evals.suites.records import Record, UserData, read_records
from unspool.evals.task_suite import TaskSuite

DATA = UserData(
    suite="oolong",
    source="a file of oolongbench/oolong-synth or oolongbench/oolong-real on the Hub, or hub:oolongbench/oolong-synth",
    fields=("context_window_text", "question", "answer"),
    more="records of OOLONG-synth also have answer_type, such as ANSWER_TYPE.NUMERIC, and task_group",
)
ANSWER_TOKENS = 64
NUMBER_DECAY = 0.75
COMPARISONS = ("more common", "less common", "same frequency")
DATES = ("%Y-%m-%d", "%m/%d/%Y", "%B %d, %Y", "%b %d, %Y", "%d %B %Y", "%d %b %Y")
_DATE = re.compile(r"\[?datetime\.date\((\d+), (\d+), (\d+)\)\]?")
_CUED = re.compile(r"(?:answer|label|user|date|month)\W{0,3}:(.*)", re.IGNORECASE)
_BOXED = re.compile(r"\\boxed\{+(?:\\text\{)?([^}]*)\}")

Answer = int | str | list[str] | date


@dataclass(frozen=True)
class Sources:
    meter: Meter
    records: list[Record]


def load(tokenizer: Any, paths: Mapping[str, str]) -> Sources:
    records = DATA.check(read_records(paths["data"]), paths["data"])
    for record in records:
        try:
            _gold(record["answer"], _kind(record))
        except (ValueError, SyntaxError, IndexError, RecursionError, MemoryError) as error:
            raise DATA.error(paths["data"], record, f"answer {record['answer']!r} cannot be read ({error})") from error
    return Sources(Meter(tokenizer, [str(record["context_window_text"])[:4000] for record in records[:20]]), records)


def tokens(sources: Sources, index: int, most: int) -> int:
    """Return the tokens of a question with its text. Counts only texts that may have at most `most` tokens."""
    text, question = _texts(sources.records[index])
    if len(text) > CHARS_PER_TOKEN * most:
        return most + 1
    return sources.meter.piece(text) + sources.meter.piece(question)


def _texts(record: Record) -> tuple[str, str]:
    return f"{str(record['context_window_text']).strip()}\n\n", f"{str(record['question']).strip()}\n"


def build(sources: Sources, ask: Ask) -> Question:
    record = sources.records[ask.index]
    text, question = _texts(record)
    kind = _kind(record)
    gold = _gold(record["answer"], kind)
    group = record.get("task_group") or record.get("question_type")
    references = tuple(gold) if isinstance(gold, list) else (str(gold),)
    oracle = f"Answer: {gold}" if kind else f"\\boxed{{{', '.join(references)}}}"
    return Question(
        context=text,
        question=question,
        references=references,
        meta={
            "mode": ask.mode,
            "answer": record["answer"],
            "answer_type": kind,
            "oracle": oracle,
            **({"groups": [str(group)]} if group else {}),
        },
    )


def _kind(record: Record) -> str:
    """Return the answer type of a record of OOLONG-synth, else ""."""
    return str(record.get("answer_type") or "")


def _gold(answer: Any, kind: str) -> Answer:
    if not kind:
        return [str(one) for one in answer] if isinstance(answer, list) else _parse_real(str(answer))
    found = _DATE.search(str(answer))
    if found is not None:
        return date(*map(int, found.groups()))
    listed = ast.literal_eval(answer) if isinstance(answer, str) and answer.startswith("[") else answer
    first = listed[0] if isinstance(listed, list) else listed
    return first if isinstance(first, int) else str(first)


def _parse_real(text: str) -> int | str | list[str]:
    try:
        return int(text)
    except ValueError:
        parts = [part.strip() for part in text.split(",") if part.strip()]
        return parts if "," in text else text.strip()


def score(output: str, question: Question) -> float:
    kind, fixed = question.meta["answer_type"], question.meta["mode"] == "fixed"
    gold = _gold(question.meta["answer"], kind)
    if not kind:
        return _score_real(output, gold, fixed=fixed)
    given = _cued(output) if fixed else _after_colon(output)
    if _same(given, str(gold), fixed=fixed):
        return 1.0
    comparison = next((phrase for phrase in COMPARISONS if phrase in given.lower()), None)
    if comparison is not None:
        return float(comparison in str(gold))
    if isinstance(gold, date):
        return float(_read_date(given) == gold)
    return _score_number(given, gold) if kind.endswith("NUMERIC") else 0.0


def _score_real(output: str, gold: Answer, *, fixed: bool) -> float:
    boxed = _BOXED.search(output)
    if boxed is None and not fixed:
        return float(isinstance(gold, str) and _same(output, gold, fixed=True))
    given = _parse_real(boxed[1] if boxed is not None else _cued(output))
    if isinstance(gold, int):
        return _score_number(str(given), gold)
    if isinstance(gold, list):
        found = set(given) if isinstance(given, list) else set()
        return len(found & set(gold)) / len(gold)
    return float(isinstance(given, str) and _same(given, str(gold), fixed=True))


def _after_colon(output: str) -> str:
    """Return what the published code takes as the answer of OOLONG-synth."""
    if ":" in output:
        return output.split(":")[-1].strip().translate(str.maketrans("", "", "*[]"))
    return output if len(output) < 20 else output.split()[-1]


def _cued(output: str) -> str:
    """Return the answer on the last line with a cue such as "Answer:", else the first line."""
    lines: Sequence[str] = _CUED.findall(output) or output.strip().split("\n")[:1]
    return lines[-1].strip(" *[]'\"`.") if lines else ""


def _same(given: str, gold: str, *, fixed: bool) -> bool:
    return given.strip().rstrip(".").lower() == gold.strip().lower() if fixed else given == gold


def _score_number(given: str, gold: Answer) -> float:
    try:
        return float(NUMBER_DECAY ** abs(int(given) - int(str(gold))))
    except ValueError:
        return 0.0


def _read_date(text: str) -> date | None:
    for form in DATES:
        try:
            return datetime.strptime(text.strip(), form).date()
        except ValueError:
            continue
    return None


class OolongEval(TaskEval):
    """OOLONG: questions that need counting over a whole long text, from the user's file."""

    suite: Literal["oolong"]

    @model_validator(mode="after")
    def _has_data(self) -> Self:
        DATA.check_paths(self.paths)
        return self


SUITE = TaskSuite(
    name="oolong",
    title="OOLONG",
    config=OolongEval,
    version=1,
    tasks={
        "questions": Task(
            name="questions",
            metric="score",
            answer_tokens=ANSWER_TOKENS,
            build=build,
            score=score,
            chat=True,
            size=lambda sources: len(sources.records),
            stratum=lambda sources, index: sources.records[index].get("task_group"),
            tokens=tokens,
        )
    },
    load=load,
)
