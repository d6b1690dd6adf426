"""What prompts are made of: essays, words, questions, and what users bring."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unspool.core.errors import ConfigError, DataError
from unspool.evals.suite import Ask
from unspool.evals.suites.ruler import SUITE
from unspool.evals.suites.ruler.haystacks import Essay, Sources
from unspool.evals.suites.ruler.qa_data import generate_hotpotqa, generate_squad, read_hotpotqa, read_squad
from unspool.evals.suites.ruler.word_counts import exact_counts, zipf_counts

from .conftest import Build


def test_essays_are_read_on_from_their_beginning_when_they_end() -> None:
    essay = Essay.of(["One two. Three four five!", "Mr. Six said “Go.” Then"])

    assert essay.ends.tolist() == [2, 5, 9, 10]
    assert " ".join(essay.excerpt(8, 5)) == "“Go.” Then One two. Three"
    assert essay.sentence_ends(8, 5).tolist() == [0, 1, 2, 4, 5]
    with pytest.raises(DataError, match="empty"):
        Essay.of([" \n "])


def test_needles_are_between_sentences_at_their_depth(build: Build) -> None:
    for index in range(0, 40, 5):
        asked = build("niah_single_2", index=index)
        before, after = asked.context.split(" One special magic") if asked.depth else ("", "x " + asked.context)
        assert not before or before[-1] in ".!?”’)_"
        assert asked.depth is not None
        assert abs(len(before) / len(before + after) - asked.depth) < 0.05
        assert asked.context.count(asked.references[0]) == 1


def test_keys_and_values_are_all_different(build: Build) -> None:
    for task in ("niah_multikey_2", "niah_multikey_3"):
        lines = build(task, length=32768).context.split("\n")[1:-2]
        keys = Counter(line.split(" for ")[1].split(" is ")[0] for line in lines)
        assert len(lines) > 100
        assert max(keys.values()) == 1


def test_a_chain_can_be_followed_to_every_reference(build: Build) -> None:
    for mode in ("fixed", "reference"):
        asked = build("vt", mode=mode, index=3)
        value = asked.question.split("value ")[1].split()[0]
        holds: dict[str, str] = {}
        body = asked.context[len(asked.meta["example"]) :]
        for line in body.split("\n"):
            if line.startswith("VAR "):
                name, _, source = line.strip().removeprefix("VAR ").partition(" = ")
                holds[name] = holds[source.removeprefix("VAR ")] if source.startswith("VAR ") else source
        assert {name for name, held in holds.items() if held == value} == set(asked.references)
        assert len(asked.references) == 5


@pytest.mark.parametrize(("length", "often", "seldom"), [(2048, 6, 1), (4096, 30, 3)])
@pytest.mark.parametrize("mode", ["fixed", "reference"])
def test_common_words_are_the_most_common(build: Build, mode: str, length: int, often: int, seldom: int) -> None:
    asked = build("cwe", mode=mode, length=length)
    counts = Counter(asked.context[len(asked.meta["example"]) :].split("often.\n")[1].split()[1::2])

    assert {word for word, count in counts.items() if count == often} == set(asked.references)
    assert set(counts.values()) == {often, seldom}


@pytest.mark.parametrize("mode", ["fixed", "reference"])
def test_frequent_words_are_the_most_frequent_after_the_dots(build: Build, mode: str) -> None:
    for length in (1024, 8192):
        asked = build("fwe", mode=mode, length=length)
        ranked = Counter(asked.context.split("most often. ")[1].split()).most_common(5)
        assert [word for word, _ in ranked[:4]] == ["...", *asked.references]
        assert ranked[3][1] > ranked[4][1]


def test_counts_by_zipf_grow_word_by_word() -> None:
    before = exact_counts(120, 60)
    for total in range(121, 400):
        counts = exact_counts(total, 60)
        assert counts.sum() == total
        assert (counts - before).sum() == 1
        before = counts
    assert np.abs(exact_counts(1000, 60) - zipf_counts(1030, 60)).max() <= 20


def test_generated_questions_are_answered_by_their_gold_documents_alone() -> None:
    for questions in (generate_squad(), generate_hotpotqa()):
        assert questions.origin == "generated"
        assert len(questions.queries) >= 1000
        for query in questions.queries[::97]:
            golds = [questions.documents[at] for at in query.golds]
            assert any(query.answers[0] in gold for gold in golds)
            assert query.answers[0].lower() not in query.question.lower().split()
            # The name that tells whom the question is about stands in no other document.
            name = query.question.rstrip("?").split(" called ")[-1] if len(golds) == 2 else golds[0][:10]
            assert sum(name in text for text in questions.documents) == 1


def test_squad_reads_the_same_in_all_its_forms(tmp_path: Path) -> None:
    rows = [
        {"title": "T", "context": f"C{at}.", "question": f"Q{at}?", "answers": [f"a{at}", f"b{at}"]} for at in range(4)
    ]
    lines = tmp_path / "rows.jsonl"
    lines.write_text("\n".join(map(json.dumps, rows)))
    hub = tmp_path / "hub.jsonl.gz"
    nested = [{**row, "answers": {"text": row["answers"], "answer_start": [0, 0]}} for row in rows]
    hub.write_bytes(gzip.compress("\n".join(map(json.dumps, nested)).encode()))
    paragraphs = [
        {
            "context": row["context"],
            "qas": [{"question": row["question"], "answers": [{"text": text} for text in row["answers"]]}],
        }
        for row in rows
    ]
    released = tmp_path / "released.json"
    released.write_text(json.dumps({"data": [{"title": "T", "paragraphs": paragraphs}]}))

    read = [read_squad(str(path)) for path in (lines, hub, released)]

    assert read[0].documents == read[1].documents == read[2].documents
    assert read[0].queries == read[1].queries == read[2].queries
    assert read[0].queries[1].answers == ("a1", "b1")
    assert read[0].queries[1].more == (0, 2, 3)


def test_hotpotqa_reads_released_files_and_gold_with_a_pool(tmp_path: Path) -> None:
    released = tmp_path / "hotpot.json"
    context = [["A", ["a one. ", "a two."]], ["B", ["b."]], ["C", ["c."]]]
    released.write_text(
        json.dumps([{"question": "Q?", "answer": "a", "context": context, "supporting_facts": [["C", 0], ["A", 1]]}])
    )
    gold, pool = tmp_path / "gold.jsonl", tmp_path / "pool.jsonl"
    gold.write_text(json.dumps({"question": "Q?", "answer": "a", "gold": [{"title": "A", "text": "a one. a two."}]}))
    pool.write_text(json.dumps({"title": "B", "text": "b."}) + "\n")

    whole, parts = read_hotpotqa(str(released)), read_hotpotqa(str(gold), str(pool))

    assert whole.documents == ["A\na one. a two.", "B\nb.", "C\nc."]
    assert (whole.queries[0].golds, whole.queries[0].context) == ((2, 0), (0, 1, 2))
    assert parts.documents == whole.documents[:2]
    assert parts.queries[0].golds == (0,)


def test_wrong_files_are_reported_in_one_sentence(tmp_path: Path, shipped_tokenizer: Any) -> None:
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text('{"text": "hello"}\n')
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    few = tmp_path / "few.txt"
    few.write_text("only three words")

    for paths, error, message in (
        ({"squad": str(wrong)}, DataError, "record 1: not a SQuAD record"),
        ({"hotpotqa": str(wrong)}, DataError, "record 1: not a HotpotQA record"),
        ({"squad": str(broken)}, DataError, "cannot be read"),
        ({"squad": str(tmp_path / "none.json")}, ConfigError, "file not found"),
        ({"hotpotqa_pool": str(wrong)}, ConfigError, "also set paths.hotpotqa"),
        ({"words": str(few)}, DataError, "3 different words"),
        ({"haystack": str(tmp_path / "none.txt")}, ConfigError, "none.txt"),
    ):
        with pytest.raises(error, match=message):
            SUITE.load(shipped_tokenizer, paths)


def test_own_haystack_and_words_are_used(tmp_path: Path, shipped_tokenizer: Any) -> None:
    prose, words = tmp_path / "essays.txt", tmp_path / "words.txt"
    prose.write_text("Zebras graze at dawn. " * 40)
    words.write_text("\n".join(f"word{at}" for at in range(200)))
    sources: Sources = SUITE.load(shipped_tokenizer, {"haystack": str(prose), "words": str(words)})

    asked = SUITE.tasks["niah_multikey_1"].build(sources, Ask(length=4096, seed=0, index=0))

    assert asked.context.count("Zebras") > 100
    assert asked.meta["keys"][0].startswith("word")
