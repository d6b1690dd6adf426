import time

import numpy as np
import pytest
from transformers import AutoTokenizer

from unspool.core.errors import DataError
from unspool.data.sources.synthetic import fit_documents as generate
from unspool.data.sources.synthetic.fit_documents import (
    LEAST,
    PART_TOKENS,
    TASKS,
    SyntheticSource,
    generate_document,
    load_prose,
    plan_documents,
    split_plan,
)
from unspool.data.tokenize.encoder import build_encoder
from unspool.models.location import resolve_path

from ...conftest import build_tokenizer
from .factory import SENTENCES, characters, document
from .solvers import check
from .solvers.reading import read_parts


def source(**changes) -> SyntheticSource:
    return SyntheticSource.model_validate({"kind": "synthetic", "tokens": "1M", "length": ["1K", "32K"]} | changes)


def tokenizers():
    shipped = AutoTokenizer.from_pretrained(resolve_path("asset:tiny-base", None))
    return {"nearly bytes": build_tokenizer(), "with a beginning": build_tokenizer(bos=True), "words": shipped}


@pytest.mark.parametrize("name", ["nearly bytes", "with a beginning", "words"])
@pytest.mark.parametrize("task", TASKS)
def test_lengths_are_met_in_tokens_and_never_exceeded(task, name):
    encoder = build_encoder(tokenizers()[name])

    def encode(text: str) -> np.ndarray:
        return encoder.encode([text])[0]

    for index, length in enumerate((1024, 1500, 2048, 5000, 12_000)):
        made = generate_document(task, length, encode, SENTENCES if index % 2 else [], seed=3, index=index)
        assert LEAST * length <= len(made.tokens) <= length
        np.testing.assert_array_equal(made.tokens, encode(made.text))
        assert check(task, made.text) is None
        assert len(read_parts(made.text).questions) >= 2


@pytest.mark.parametrize("task", TASKS)
def test_the_shortest_lengths_are_not_exceeded_either(task):
    for index in range(20):
        made = generate_document(task, 512, characters, [], seed=0, index=index)
        assert 0.9 * 512 <= len(made.tokens) <= 512


def test_a_length_that_cannot_be_met_is_refused():
    with pytest.raises(DataError, match="task hops cannot make a document as short as 512 tokens"):
        generate_document("hops", 512, lambda text: np.zeros(20 * len(text)), [], seed=0, index=0)


def test_a_document_depends_on_the_seed_and_its_number_alone():
    plan = plan_documents(source(tokens="64K", length=["1K", "4K"]), seed=5)

    def generated(index: int, seed: int) -> str:
        return generate_document(plan.tasks[index], int(plan.lengths[index]), characters, [], seed, index).text

    whole = {index: generated(index, 5) for index in range(8)}
    assert all(generated(index, 5) == whole[index] for index in (6, 2))
    assert len(set(whole.values())) == 8
    assert generated(2, 6) != whole[2]


def test_more_tokens_mean_more_documents_and_the_same_first_ones():
    few, many = plan_documents(source(tokens="1M"), 1), plan_documents(source(tokens="100M"), 1)
    assert len(many.lengths) > generate.PLAN_BLOCK > len(few.lengths)
    np.testing.assert_array_equal(many.lengths[: len(few.lengths)], few.lengths)
    assert many.tasks[: len(few.tasks)] == few.tasks
    assert 0.99 < generate.AIM * many.lengths.sum() / (100 << 20) < 1.01


def test_lengths_are_spread_evenly_over_their_logarithm():
    lengths = plan_documents(source(tokens="100M"), 0).lengths
    assert (lengths.min(), lengths.max()) >= (1024, 1024) and lengths.max() <= 32768
    counts, _ = np.histogram(np.log2(lengths), bins=5, range=(10, 15))
    assert counts.min() > 0.9 * counts.mean()


def test_tasks_follow_their_shares():
    tasks = plan_documents(source(tokens="50M", tasks={"hops": 3, "states": 1}), 0).tasks
    assert set(tasks) == {"hops", "states"}
    assert 0.72 < tasks.count("hops") / len(tasks) < 0.78


def test_parts_hold_every_document_once_and_are_alike():
    plan = plan_documents(source(tokens="100M"), 0)
    parts = split_plan(plan)
    assert [index for part in parts for index in part] == list(range(len(plan.lengths)))
    sizes = [int(plan.lengths[part.start : part.stop].sum()) for part in parts]
    assert len(parts) > 40
    assert max(sizes) < PART_TOKENS + 32768
    assert len(split_plan(plan_documents(source(tokens=1), 0))) == 1


def test_prose_that_looks_like_a_fact_or_a_question_is_skipped():
    facts = [
        "Ann Lee reports to Bob Ray.",
        "Step 1: the baker opened his shop at six.",
        "Entry 1234: bread butter cheese and so on.",
        "Question: what happened to the ferry after the war?",
        "The marks of Ann Lee are red, blue, green.",
    ]
    plain = "The ferry was never seen again after the war."
    assert load_prose([" ".join([*facts, plain, "Too short."])]) == [plain]
    with pytest.raises(DataError, match="the prose has no sentence of 20 to 400 characters"):
        load_prose(["Short. Too short."])


def test_prose_is_between_the_facts():
    texts = [document("states", 1024, index, with_prose=True) for index in range(40)]
    shares = [sum(map(text.count, SENTENCES)) * 78 / len(text) for text in texts]
    assert 0 in shares and max(shares) > 0.5
    assert all(check("states", text) is None for text in texts)


@pytest.mark.slow
def test_making_texts_is_not_slower_than_tokenizing_them():
    encoder = build_encoder(tokenizers()["words"])
    began = time.process_time()
    texts = [document(task, 1 << 15, index) for task in TASKS for index in range(4)]
    made = time.process_time()
    encoder.encode(texts)
    assert made - began < time.process_time() - made
