"""The user's own files: every shape that is read, what is refused, and how contexts are built from a pool."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from unspool.core.errors import ConfigError, DataError
from unspool.evals.suite import Ask
from unspool.evals.suites.helmet.data import Pool, Sources, qa_item, rank_item
from unspool.evals.suites.helmet.suite import SUITE
from unspool.evals.suites.records import Passage


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def passages(count: int) -> list[dict[str, Any]]:
    return [
        {"title": f"T{at}", "text": f"The river number {at} runs through town {at * 7} to the sea."}
        for at in range(count)
    ]


def loaded(tokenizer: PreTrainedTokenizerFast, **paths: str) -> Sources:
    sources: Sources = SUITE.load(tokenizer, paths)
    return sources


GOLD = {"title": "Gold", "text": "The tower was built by Ada."}
SHAPES: list[dict[str, Any]] = [
    {"question": "who built it", "answers": ["Ada"], "gold_title": "Gold", "gold_passage": GOLD["text"]},
    {"question": "who built it", "answer": "Ada", "gold": [GOLD]},
    {"query": "who built it", "answers": [["Ada"]], "pos": [GOLD], "neg": ["The river is long."]},
    {"id": 7, "question": "who built it", "answers": ["Ada"], "ctxs": [{**GOLD, "has_answer": True}, *passages(2)]},
]


@pytest.mark.parametrize("row", SHAPES)
def test_questions_are_read_in_every_shape(row: dict[str, Any]):
    item = qa_item(row, "file")
    assert (item.question, item.answers, item.gold) == ("who built it", ("Ada",), (Passage("Gold", GOLD["text"]),))


def test_judged_passages_are_read_in_every_shape():
    for row in (
        {"query": "q", "pos": ["good"], "neg": ["bad"]},
        {
            "qid": "1",
            "query": "q",
            "ctxs": [{"id": "4", "text": "bad", "label": 0}, {"id": "9", "text": "good", "label": 1}],
        },
        {
            "query_id": 1,
            "query": "q",
            "passages": [{"text": "good", "is_selected": 1}, {"text": "bad", "is_selected": 0}],
        },
    ):
        item = rank_item(row, "file")
        assert (item.gold, item.grades, item.others) == ((Passage("", "good"),), (1,), (Passage("", "bad"),))


def test_contexts_are_built_from_a_pool(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    rows = [{**SHAPES[0], "question": f"who built tower {at}"} for at in range(5)]
    sources = loaded(
        tokenizer, nq=written(tmp_path / "nq.jsonl", rows), passages=written(tmp_path / "pool.jsonl", passages(300))
    )
    asked = SUITE.tasks["nq"].build(sources, Ask(length=2048, seed=0, index=0))
    assert asked.meta["generated"] is False
    assert GOLD["text"] in asked.context
    assert SUITE.tasks["nq"].score(" Ada", asked) == 1
    assert SUITE.tasks["nq"].size is not None
    assert SUITE.tasks["nq"].size(sources) == 5


def test_a_question_without_passages_gets_the_pools_best_with_an_answer(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
):
    rows = [
        {"question": "where does river number 5 run", "answer": "town 35"},
        {"question": "and", "answer": "nowhere"},
    ]
    sources = loaded(
        tokenizer,
        triviaqa=written(tmp_path / "t.jsonl", rows),
        triviaqa_passages=written(tmp_path / "pool.jsonl", passages(50)),
    )
    assert [item.gold[0].title for item in sources.qa("triviaqa").items] == ["T5"]


def test_popular_questions_of_popqa_are_skipped(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    rows = [{**SHAPES[1], "id": at, "s_pop": popular} for at, popular in enumerate((10, 999, 1000, 50_000))]
    sources = loaded(tokenizer, popqa=written(tmp_path / "p.jsonl", rows))
    assert [item.id for item in sources.qa("popqa").items] == ["0", "1"]
    with pytest.raises(ConfigError, match="s_pop"):
        loaded(tokenizer, popqa=written(tmp_path / "q.jsonl", rows[3:])).qa("popqa")


def test_helmets_files_repeat_a_question_for_each_depth_and_it_counts_once(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
):
    rows = [SHAPES[3], {**SHAPES[3], "ctxs": [*passages(2), {**GOLD, "has_answer": True}]}]
    assert len(loaded(tokenizer, nq=written(tmp_path / "nq.jsonl", rows)).qa("nq").items) == 1


def test_books_lose_their_end_and_say_so(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    book = " ".join(f"word{at}" for at in range(4000))
    rows = [{"id": at, "context": book, "question": f"q{at}", "answer": ["a"]} for at in range(4)]
    sources = loaded(tokenizer, narrativeqa=written(tmp_path / "n.jsonl", rows))
    asked = SUITE.tasks["narrativeqa"].build(sources, Ask(length=2048, seed=0, index=0))
    assert asked.context.endswith(" ... [what follows is left out]")
    assert asked.context.count("Question: ") == 2
    short = SUITE.tasks["narrativeqa"].build(sources, Ask(length=65536, seed=0, index=0))
    assert short.context.endswith("word3999")


@pytest.mark.parametrize(
    ("row", "said"),
    [({"q": "x"}, r"record 1: none of the fields question, query, input; it has q"), ({"question": "x"}, "answers")],
)
def test_a_record_that_lacks_something_is_named(
    row: dict[str, Any], said: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
):
    with pytest.raises(DataError, match=said):
        loaded(tokenizer, nq=written(tmp_path / "nq.jsonl", [row])).qa("nq")


def test_files_that_are_missing_empty_or_broken_are_named(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    with pytest.raises(ConfigError, match="file not found"):
        loaded(tokenizer, nq=str(tmp_path / "none.jsonl")).qa("nq")
    (tmp_path / "bad.jsonl").write_text("{}\nnot json\n")
    with pytest.raises(DataError, match="line 2"):
        loaded(tokenizer, nq=str(tmp_path / "bad.jsonl")).qa("nq")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="no records"):
        loaded(tokenizer, nq=str(tmp_path / "empty.jsonl")).qa("nq")
    with pytest.raises(DataError, match="trec_fine_demos"):
        sources = loaded(tokenizer, trec_fine=written(tmp_path / "t.jsonl", [{"text": "a", "fine": "b"}]))
        SUITE.tasks["trec_fine"].build(sources, Ask(length=1024, seed=0, index=0))


def test_distractors_are_similar_and_never_answer():
    pool = Pool([Passage(row["title"], row["text"]) for row in passages(40)])
    item = qa_item({"question": "river number 5 and town", "answers": ["town 35"], "gold": [passages(6)[5]]}, "f")
    found = [passage.title for passage in pool.distractors(item)]
    assert "T5" not in found
    assert len(found) == 39
    alone = Pool([Passage("x", "apples and pears"), *pool.passages, Passage("y", "rivers in town 35 by the sea")])
    assert "y" not in [passage.title for passage in alone.distractors(item)]
    assert next(iter(alone.ranked("pears and apples"))).title == "x"


def test_reference_mode_shows_each_released_depth(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    # At 4096 tokens HELMET has 20 passages.
    others, gold = passages(19), {**GOLD, "has_answer": True}
    rows = [{**SHAPES[3], "ctxs": [*others[:place], gold, *others[place:]]} for place in (0, 4, 8, 11, 15, 19)]
    rows += [{**SHAPES[3], "id": other, "question": f"which {other}"} for other in (8, 9)]
    sources = loaded(tokenizer, nq=written(tmp_path / "nq.jsonl", rows))
    task = SUITE.tasks["nq"]
    asked = [task.build(sources, Ask(length=4096, seed=0, index=index, mode="reference")) for index in range(18)]
    found = [one.depth for one in asked if one.meta["id"] == "7"]
    assert found == pytest.approx([place / 19 for place in (0, 4, 8, 11, 15, 19)])
    assert all(one.context.count("(Title: Gold)") >= 1 for one in asked if one.meta["id"] == "7")


def test_alces_documents_are_read_in_their_order(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    documents = [*passages(3), GOLD, *passages(40)[3:]]
    rows = [{"question": "who built it", "answers": [["Ada", "Ada Lee"], ["Eve"]], "docs": documents}]
    demos = [{"question": f"q{at}", "answer": "x [5].", "docs": passages(5)} for at in range(2)]
    demo_file = tmp_path / "demos.json"
    demo_file.write_text(json.dumps({"instruction": "", "demos": demos}))
    sources = loaded(tokenizer, qampari=written(tmp_path / "q.jsonl", rows), qampari_demos=str(demo_file))

    asked = SUITE.tasks["qampari"].build(sources, Ask(length=4096, seed=0, index=0, mode="reference"))

    assert asked.meta["answers"] == [["Ada", "Ada Lee"], ["Eve"]]
    assert asked.meta["documents"] == [f"Title: {one['title']}\n{one['text']}" for one in documents[:8]]
    assert asked.meta["shots"] == 2
    assert SUITE.tasks["qampari"].score("Ada [4]", asked) == 0.5
    assert sources.qa("qampari").items[0].gold == (Passage("Gold", GOLD["text"]),)
