"""HELMET's questions, reproduced from its files with the draws and formats of its loaders (seed 42)."""

import hashlib
import json
import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from unspool.core.errors import ConfigError, DataError
from unspool.core.rng import rng_for
from unspool.evals.suites.helmet import alce, icl, rerank
from unspool.evals.suites.helmet.data import BOOKS, CITE, DEMO, LABELS, POPULAR, RAG
from unspool.evals.suites.helmet.helmet_clone import LENGTHS, NEEDLES, SHOTS, Clone, Filled, Prompts
from unspool.evals.suites.records import Record, first_field, read_records

SEED, TESTS = 42, 100


def load(task: str, clone: Clone, length: int) -> Prompts:
    return _LOADERS[task](task, clone, length)


def shuffled(count: int, seed: int) -> list[int]:
    """Order of `count` rows after Hugging Face's `Dataset.shuffle`."""
    return [int(at) for at in np.random.default_rng(seed).permutation(count)]


def seed_of(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) % 2**31


def _lines(path: Path, fields: Sequence[str]) -> list[tuple[int, Record]]:
    """(offset, selected fields) of a file's records, because files have up to 4 GB."""
    found: list[tuple[int, Record]] = []
    with path.open("rb") as file:
        offset = 0
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
                found.append((offset, {name: row[name] for name in fields if name in row}))
            except (ValueError, TypeError) as error:
                raise DataError(f"{path}, line {number}: not a JSON object ({error}); correct the line.") from error
            offset += len(line)
    if not found:
        raise DataError(f"{path}: no records; expected one JSON object per line.")
    return found


def _row(path: Path, offset: int) -> Record:
    with path.open("rb") as file:
        file.seek(offset)
        found: Record = json.loads(file.readline())
    return found


def _draw_questions(rows: Sequence[tuple[int, Record]], key: str) -> list[int]:
    """Draw HELMET's 100 questions. All of their rows are used, one for each depth."""
    keys = sorted({row[key] for _, row in rows})
    chosen = set(random.Random(SEED).sample(keys, min(TESTS, len(keys))))
    return [offset for offset, row in rows if row[key] in chosen]


def _mixed(prompts: Prompts) -> Prompts:
    """Shuffle prompts, so that a short run covers many questions and all depths."""
    return [prompts[at] for at in rng_for(0, "helmet released", len(prompts)).permutation(len(prompts))]


def _first_of_each(rows: Sequence[Record], order: Sequence[int], key: str, count: int) -> list[Record]:
    found: dict[Any, Record] = {}
    for at in order:
        found.setdefault(rows[at][key], rows[at])
        if len(found) == count:
            break
    return list(found.values())


def _load_rag(task: str, clone: Clone, length: int) -> Prompts:
    words, path = clone.words(task), clone.file(task, length)
    rows = _lines(path, ("id", "question", "s_pop"))
    demos = [dict(row) for row in read_records(str(clone.demo_file(task)))]
    if task == "popqa":
        rows = [(offset, row) for offset, row in rows if math.log10(row["s_pop"]) < POPULAR]
        demos = [row for row in demos if math.log10(row["s_pop"]) < POPULAR]
    key = "id" if "id" in rows[0][1] else "question"

    def written(passages: Sequence[Record]) -> str:
        return "\n\n".join(words["passage_template"].format(**passage) for passage in passages)

    def filled(offset: int) -> Filled:
        row = _row(path, offset)
        # PopQA has one split.
        others = [demo for demo in demos if demo[key] != row[key]] if task == "popqa" else demos
        shown = _first_of_each(others, shuffled(len(others), seed_of(str(row[key]))), key, SHOTS)
        listed = [
            words["demo_template"].format(**{**demo, "documents": written(demo["ctxs"]), "answer": demo["answers"][0]})
            for demo in shown
        ]
        gold = [at for at, passage in enumerate(row["ctxs"]) if passage.get("has_answer")]
        return Filled(
            values={**row, "demos": "\n\n".join(listed) + "\n\n", "context": written(row["ctxs"])},
            references=tuple(row["answers"]),
            depth=gold[0] / max(1, len(row["ctxs"]) - 1) if gold else None,
            meta={"id": str(row[key]), "shots": len(shown), "question": row["question"]},
        )

    return _mixed([partial(filled, offset) for offset in _draw_questions(rows, key)])


