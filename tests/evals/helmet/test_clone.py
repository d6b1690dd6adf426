"""HELMET from a clone of its repository. The clones here have its layout and none of its words."""

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.evals.suites import byte_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from unspool.core.errors import ConfigError, DataError
from unspool.evals.heldout import PlanInputs
from unspool.evals.suite import Question
from unspool.evals.suites.helmet import clone_books, helmet_clone
from unspool.evals.suites.helmet.python_texts import PythonTexts
from unspool.evals.suites.helmet.suite import SUITE, HelmetEval
from unspool.evals.task_suite import PlannedTasks, _comparability

LENGTH = 4096
DATA = """
raise SystemExit("a clone is read, never run")
def load_qa(dataset, path):
    if "nq_bad" in dataset:
        user_template = "never {demos}{context}{question}"
    else:
        user_template = "Say it.\\n{demos}{context}\\n\\nQ: {question}"
    system_template = "Answer:"
    prompt_template = user_template + "\\n" + system_template
    demo_template = "{documents}\\nQ: {question} A: {answer}"
    passage_template = "({title}) {text}"
def load_json_kv(path):
    user_template = "{context}\\nFind.\\n{demos}Key {question}"
    system_template = "Value:"
    prompt_template = user_template + "\\n" + system_template
    demo_template = "Key {key}\\nValue:{value}"
def load_ruler(dataset):
    if "niah_mv" in dataset or "niah_mq" in dataset:
        user_template = "Many {type_needle_v}.\\n{context}\\nWhich {type_needle_v} has {query}?"
        system_template = "They are"
    elif "niah" in dataset:
        user_template = "A {type_needle_v}.\\n{context}\\nWhich {type_needle_v} has {query}?"
        system_template = "It is"
    prompt_template = user_template + "\\n" + system_template
def load_msmarco_rerank(path):
    user_template = "Rank.\\n{demos}{context}\\nQuery: {question}"
    system_template = "Ranking:"
    prompt_template = user_template + "\\n" + system_template
    def update(sample):
        passage_template = "[{id}] {title} {text}" if "title" in sample else "[{id}] {text}"
def load_alce(dataset):
    user_template = "{demo_text}{instruction}\\nQ: {question}\\n{context}"
    system_template = "Answer:"
    prompt_template = user_template + "\\n\\n" + system_template
def load_icl(dataset):
    item_template = "{text} = {label}"
    user_template = "Write {{label}}.\\n{context}\\n{question}"
    system_template = "label:"
    prompt_template = user_template + "\\n" + system_template
def load_narrativeqa(dataset):
    user_template = "{demo}{context}"
def load_infbench(dataset):
    if "qa_eng" in dataset:
        user_template = "{demo}{context}\\nQ: {question}"
        system_template = "Answer:"
    prompt_template = user_template + "\\n\\n" + system_template
    def add_demos(example):
        if "qa_eng" in dataset:
            temp = "Q: {question} A: {answer[0]}"
def truncate_llama2(dataset, data, postfix_text=" [cut]"):
    pass
"""


