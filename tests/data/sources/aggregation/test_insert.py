"""Tasks in real documents: a second solver agrees, the text around them is unchanged, shards do not matter."""

import json
from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from unspool.core.rng import rng_for
from unspool.data.corpus.build import build_corpus
from unspool.data.corpus.config import EngineConfig
from unspool.data.corpus.store import open_corpus
from unspool.data.sources import base
from unspool.data.sources.aggregation import passages, word_counts
from unspool.data.sources.aggregation.config import Aggregation
from unspool.data.sources.aggregation.insert import describe_tasks, insert_tasks, sections_with_tasks
from unspool.data.sources.aggregation.sections import group_sections, split_paragraphs
from unspool.data.sources.aggregation.word_counts import spell
from unspool.data.sources.base import read_strictly
from unspool.data.sources.gzip_ratio import gzip_ratio
from unspool.data.sources.jsonl import JsonlSource
from unspool.models.location import resolve_path

from ...conftest import build_tokenizer
from ...corpus.test_build import contents
from .solver import NUMBER_WORDS, _number, solve


@pytest.fixture(scope="module")
def books() -> list[str]:
    path = Path(resolve_path("asset:demo/train.jsonl.zst", Path()))
    return [document.text for document in read_strictly(JsonlSource(kind="jsonl", path=str(path)), [path])]


def config(**options) -> Aggregation:
    return Aggregation.model_validate({"section": [256, 1024], **options})


@pytest.mark.parametrize("task", ["word_counts", "passages"])
def test_every_answer_is_that_of_a_second_solver(books, task):
    solved, counts = [], Counter()
    options = config(tasks={task: 1}, section=["1K", "8K"])
    seeds = range(1 if task == "word_counts" else 2)
    for seed, number in product(seeds, range(len(books))):
        written, inserted = insert_tasks(options, f"b:{number}", books[number], seed)
        solved += solve(written)
        counts += inserted

    assert len(solved) >= 200
    assert [one for one in solved if one.given != one.right] == []
    assert counts["documents"] == len(seeds) * len(books)
    assert 3 * counts[task] < len(solved) <= 5 * counts[task] if task == "word_counts" else len(solved) == counts[task]
    if task == "passages":
        assert all(2 <= len(one.given) <= 8 for one in solved)
    # Answers differ, so that none is right by habit.
    answers = Counter(json.dumps(one.given) for one in solved)
    assert max(answers.values()) < 0.2 * len(solved)


def test_the_solver_notices_a_wrong_count_and_a_missing_sentence(books, monkeypatch):
    frequent = word_counts.frequent_words
    monkeypatch.setattr(
        word_counts, "frequent_words", lambda section: [(word, count + 1) for word, count in frequent(section)]
    )
    written, _ = insert_tasks(config(tasks={"word_counts": 1}), "a", books[0], seed=0)
    found = list(solve(written))
    assert found and all(one.given == one.right + 1 for one in found)

    best = passages.best_phrases
    monkeypatch.setattr(passages, "best_phrases", lambda *args: [(phrase, found[:-1]) for phrase, found in best(*args)])
    written, _ = insert_tasks(config(tasks={"passages": 1}), "a", books[0], seed=0)
    found = list(solve(written))
    assert found and all(one.given == one.right[:-1] for one in found)


WEIRD = [
    "",
    "one line without an end",
    "a\r\n\r\nb\r\n\r\n" * 40,
    "\n\n\n" * 30,
    "no paragraphs, but sentences. " * 200,
    "lines\nof words words words\n" * 90,
    "\t  indented text text text\n \n" * 80 + "tail",
    "Ωmega Ωmega straße STRASSE İstanbul. \u2028 x\x0c y\n\n" * 50,
    "{braces} {word} {0} %s words words words.\n\n" * 60,
]


@pytest.mark.parametrize("task", ["word_counts", "passages"])
@pytest.mark.parametrize("text", WEIRD, ids=range(len(WEIRD)))
def test_the_text_around_the_tasks_is_unchanged(task, text):
    options = config(tasks={task: 1}, section=[64, 128])
    parts = sections_with_tasks(options, text, rng_for(0, "a"))

    assert "".join(section for section, _, _ in parts) == text
    written, counts = insert_tasks(options, "a", text, seed=0)
    if not counts["documents"]:
        assert written == text and counts == {"documents_unsuitable": 1}
    else:
        assert len(written) > len(text)
        assert all(block.endswith("\n\n") for _, _, block in parts if block)


def test_a_section_has_between_a_quarter_and_half_of_a_short_document_at_most():
    rng = np.random.default_rng(0)
    paragraphs = ["x" * int(size) + "\n\n" for size in rng.integers(50, 300, size=460)]
    length = sum(map(len, paragraphs))
    assert split_paragraphs("".join(paragraphs)) == paragraphs

    for shortest, longest in ((100, 1000), (1000, 4000), (1 << 20, 1 << 21)):
        sizes = [sum(map(len, held)) for held in group_sections(paragraphs, (shortest, longest), rng)]
        assert sum(sizes) == length
        assert max(sizes) <= min(4 * longest, length / 2)
        least = min(4 * shortest, length / 4)
        assert min(sizes[:-1]) > least / 2 - 302, "a power of two below the least, minus a paragraph"