def _load_json_kv(task: str, clone: Clone, length: int) -> Prompts:
    words, path = clone.words(task), clone.file(task, length)
    rows = _lines(path, ())

    def filled(offset: int) -> Filled:
        row = _row(path, offset)
        listed = [words["demo_template"].format(key=key, value=f" {value}") for key, value in row["demos"][:SHOTS]]
        return Filled(
            values={**row, "demos": "\n\n".join(listed) + "\n\n"},
            references=_answers(row["answer"]),
            depth=row.get("depth"),
            meta={"keys": row["num_kvs"]},
        )

    return [partial(filled, rows[at][0]) for at in shuffled(len(rows), SEED)[:TESTS]]


def _load_needle(task: str, clone: Clone, length: int) -> Prompts:
    path = clone.file(task, length)
    rows = _lines(path, ())

    def filled(offset: int) -> Filled:
        row = _row(path, offset)
        asked = row.get("query", row.get("question", ""))
        return Filled(values={**row, "question": asked}, references=_answers(row.get("answer", row.get("outputs"))))

    return [partial(filled, rows[at][0]) for at in shuffled(len(rows), SEED)[:TESTS]]


def _load_msmarco(task: str, clone: Clone, length: int) -> Prompts:
    words, path = clone.words(task), clone.file(task, length)
    rows = _lines(path, ("qid",))
    chosen = set(_draw_questions(rows, "qid"))
    rows = [(offset, row) for offset, row in rows if offset in chosen]
    demos = [dict(row) for row in read_records(str(clone.demo_file(task)))]
    asked = {row["qid"] for _, row in rows}
    is_filtered = len(demos) > 2 * len(rows)
    if is_filtered:
        demos = [demo for demo in demos if demo["qid"] not in asked]
    write_demo = partial(str.format, rerank.FORMS[task][DEMO].own)

    def ranking(passages: Sequence[Record]) -> str:
        return " > ".join(passage["id"] for passage in sorted(passages, key=lambda one: one["label"], reverse=True))

    def filled(offset: int) -> Filled:
        row = _row(path, offset)
        form = words["passage_template" if "title" in row["ctxs"][0] else "passage_template_else"]
        others = demos if is_filtered else [demo for demo in demos if demo["qid"] != row["qid"]]
        shown = _first_of_each(others, shuffled(len(others), seed_of(row["qid"])), "qid", SHOTS)
        listed = [
            write_demo(
                documents="\n\n".join(form.format(**passage) for passage in demo["ctxs"]),
                question=demo["query"],
                answer=ranking(demo["ctxs"]),
            )
            for demo in shown
        ]
        relevance = {passage["id"]: int(passage["label"]) for passage in row["ctxs"]}
        return Filled(
            values={
                "demos": "".join(listed),
                "question": row["query"],
                "context": "\n\n".join(form.format(**passage) for passage in row["ctxs"]),
            },
            references=(" " + ranking(row["ctxs"]),),
            meta={"id": row["qid"], "shots": len(shown), "relevance": relevance},
        )

    return _mixed([partial(filled, offset) for offset, _ in rows])


def _load_alce(task: str, clone: Clone, length: int) -> Prompts:
    loaded = json.loads(clone.demo_file(task).read_text(encoding="utf-8"))
    instruction, demo_form, doc_form = (loaded[name] for name in ("instruction", "demo_prompt", "doc_prompt"))
    rows = read_records(str(clone.file(task, length)))
    rng = random.Random(SEED)
    drawn = [rng.sample(loaded["demos"], SHOTS) for _ in rows]

    def written(documents: Sequence[Record]) -> str:
        return "\n\n".join(doc_form.format(**{**one, "ID": number}) for number, one in enumerate(documents, start=1))

    def filled(at: int) -> Filled:
        row = rows[at]
        listed = [
            demo_form.format(**{**demo, "instruction": instruction, "context": written(demo["docs"])})
            for demo in drawn[at]
        ]
        answers = row["answers"] if task == "qampari" else [pair["short_answers"] for pair in row["qa_pairs"]]
        return Filled(
            values={
                "demo_text": "\n\n\n".join(listed) + "\n\n\n",
                "instruction": instruction,
                "question": row["question"],
                "context": written(row["docs"][: alce.COUNTS[length]]),
            },
            references=(str(row.get("answer", "")),),
            meta={
                "id": str(row.get("id", row.get("sample_id", at))),
                "shots": SHOTS,
                "question": row["question"],
                "answers": [[aliases] if isinstance(aliases, str) else list(aliases) for aliases in answers],
                # In HELMET, an answer may cite all retrieved documents, shown or not.
                "documents": [f"Title: {one['title']}\n{one['text']}" for one in row["docs"]],
            },
        )

    return [partial(filled, at) for at in shuffled(len(rows), SEED)[:TESTS]]


