"""HELMET's long-text prompts, reproduced from its loaders: NarrativeQA, ∞Bench, Multi-LexSum.

HELMET chooses and cuts texts by tokens of Llama 2. The user names that tokenizer. HELMET draws the examples of
NarrativeQA and Multi-LexSum without a seed; here they depend on the question.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from unspool.core.errors import ConfigError
from unspool.evals.suites.helmet import books
from unspool.evals.suites.helmet.clone_prompts import SEED, TESTS, hub_rows, seed_of, shuffled
from unspool.evals.suites.helmet.data import DEMO
from unspool.evals.suites.helmet.helmet_clone import SHOTS, Clone, Filled, Prompts
from unspool.evals.suites.records import Record, first_field, flatten

LLAMA2 = "llama2_tokenizer"
LONGER_THAN = {"narrativeqa": 131_072}  # else 65,535
LETTERS = books.LETTERS


def load_book(task: str, clone: Clone, length: int) -> Prompts:
    tokenizer = _tokenizer(task, clone)
    rows = [_row(task, row, clone.paths[task]) for row in hub_rows(task, clone, task)]
    if task == "narrativeqa":
        rows = [rows[at] for at in shuffled(len(rows), SEED)]
    shortest = LONGER_THAN.get(task, 65_535)
    long_enough = [row for row in rows if _tokens(tokenizer, row["context"]) > shortest]
    if not long_enough:
        raise ConfigError(
            f"{clone.paths[task]}: HELMET uses only texts longer than {shortest} tokens, and this file has none."
        )
    if task.startswith("infbench") or (task == "multi_lexsum" and len(long_enough) > TESTS):
        long_enough = [long_enough[at] for at in shuffled(len(long_enough), SEED)]
    demos = _demos(task, clone, rows)
    most = length - books.SET_ASIDE.get(task, 200) - books.ANSWER_TOKENS[task]
    cut = lru_cache(8)(partial(_cut, tokenizer, most, clone.omitted))

    def filled(row: Mapping[str, Any]) -> Filled:
        references = row["answer"]
        return Filled(
            values={**row, "context": cut(row["context"]), "demo": demos(row)},
            references=references,
            meta={
                "id": row["id"],
                "shots": SHOTS,
                "question": row["question"],
                **({"expert_summary": references[0], "key_points": row["key_points"]} if "key_points" in row else {}),
            },
        )

    return [partial(filled, row) for row in long_enough[:TESTS]]


def _row(task: str, row: Record, path: str) -> dict[str, Any]:
    """The fields that HELMET's templates use, from rows of the Hub datasets."""
    text = row.get("sources") or first_field(row, ("context", "document"), path)
    answer = first_field(row, ("answers", "answer", "summary/short"), path)
    found = {
        "id": str(row.get("id", row["_line"])),
        "context": "\n\n".join(flatten(_text(text))),
        "question": "" if task == "multi_lexsum" else _text(row.get("question") or row.get("input") or ""),
        "answer": tuple(_text(one) for one in ([answer] if isinstance(answer, str) else answer)),
    }
    if task == "infbench_mc":
        letter = LETTERS[list(row["options"]).index(found["answer"][0])]
        found["options"] = "\n".join(f"{one}. {text}" for one, text in zip(LETTERS, row["options"], strict=True))
        found["answer"] = (letter, f"{letter}. {found['answer'][0]}")
    if task in books.SUMMARIES:
        found["key_points"] = list(flatten(row.get("key_points") or row.get("keypoints") or []))
    return found


def _text(value: Any) -> Any:
    return value["text"] if isinstance(value, Mapping) else value


def _demos(task: str, clone: Clone, rows: Sequence[Mapping[str, Any]]) -> Callable[[Mapping[str, Any]], str]:
    """Return a function that writes the examples of a question."""
    forms = books.FORMS[task]
    # The clone has the form of ∞Bench's examples. HELMET builds the others in code, like the built-in wording.
    form = clone.words(task).texts.get("temp")
    if task.startswith("infbench"):
        known: Sequence[Mapping[str, Any]] = rows
    else:
        name = f"{task}_demos"
        known = [_row(task, row, clone.paths[name]) for row in hub_rows(task, clone, name)]

    def written(row: Mapping[str, Any]) -> str:
        if form is not None:
            return form.format(**row)
        answer = row["answer"][0].strip() if task == "infbench_sum" else row["answer"][0]
        return forms[DEMO].own.format(question=row["question"], answer=answer)

    def listed(row: Mapping[str, Any]) -> str:
        others = [other for other in known if other["id"] != row["id"]] if known is rows else known
        seed = SEED if known is rows else seed_of(row["question"] or row["id"])
        shown = [others[at] for at in shuffled(len(others), seed)[:SHOTS]]
        text = forms[books.DEMOS].own.format(demos="\n\n".join(map(written, shown)))
        # This suffix belongs to the clone's template, not to the examples.
        return text.removesuffix(forms[books.NO_DEMOS].own)

    return listed


def _tokenizer(task: str, clone: Clone) -> Any:
    if LLAMA2 not in clone.paths:
        raise ConfigError(
            f"reference: HELMET chooses and cuts the texts of {task} by tokens of Llama 2; set its tokenizer, "
            f"a folder or a name on the Hub, as {LLAMA2} under `paths`, or remove {task} from `tasks`."
        )
    from unspool.models.tokenizer import load_tokenizer  # import late: transformers loads slowly

    return load_tokenizer(clone.paths[LLAMA2])


@lru_cache(4096)  # many questions share one story
def _tokens(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text, verbose=False)["input_ids"])


def _cut(tokenizer: Any, most: int, omitted: str, text: str) -> str:
    found = tokenizer(text, return_offsets_mapping=True, verbose=False)
    if len(found["input_ids"]) <= most:
        return text
    kept = most - len(tokenizer(omitted)["input_ids"])
    return str(text[: found["offset_mapping"][kept][1]]) + omitted