def write_lines(path: Path, rows: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def qa_row(number: int, passages: int, depth: int = 0) -> dict[str, Any]:
    contexts = [
        {"title": f"t{number}", "text": f"text {at} of {number}", "has_answer": at == depth} for at in range(passages)
    ]
    return {"id": f"q{number}", "question": f"who {number}", "answers": [f"ada {number}"], "ctxs": contexts}


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    (tmp_path / "data.py").write_text(DATA)
    for task in ("asqa", "qampari"):
        demos = [{"question": f"d{at}", "answer": f"a{at}", "docs": [{"title": "t", "text": "x"}]} for at in range(4)]
        texts = {"instruction": "Cite.", "demo_prompt": "{instruction} {question} {context} {answer}"}
        found = json.dumps({**texts, "doc_prompt": "Doc [{ID}] {title}: {text}\n", "demos": demos})
        (tmp_path / "prompts").mkdir(exist_ok=True)
        (tmp_path / f"prompts/{task}_revised.json").write_text(found)
    rows = [qa_row(number, 20, depth) for number in range(3) for depth in range(6)]
    write_lines(tmp_path / "data/kilt/nq-dev-multikilt_1000_k20_dep6.jsonl", rows)
    demos = [qa_row(number, 3) for number in range(10, 15) for _ in range(6)]
    write_lines(tmp_path / "data/kilt/nq-train-multikilt_1000_k3_dep6.jsonl", demos)
    return tmp_path


def plan(clone: Path, task: str, tokenizer: Any = None, length: int = LENGTH, **settings: Any) -> PlannedTasks:
    entry = {"suite": "helmet", "tasks": [task], "lengths": [length], "reference": str(clone), **settings}
    tokenizer = tokenizer or byte_tokenizer()
    return PlannedTasks(SUITE, HelmetEval.model_validate(entry), PlanInputs(tokenizer=tokenizer, seed=0, root=Path()))


def questions(planned: PlannedTasks) -> list[Question]:
    return [planned._encode(question)[0] for question in planned.question_ids]


def text_of(asked: Question) -> str:
    return asked.context + asked.question + asked.prefix


def test_words_are_read_from_the_branch_of_the_data_set_and_code_is_not_run(clone: Path):
    texts = PythonTexts(clone / "data.py", "a clone")
    assert texts.function("load_qa", "kilt_nq")["user_template"].startswith("Say it.")
    assert texts.function("load_ruler", "ruler_niah_mv")["prompt_template"].endswith("\nThey are")
    assert texts.function("load_ruler", "ruler_niah_mk_2")["system_template"] == "It is"
    assert texts.function("load_msmarco_rerank")["passage_template_else"] == "[{id}] {text}"
    assert texts.function("truncate_llama2") == {"postfix_text": " [cut]"}


def test_every_depth_of_each_question_is_asked_with_the_examples_that_its_id_draws(clone: Path):
    asked = questions(plan(clone, "nq"))
    assert len(asked) == 18
    assert sorted({question.depth for question in asked}) == [depth / 19 for depth in range(6)]
    one = next(question for question in asked if question.meta["id"] == "q1")
    seed = int(hashlib.sha256(b"q1").hexdigest(), 16) % 2**31
    drawn = list(dict.fromkeys(10 + int(at) // 6 for at in np.random.default_rng(seed).permutation(30)))[:2]
    shown = ["\n\n".join(f"(t{n}) text {at} of {n}" for at in range(3)) + f"\nQ: who {n} A: ada {n}\n\n" for n in drawn]
    passages = "\n\n".join(f"(t1) text {at} of 1" for at in range(20))
    assert text_of(one) == f"Say it.\n{''.join(shown)}{passages}\n\nQ: who 1\nAnswer:"


def test_a_context_that_is_too_long_loses_its_end(clone: Path):
    rows = [{**qa_row(0, 20), "ctxs": [{"title": "t", "text": "é" * 3000}]}]
    paths = {"nq": write_lines(clone / "long.jsonl", rows)}
    whole, cut = (questions(plan(clone, "nq", paths=paths, length=length)) for length in (16_384, LENGTH))
    head = whole[0].meta["head"]
    kept, rest = cut[0].context, text_of(whole[0])[len(whole[0].context) :]
    assert whole[0].context.startswith(kept) and text_of(cut[0]) == kept + rest
    # The byte at which it is cut may be within a letter, which then goes too.
    assert LENGTH - 22 <= len(text_of(cut[0]).encode()) <= LENGTH - 20 and len(kept) > head


def test_a_chat_model_gets_no_cue_and_is_scored_with_the_one_that_it_writes(clone: Path):
    tokenizer: PreTrainedTokenizerFast = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    asked = questions(plan(clone, "nq", tokenizer, chat="on"))[0]
    number = asked.meta["id"][1:]
    assert (asked.question, asked.prefix) == (f"\n\nQ: who {number}", "")
    score = SUITE.tasks["nq"].score
    assert score(f"Answer: ada {number}\nno", asked) == 1
    assert (score("", asked), score("", questions(plan(clone, "nq"))[0])) == (0, 0)


def test_qamparis_first_item_is_lost_behind_the_cue_without_a_chat_template(clone: Path):
    row = {"id": "1", "question": "who", "answers": [["ada"], ["bob"]], "docs": [{"title": "t", "text": "x"}] * 9}
    (clone / "rows.json").write_text(json.dumps([row]))
    tokenizer: PreTrainedTokenizerFast = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    base, chat = (
        questions(plan(clone, "qampari", tokenizer, chat=chat, paths={"qampari": str(clone / "rows.json")}))[0]
        for chat in ("off", "on")
    )
    drawn = random.Random(42).sample(range(4), 2)
    shown = "\n\n\n".join(f"Cite. d{at} Doc [1] t: x\n a{at}" for at in drawn)
    documents = "\n\n".join(f"Doc [{at}] t: x\n" for at in range(1, 9))
    assert text_of(base) == f"{shown}\n\n\nCite.\nQ: who\n{documents}\n\nAnswer:"
    score = SUITE.tasks["qampari"].score
    assert (score(" Ada [1], Bob [2].", base), score("Ada [1], Bob [2].", chat)) == (0.5, 1)


def test_labels_keep_their_numbers_and_are_shuffled_by_the_text(clone: Path):
    train = [{"text": f"s{at}", "coarse_label": at % 6} for at in range(60)]
    tests = [{"text": f"what {at}", "coarse_label": at % 6} for at in range(8)]
    paths = {
        "trec_coarse": write_lines(clone / "t.jsonl", tests),
        "trec_coarse_demos": write_lines(clone / "d.jsonl", train),
    }
    asked = questions(plan(clone, "trec_coarse", paths=paths))[3]
    seed = (int(hashlib.sha256(b"what 3").hexdigest(), 16) + 42) % 2**31
    numbers = list(range(6))
    random.Random(seed).shuffle(numbers)
    assert asked.references == (str(numbers[3]),)
    assert asked.context.startswith("Write {label}.\n")
    shown = [line.split(" = ") for line in asked.context.split("\n")[1:] if line]
    assert len(shown) == 200
    assert all(numbers[int(text[1:]) % 6] == int(label) for text, label in shown)


def test_long_texts_are_cut_by_tokens_of_the_llama_2_tokenizer(clone: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(clone_books.LONGER_THAN, "infbench_qa", 5000)
    words = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(clone / "llama2")
    rows = [
        {"id": at, "context": f"{at} " * size, "input": f"why {at}?", "answer": [f"so {at}"], "options": []}
        for at, size in enumerate((5001, 5000, 5100))
    ]
    paths = {"infbench_qa": write_lines(clone / "b.jsonl", rows), "llama2_tokenizer": str(clone / "llama2")}
    planned = plan(clone, "infbench_qa", paths=paths, chat="off")
    whole = {asked.meta["id"]: text_of(asked) for asked in map(planned.question, planned.question_ids)}
    assert list(whole) == [str([0, 2][at]) for at in np.random.default_rng(42).permutation(2)]
    order = [[1, 2][at] for at in np.random.default_rng(42).permutation(2)]
    demos = "\n\n".join(f"Q: why {at}? A: so {at}" for at in order)
    # " [cut]" is three tokens, and the one at which HELMET cuts stays.
    story = ("0 " * (LENGTH - 210 - 3 + 1)).rstrip() + " [cut]"
    begin = f"For example:\n\n{demos}\n\nNow, read the following story:\n\n"
    assert whole["0"] == f"{begin}{story}\nQ: why 0?\n\nAnswer:"
    # With this model's tokens that is still too long, so its end goes as well.
    assert all(len(text_of(asked)) <= LENGTH - 10 and "[cut]" not in asked.context for asked in questions(planned))


def test_the_result_says_what_differs_and_what_cannot_be_checked(clone: Path, monkeypatch: pytest.MonkeyPatch):
    def said(task: str = "nq") -> dict[str, Any]:
        planned = plan(clone, task, samples=1)
        assert planned.reference is not None
        sample = {"suite": "helmet", "benchmark": planned.reference.facts}
        return _comparability(planned.config, [sample])

    changed = said()
    assert changed["comparable"] is False
    assert "data.py differs from princeton-nlp/HELMET" in changed["comparability"]
    ours = hashlib.sha256(DATA.encode()).hexdigest()[:16]
    monkeypatch.setitem(helmet_clone.KNOWN, "data.py", (ours,))
    known = said()
    assert known["comparable"] is None
    assert known["comparability"].startswith(
        "comparable with published numbers only if these files are the published ones"
    )
    assert "their hashes are not known: data/kilt/nq-dev-multikilt_1000_k20_dep6.jsonl" in known["comparability"]
    made = said("json_kv")
    assert made["comparable"] is False
    assert "test_k50_dep6.jsonl (missing, so generated)" in made["comparability"]
    assert not _comparability(HelmetEval(suite="helmet", lengths=[LENGTH]), [])["comparable"]


def test_keys_are_generated_with_the_clones_words_where_its_file_is_missing(
    clone: Path, tokenizer: PreTrainedTokenizerFast
):
    asked = questions(plan(clone, "json_kv", tokenizer, samples=2, length=8192))[0]
    assert asked.meta["keys"] == 105
    assert asked.question.startswith("\nFind.\nKey ")
    assert (asked.question.count("\nValue: "), asked.prefix) == (2, "Value:")


@pytest.mark.parametrize(
    ("task", "settings", "said"),
    [
        ("triviaqa", {}, r"triviaqa-dev-multikilt_1000_k20_dep6\.jsonl is missing, and helmet triviaqa needs it; get"),
        ("banking77", {}, "HELMET loads banking77 from the Hugging Face Hub; set its rows as banking77 under"),
        ("narrativeqa", {}, "texts of narrativeqa by tokens of Llama 2; set its tokenizer"),
        ("nq", {"length": 5000}, "HELMET has no length 5000; use 4K, 8K, 16K, 32K, 64K, 128K"),
    ],
)
def test_missing_data_is_reported_in_one_sentence(clone: Path, task: str, settings: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        plan(clone, task, **settings)


def test_a_row_or_a_template_of_another_kind_is_named_with_its_question(clone: Path):
    rows = [{"id": "q", "question": "who", "answers": ["ada"]}]
    planned = plan(clone, "nq", paths={"nq": write_lines(clone / "odd.jsonl", rows)})
    with pytest.raises(DataError, match=r"question 0 of helmet nq has an unexpected format \(KeyError: 'ctxs'\)"):
        questions(planned)
    with pytest.raises(DataError, match="a file of helmet popqa has an unexpected format"):
        demos = {"popqa": write_lines(clone / "odd.jsonl", rows), "popqa_demos": str(clone / "odd.jsonl")}
        plan(clone, "popqa", paths=demos)
    (clone / "data.py").write_text(DATA.replace("passage_template", "other_template"))
    with pytest.raises(DataError, match=r"data\.py has no passage_template for helmet nq; pass a clone of"):
        questions(plan(clone, "nq"))