def test_tasks_depend_on_seed_and_document_only(books):
    def write(doc_id: str, seed: int) -> str:
        return insert_tasks(config(), doc_id, books[1], seed)[0]

    assert write("a", 0) == write("a", 0)
    assert len({write("a", 0), write("a", 1), write("b", 0)}) == 3


def test_share_and_proportions_hold_over_documents(books):
    text = books[0][:6000]
    options = config(share=0.3, tasks={"word_counts": 3, "passages": 1}, section=[64, 512])
    found = [insert_tasks(options, f"d:{number}", text, seed=0)[1] for number in range(600)]
    kinds = Counter("word_counts" if counts["word_counts"] else "passages" for counts in found if counts["documents"])

    assert sum(counts["documents"] for counts in found) / 600 == pytest.approx(0.3, abs=0.06)
    assert kinds["word_counts"] / kinds.total() == pytest.approx(0.75, abs=0.1)
    assert all(not (counts["word_counts"] and counts["passages"]) for counts in found)


def write_books(folder: Path, books: list[str]) -> None:
    for file, part in enumerate((books[:3], books[3:5])):
        lines = "".join(json.dumps({"text": text[:30_000]}) + "\n" for text in part)
        (folder / f"part-{file}.jsonl").write_text(lines)


def build(root: Path, name: str, *, workers: int = 1, seed: int = 0, **options) -> dict:
    source = JsonlSource.model_validate({"kind": "jsonl", "path": "part-*.jsonl", **options})
    out, engine = root / "out" / name, EngineConfig(workers=workers)
    return build_corpus(source, out, tokenizer=build_tokenizer(), root=root, engine=engine, seed=seed)


def test_a_corpus_with_tasks_is_the_same_for_any_shards_and_workers(tmp_path, books, monkeypatch, caplog):
    write_books(tmp_path, books)
    options = {"aggregation": {"share": 0.7, "section": [128, 512]}, "gzip_ratio": {"min": 0.1}}
    with caplog.at_level("INFO", logger="unspool"):
        counts = build(tmp_path, "one", **options)
    monkeypatch.setattr(base, "TASK_BYTES", 1)
    assert build(tmp_path, "two", workers=2, **options)["tasks"] == counts["tasks"]

    assert contents(tmp_path / "out/one") == contents(tmp_path / "out/two")
    assert 0 < counts["tasks"]["documents"] < 5
    assert describe_tasks(counts["tasks"]) in caplog.text
    ratios = open_corpus(tmp_path / "out/one").gzip_ratios
    assert ratios.tolist() == [gzip_ratio(text[:30_000]) for text in books[:5]], "of the text before tasks"


def test_only_a_corpus_with_tasks_depends_on_the_seed(tmp_path, books, caplog):
    write_books(tmp_path, books)
    options = {"aggregation": {"section": [128, 512]}}
    build(tmp_path, "tasks", **options)
    before = contents(tmp_path / "out/tasks")
    build(tmp_path, "tasks", seed=1, **options)
    assert contents(tmp_path / "out/tasks") != before

    build(tmp_path, "plain")
    with caplog.at_level("INFO", logger="unspool"):
        build(tmp_path, "plain", seed=1)
    assert "corpus plain: up to date" in caplog.text


def test_numbers_in_words_are_read_back():
    for number in [*range(1200), 1999, 2000, 2001, 9999, 10_000, 12_345, 99_999, 100_000, 119_119]:
        assert _number(spell(number)) == number, spell(number)
    assert (spell(1045), spell(21)) == ("one thousand forty-five", "twenty-one")
    assert len({spell(number) for number in range(5000)}) == 5000
    assert NUMBER_WORDS["ninety"] == 90


def test_words_are_counted_whole_and_in_any_case():
    section = "Mill, mill; MILL! windmill mills mill-race the the the the there " + "3mill mill_x " * 2
    assert dict(word_counts.frequent_words(section)) == {"mill": 8}


def test_a_phrase_is_words_with_spaces_only_and_its_ends_have_meaning():
    found = passages.phrases_in("The old stone bridge, built there; Stone Bridge of the kings")
    assert {"stone bridge"} <= found
    assert not {"bridge built", "the old", "bridge of", "old stone"} & found


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"share": 0}, "greater than 0"),
        ({"share": 1.1}, "less than or equal to 1"),
        ({"tasks": {}}, "tasks needs shares above 0"),
        ({"tasks": {"passages": 0}}, "tasks needs shares above 0"),
        ({"tasks": {"cwe": 1}}, "'word_counts' or 'passages'"),
        ({"section": [8, 64]}, "section needs \\[shortest, longest\\] with at least 64 tokens"),
        ({"section": [256, 128]}, "section needs"),
        ({"questions": 11}, "less than or equal to 10"),
    ],
)
def test_wrong_settings_are_refused(settings, problem):
    with pytest.raises(ValidationError, match=problem):
        Aggregation.model_validate(settings)


def test_the_log_counts_documents_and_tasks():
    assert describe_tasks({"documents": 1, "passages": 2}) == "inserted tasks into 1 document: 2 passages"
    assert describe_tasks({"documents": 2, "word_counts": 3, "documents_unsuitable": 1}) == (
        "inserted tasks into 2 documents: 3 word_counts; 1 too short or without repeated words"
    )