def _load_icl(task: str, clone: Clone, length: int) -> Prompts:
    words = clone.words(task)
    tests = _labeled(task, clone, task)
    if task == "nlu" and "nlu_demos" not in clone.paths:  # one split; HELMET uses a tenth of it
        order, count = shuffled(len(tests), SEED), math.ceil(len(tests) / 10)
        train, tests = [tests[at] for at in order[count:]], [tests[at] for at in order[:count]]
    else:
        train = _labeled(task, clone, f"{task}_demos")
    if len(tests) > icl.TESTS:
        tests = icl.balance([tests[at] for at in shuffled(len(tests), SEED)], icl.TESTS, SEED)
    number = {label: at for at, label in enumerate(sorted({label for _, label in [*train, *tests]}))}
    # Labels that are already whole numbers come from the Hub dataset.
    if all(label.isdigit() for label in number):
        number = {label: int(label) for label in number}
    count = icl.COUNTS[task][LENGTHS.index(length)]

    def filled(text: str, label: str) -> Filled:
        seed = (int(hashlib.sha256(text.encode()).hexdigest(), 16) + SEED) % 2**31
        shown = list(range(max(LABELS[task], 1 + max(number.values()))))
        random.Random(seed).shuffle(shown)
        examples = [
            words["item_template"].format(text=one, label=shown[number[own]])
            for one, own in icl.balance(train, count, seed)
        ]
        return Filled(
            values={"context": "\n\n".join(examples), "question": text},
            references=(str(shown[number[label]]),),
            meta={"label": label, "shots": count},
        )

    return [partial(filled, text, label) for text, label in tests]


def _labeled(task: str, clone: Clone, name: str) -> icl.Labeled:
    rows = hub_rows(task, clone, name)
    fields = {"trec_coarse": ("coarse_label", "coarse"), "trec_fine": ("fine_label", "fine")}.get(task, ())
    path = clone.paths[name]
    return [
        (str(first_field(row, ("text",), path)), str(_first(row, (*fields, "label", "intent"), path))) for row in rows
    ]


def _first(row: Record, names: Sequence[str], path: str) -> Any:
    """The first field that is present. Its value may be the label 0."""
    present = [name for name in names if row.get(name) is not None]
    return row[present[0]] if present else first_field(row, tuple(names), path)


def hub_rows(task: str, clone: Clone, name: str) -> list[Record]:
    """Rows of a dataset that HELMET loads from the Hub."""
    if name not in clone.paths:
        raise ConfigError(
            f"reference: HELMET loads {task} from the Hugging Face Hub; set its rows as {name} under `paths` (JSON "
            f"lines, or hub:ORG/NAME), or remove {task} from `tasks`."
        )
    return read_records(clone.paths[name])


def _answers(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(map(str, value))


def _load_book(task: str, clone: Clone, length: int) -> Prompts:
    # Import late: it imports this module.
    from unspool.evals.suites.helmet.clone_books import load_book

    return load_book(task, clone, length)


_LOADERS: dict[str, Callable[[str, Clone, int], Prompts]] = {
    "json_kv": _load_json_kv,
    **dict.fromkeys(NEEDLES, _load_needle),
    **dict.fromkeys(RAG, _load_rag),
    "msmarco": _load_msmarco,
    **dict.fromkeys(CITE, _load_alce),
    **dict.fromkeys(BOOKS, _load_book),
    **dict.fromkeys(LABELS, _load_icl),
}
