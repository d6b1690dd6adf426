import json

import pytest

from unspool.data.sources.recall import RecallSource, generate_documents
from unspool.models.location import ASSETS
from unspool.models.tokenizer import load_tokenizer

from ..conftest import prose


@pytest.fixture(scope="module")
def shipped():
    return load_tokenizer(str(ASSETS / "tiny-base"))


def documents(tokenizer, **settings) -> list[str]:
    source = RecallSource.model_validate({"kind": "recall", "tokens": "40K", "prose": "unused"} | settings)
    sentences = ". ".join(prose(12, seed=number) for number in range(300))
    return list(generate_documents(source, tokenizer, [sentences], seed=0))


def counts(tokenizer, texts: list[str]) -> list[int]:
    return [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]


def objects(texts: list[str]) -> list[tuple[dict[str, str], list[tuple[str, str]]]]:
    """The facts and questions of each document."""
    found = []
    for text in texts:
        stated, *asked = text.split("\n")
        pairs = json.loads(stated, object_pairs_hook=list)
        assert len({key for key, _ in pairs}) == len(pairs)
        found.append((dict(pairs), [next(iter(json.loads(f"{{{line}}}").items())) for line in asked]))
    return found


@pytest.mark.parametrize("asked", [1, 0.1])
def test_every_answer_is_the_one_that_was_stated(shipped, asked):
    found = objects(documents(shipped, length=[200, 1000], pairs=1, asked=asked))

    assert len(found) > 40
    for stated, asks in found:
        assert asks
        assert all(stated[key] == value for key, value in asks)


def test_lengths_are_as_requested(shipped):
    for settings in ({"pairs": 1}, {"pairs": 1, "asked": 0.1}, {"pairs": 0}, {"pairs": 0, "repeats": 1}):
        lengths = counts(shipped, documents(shipped, length=[500, 1000], **settings))
        assert min(lengths) >= 400
        assert max(lengths) <= 1050


def test_one_question_fits_behind_the_largest_object(shipped):
    lengths = counts(shipped, documents(shipped, length=[60, 60], pairs=1, asked=0.001))
    assert max(lengths) < 60


def test_fewer_questions_leave_room_for_objects_as_long_as_the_document(shipped):
    def longest(asked: float) -> float:
        texts = documents(shipped, length=[1000, 1000], pairs=1, asked=asked)
        return max(len(text.split("\n")[0]) / len(text) for text in texts)

    assert longest(1) < 0.6
    assert longest(0.1) > 0.85
