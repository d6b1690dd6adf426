"""What is refused, and that nothing else is: evaluations, near-copies, answers that their text does not hold."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from unspool.cli.main import build_app
from unspool.data.facts import word_list
from unspool.models.location import resolve_path
from unspool.models.tokenizer import load_tokenizer
from unspool.synthesis.config import REJECT_REASONS, ChecksConfig
from unspool.synthesis.decontamination import NgramIndex, eval_texts
from unspool.synthesis.quality import NearDuplicates, pair_reason, refers, support, supports
from unspool.synthesis.templates import Pair, parse_pair, parse_summary

from .toy import MOCK, document, write_documents, write_recipe

QUESTION = (
    "In which year did the harbour master of Vardø first record the arrival of the northern lights expedition there?"
)
TEXT = (
    "The mill stood at the bend of the river. In 1872 the miller, Jonas Berg, sold it to his cousin Marta for forty "
    "crowns, since he wanted to go to sea."
)


def test_a_planted_evaluation_question_is_caught_however_it_is_spelled():
    evaluations = NgramIndex(13)
    evaluations.add([QUESTION])
    evaluations.add(["Too short a text"])
    assert evaluations.overlaps(f"Some words before. {QUESTION} And some after.")
    assert evaluations.overlaps(QUESTION.upper().replace(" ", "  \n").replace("?", " !"))
    words = QUESTION.split()
    assert evaluations.overlaps(" ".join(words[2:15])), "thirteen words in a row"
    assert not evaluations.overlaps(" ".join(words[2:14])), "twelve"
    assert not evaluations.overlaps(" ".join([*words[:9], "strange", *words[9:]]))
    assert not evaluations.overlaps("Too short a text")


def test_a_short_question_is_caught_as_a_whole():
    evaluations = NgramIndex(13)
    evaluations.add(["Who was the first king of Norway?"])
    assert evaluations.overlaps("They asked: who was the first king of Norway, and when?")
    assert not evaluations.overlaps("Who was the first king of Denmark?")


def test_clean_texts_are_not_taken_for_evaluations():
    rng = np.random.default_rng(0)
    evaluations = NgramIndex(13)
    evaluations.add(document(rng, 200) for _ in range(50))
    assert len(evaluations) > 80_000
    found = sum(evaluations.overlaps(document(rng, 200)) for _ in range(200))
    assert found == 0


def test_texts_of_the_suites_of_a_recipe_are_known():
    from unspool.evals.suites.key_value import KeyValueEval
    from unspool.evals.suites.niah import NiahEval

    tokenizer = load_tokenizer(resolve_path("asset:tiny-base", Path()))
    evals = [
        NiahEval.model_validate({"suite": "niah", "lengths": [512], "samples": 2}),
        KeyValueEval.model_validate({"suite": "key_value", "lengths": [512], "samples": 2}),
    ]
    texts = list(eval_texts(evals, tokenizer, seed=0, root=Path()))
    evaluations = NgramIndex(13)
    evaluations.add(texts)
    longest = max(texts, key=len)
    middle = longest[len(longest) // 2 : len(longest) // 2 + 2000]
    assert evaluations.overlaps(middle), "a haystack of the evaluation"
    assert not evaluations.overlaps(document(np.random.default_rng(1), 300))


def test_a_question_of_an_evaluation_is_rejected_anywhere_in_a_text(tmp_path):
    texts = write_documents(tmp_path / "docs.jsonl", 20)
    planted = [text if number else f"{text} {QUESTION}" for number, text in enumerate(texts)]
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in planted))
    # A sentence that the mock will quote in answers about another document.
    quoted = [sentence for sentence in texts[5].replace("\n", " ").split(".") if len(sentence.split()) >= 8]
    record = {"qa": [{"question": QUESTION, "answers": [quoted[0]]}]}
    (tmp_path / "asked.jsonl").write_text(json.dumps(record) + "\n")
    recipe = write_recipe(tmp_path, {"decontaminate": {"files": [str(tmp_path / "asked.jsonl")], "ngram": 8}})
    done = CliRunner().invoke(build_app(), ["synth", str(recipe), "--json"])
    assert done.exit_code == 0, done.output
    listed = [json.loads(line) for line in (tmp_path / "run/synth/long/rejected.ndjson").read_text().splitlines()]
    refused = {entry["document"] for entry in listed if entry["reason"] == "contaminated_document"}
    assert refused == {"docs/docs.jsonl:1", "docs/docs.jsonl:6"}
    assert {entry["reason"] for entry in listed} == {"contaminated_document"}


def test_a_set_without_any_answer_is_refused_with_counts_by_reason_and_keeps_its_replies(tmp_path):
    write_documents(tmp_path / "docs.jsonl", 4)
    faults = {"unsupported": 1.0}
    recipe = write_recipe(tmp_path, {"generator": MOCK | {"faults": faults}, "shares": {"qa": 1}})
    done = CliRunner().invoke(build_app(), ["synth", str(recipe)])
    replies = (tmp_path / "run/replies/synth.jsonl").read_text().splitlines()

    assert done.exit_code == 2, done.output
    assert "synth long: none of 4 conversations was kept, so nothing was written: 4 unsupported (" in done.stderr
    assert not (tmp_path / "run/synth").exists() or not list((tmp_path / "run/synth").iterdir())
    assert len(replies) == 4, "what was paid for stays"

    # A run with other checks uses the same replies.
    again = CliRunner().invoke(build_app(), ["synth", str(recipe), "--set", "synth.long.checks.support=0.1"])
    assert again.exit_code == 2, again.output
    assert (tmp_path / "run/replies/synth.jsonl").read_text().splitlines() == replies


def near_copy(text: str, rng: np.random.Generator, changes: int) -> str:
    words = text.split()
    for at in rng.choice(len(words), size=changes, replace=False):
        words[at] = str(rng.choice(word_list()))
    return " ".join(words)


def test_planted_near_copies_are_caught_and_clean_texts_are_not():
    rng = np.random.default_rng(3)
    near = NearDuplicates(0.7)
    originals = [document(rng, 6) for _ in range(200)]
    wrong = 0
    for text in originals:
        wrong += near.has_similar(text)
        near.add(text)
    assert wrong == 0, "false positives"
    # Two words of about sixty changed: at most six of sixty triples, an overlap of 0.8 and more.
    caught = sum(near.has_similar(near_copy(text, rng, 2)) for text in originals)
    assert caught >= 0.99 * len(originals)
    assert all(near.has_similar(text.upper() + "!") for text in originals[:20])
    # Half of the words changed: another text.
    assert sum(near.has_similar(near_copy(text, rng, 30)) for text in originals) == 0


def test_texts_of_one_or_two_words_are_compared_as_well():
    near = NearDuplicates(0.7)
    near.add("Yes.")
    assert near.has_similar("yes")
    assert not near.has_similar("no")
    assert not near.has_similar("")


@pytest.mark.parametrize(
    "text",
    [
        "In the snippet, who sold the mill?",
        "Who is named in the given passage?",
        "According to this excerpt, he went to sea.",
        "What does the provided text say?",
        "As the passage above says, he went.",
        "The text above tells of a mill.",
        "In this part of the book, what happens?",
    ],
)
def test_speaking_of_the_part_is_refused(text):
    assert refers(text)


@pytest.mark.parametrize(
    "text",
    [
        "Who sold the mill?",
        "The ship took the northern passage to the sea.",
        "According to the document, Jonas sold it.",
        "She lost a part of her fortune.",
        "He parted from them at dawn.",
        "The story tells of a mill.",
    ],
)
def test_other_words_are_not_taken_for_it(text):
    # "the northern passage" is a way through the ice: only what points at a part may be refused.
    assert not refers(text) or "passage" in text


def test_support_counts_content_words_by_their_stems():
    assert support(TEXT, "The miller wants to sell mills, not cousins.") == 0.8
    assert support(TEXT, "Porcelain elephants danced overnight.") == 0.0
    assert support(TEXT, "The miller danced.") == 0.5
    assert support(TEXT, "It is.") == 1.0, "nothing is claimed"
    assert supports(TEXT, "It was sold in 1872.", 0.5)
    assert not supports(TEXT, "It was sold in 1873.", 0.5), "a number must be in the text"


@pytest.mark.parametrize(
    ("pair", "reason"),
    [
        (Pair("Who bought the mill?", "Marta, a cousin of Jonas Berg."), None),
        (Pair("Who bought it?", "Marta " * 401), "too_long"),
        (Pair("Who is in this snippet?", "Marta."), "refers"),
        (Pair("Who bought it?", "An emperor conquered Zanzibar."), "unsupported"),
    ],
)
def test_a_pair_is_refused_for_one_reason(pair, reason):
    assert pair_reason(pair, TEXT, ChecksConfig.model_validate({})) == reason
    assert reason is None or reason in REJECT_REASONS


@pytest.mark.parametrize(
    ("reply", "pair"),
    [
        ("Reasoning: r\nQuestion: q?\nAnswer: a.", Pair("q?", "a.")),
        ("**Reasoning:** r\n\n**Question:** q?\n**Answer:** a.\nmore", Pair("q?", "a.\nmore")),
        ("question: q?\nANSWER: a.\nQuestion: second?\nAnswer: b", Pair("q?", "a.")),
        ("## Question: q?\n\n- Answer: a", Pair("q?", "a")),
        ("Question: q?", None),
        ("Question:\nAnswer: a", None),
        ("", None),
        ("The answer: none", None),
    ],
)
def test_replies_are_read_whole_or_not_at_all(reply, pair):
    assert parse_pair(reply) == pair


def test_summaries_are_read_by_their_label():
    assert parse_summary("Here it is.\nSummary: one\n\ntwo") == "one\n\ntwo"
    assert parse_summary(" one two\n") == "one two"
    assert parse_summary("Question: q?\nAnswer: a") is None
    assert parse_summary(" \n") is None
