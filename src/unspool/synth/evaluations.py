"""The texts of evaluations: what a recipe's `evals` ask, and files of the user's.

In: entries of `evals`, a tokenizer; files. Out: texts, for clean.py.
Price: every prompt is made once, as before scoring.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from unspool.base.errors import DataError
from unspool.base.progress import progress_bar
from unspool.data.documents import Bad, Document
from unspool.data.readers import jsonl, text
from unspool.data.readers.files import find_files
from unspool.data.sources import TextSource
from unspool.eval.config import Eval, KvEval, LossEval, TaskEval
from unspool.eval.plan import Plan, runnable
from unspool.eval.text import heldout_documents


def eval_texts(evals: Sequence[Eval], tokenizer: Any, *, seed: int, root: Path) -> Iterator[str]:
    """Questions, answers and contexts of all prompts, and all held-out text that haystacks are made of."""
    chosen = runnable(evals)
    for config in chosen:
        if not isinstance(config, KvEval | TaskEval):
            lengths = [config.length * config.samples] if isinstance(config, LossEval) else config.lengths
            yield from heldout_documents(config.text, root, tokens=max(lengths))
    plan = Plan(chosen, tokenizer, seed=seed, root=root)
    with progress_bar("evaluations to keep out", len(plan.units)) as advance:
        for unit in plan.units:
            if isinstance(unit.config, TaskEval):
                questions = plan.questions[id(unit.config)]
                for wanted in unit.wanted:
                    asked = questions.asked(wanted)
                    yield asked.context
                    yield asked.question
                    yield from asked.references
            elif not isinstance(unit.config, LossEval):
                for question in plan.prompt(unit).questions:
                    yield str(tokenizer.decode(question.ids, skip_special_tokens=True))
                    yield question.reference
            advance(1)


def file_texts(paths: Sequence[str]) -> Iterator[str]:
    """Texts of files; of JSON lines every text in a record, however deep."""
    for given in paths:
        for path in find_files(given, Path(), kind="text", endings=("",)):
            if path.name.endswith(jsonl.ENDINGS):
                yield from _record_texts(path)
            else:
                yield from _plain_texts(path)


def _plain_texts(path: Path) -> Iterator[str]:
    source = TextSource.model_validate({"kind": "text", "path": str(path)})
    for item in text.read(source, [path], 0):
        if not isinstance(item, Document):
            raise DataError(f"decontaminate.files: {path} cannot be read as text.")
        yield item.text


def _record_texts(path: Path) -> Iterator[str]:
    for found in jsonl.records(path, lambda _, record: list(_texts(record))):
        if isinstance(found, Bad):
            raise DataError(f"decontaminate.files: {path}, {found.record}: {found.detail}; correct or remove it.")
        yield from found


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _texts(one)
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)
