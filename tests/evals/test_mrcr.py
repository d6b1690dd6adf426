"""MRCR recovery: conversations against their texts, and models whose recovery is known."""

import re

import numpy as np
import pytest

import unspool
from unspool.core.errors import ConfigError, DataError
from unspool.evals.backends.base import Backend
from unspool.evals.heldout import Materials
from unspool.evals.suites.mrcr import ORDINALS, SUITE, Conversation, MRCREval, conversation, recovery, split_replies

REQUEST = re.compile(r"User: Write a (.+?) about (\S+)\.\nAssistant: (.+?)\n\n")


class Copying(Backend):
    """Predicts a token well if it was among the last `sight` tokens before it."""

    def __init__(self, sight: int) -> None:
        self.sight = sight

    def window_losses(self, ids: np.ndarray) -> np.ndarray:
        return np.array([0.5 if ids[at] in ids[max(0, at - self.sight) : at] else 4.0 for at in range(1, len(ids))])


def config(**options) -> MRCREval:
    return MRCREval.model_validate({"suite": "mrcr", "lengths": [1024], "reply_words": 12, **options})


def build(materials: Materials, length: int = 1024, seed: int = 0, index: int = 0, **options) -> Conversation:
    chosen = config(**options)
    replies = split_replies(materials.documents, chosen.reply_words)
    return conversation(chosen, materials, replies, length=length, seed=seed, index=index)


def read_back(tokenizer, made: Conversation) -> tuple[list[str], str, list[tuple[str, str]]]:
    """From the text alone: replies to the asked request, the wanted one, and the other requests."""
    text = tokenizer.decode(made.full, skip_special_tokens=True)
    body, _, end = text.rpartition("User: Write down again, word for word, the ")
    ordinal, form, topic = re.match(r"(\w+) (.+) about (\S+)\.\nAssistant:", end).groups()
    found = REQUEST.findall(body)
    equal = [reply for kind, about, reply in found if (kind, about) == (form, topic)]
    assert end.endswith(f"Assistant: {equal[ORDINALS.index(ordinal)]}")
    others = [(kind, about) for kind, about, _ in found if (kind, about) != (form, topic)]
    assert any(kind == form for kind, _ in others) and any(about == topic for _, about in others), "near misses"
    return equal, equal[ORDINALS.index(ordinal)], others


@pytest.mark.slow
def test_a_solver_that_reads_the_text_finds_the_same_1000_replies(materials):
    tokenizer = materials.tokenizer
    for index in range(1000):
        made = build(materials, index=index, seed=1)
        equal, wanted, _ = read_back(tokenizer, made)
        assert (wanted, len(set(equal))) == (made.reply, made.needles)


@pytest.mark.parametrize("index", range(14))
def test_the_question_asks_for_the_reply_that_the_model_reads(materials, index):
    made = build(materials, index=index, seed=index)
    equal, wanted, _ = read_back(materials.tokenizer, made)

    assert wanted == made.reply
    assert made.needles == len(equal) == [2, 4, 8][index % 3]
    assert len(set(equal)) == made.needles


def test_the_oracle_holds_only_the_right_request_and_the_query_none(materials):
    made = build(materials, index=1)
    texts = {name: materials.tokenizer.decode(getattr(made, name)) for name in ("oracle", "query")}

    assert [reply for _, _, reply in REQUEST.findall(texts["oracle"])] == [made.reply]
    assert REQUEST.findall(texts["query"]) == []
    for ids in (made.oracle, made.query):
        assert ids[-made.answer_tokens :].tolist() == made.full[-made.answer_tokens :].tolist()


@pytest.mark.parametrize("length", [1024, 2500, 8192])
@pytest.mark.parametrize("reply_words", [12, 60])
def test_conversations_fill_their_length(tokenizer, words, documents, length, reply_words):
    materials = Materials(tokenizer=tokenizer, words=words, documents=documents * 3)
    for index in range(6):
        made = build(materials, length=length, index=index, needles=[2], reply_words=reply_words)
        assert 0.98 * length <= len(made.full) <= length


def test_baselines_see_one_turn(materials):
    made = build(materials, index=1)
    turns = REQUEST.findall(materials.tokenizer.decode(made.full))
    seen = {name: REQUEST.findall(materials.tokenizer.decode(ids)) for name, ids in made.single.items()}

    assert seen["first"] == turns[:1] and seen["last"] == turns[-1:] and seen["random"][0] in turns
    for ids in made.single.values():
        assert ids[-made.answer_tokens :].tolist() == made.full[-made.answer_tokens :].tolist()


def test_every_ordinal_is_asked_for_equally_often(materials):
    asked = []
    for index in range(8):
        text = materials.tokenizer.decode(build(materials, index=index, needles=[4]).query)
        asked.append(re.search(r"word for word, the (\w+)", text).group(1))
    assert sorted(asked) == sorted(2 * ORDINALS[:4])


def _score(materials: Materials, sight: int) -> dict:
    backend, losses = Copying(sight), []
    for index in range(9):
        made = build(materials, length=2000, index=index)
        contexts = {name: getattr(made, name) for name in ("full", "query", "oracle")}
        losses.append(
            {name: float(backend.window_losses(ids)[-made.answer_tokens :].mean()) for name, ids in contexts.items()}
        )
    return recovery(losses)


def test_a_model_that_sees_everything_recovers_all_and_a_short_sighted_one_nothing(materials):
    everything, nothing = _score(materials, sight=10_000), _score(materials, sight=60)

    assert everything["value"] >= 1
    assert abs(nothing["value"]) < 0.5, "it sees the oracle's reply, and of the conversation the last turn"
    assert nothing["value"] < everything["value"] - 0.5


def test_recovery_is_the_ratio_of_mean_gains():
    losses = [{"full": 2.0, "query": 4.0, "oracle": 1.0}, {"full": 1.0, "query": 2.0, "oracle": 1.0}]
    found = recovery(losses)

    assert found["value"] == pytest.approx((2 + 1) / (3 + 1))
    assert found["low"] <= found["value"] <= found["high"] and found["n"] == 2
    assert recovery([])["value"] is None
    assert recovery([{"full": 2.0, "query": 2.0, "oracle": 2.0}])["value"] is None, "nothing could be gained"


def test_cells_have_all_conversations_then_each_number_of_needles():
    one = {"suite": "mrcr", "length": 1024, "losses_by_context": {"full": 2.0, "query": 4.0, "oracle": 1.0}}
    cells = SUITE.cells(config(needles=[2, 8]), [{**one, "needles": 2}, {**one, "needles": 8}, {**one, "needles": 8}])

    assert [(cell.get("task"), cell["n"]) for cell in cells] == [(None, 3), ("2 needles", 1), ("8 needles", 2)]
    assert all(cell["value"] == pytest.approx(2 / 3) and cell["metric"] == "recovery" for cell in cells)


def test_cells_have_the_recovery_of_the_baselines():
    losses = {"full": 2.0, "query": 4.0, "oracle": 1.0, "random": 4.0, "first": 1.0, "last": 5.5}
    one = {"suite": "mrcr", "length": 1024, "needles": 2, "losses_by_context": losses}
    [cell] = SUITE.cells(config(needles=[2]), [one, one])

    assert cell["baselines"] == {"random": 0.0, "first": 1.0, "last": pytest.approx(-0.5)}


def test_what_does_not_fit_is_refused(tokenizer, words, materials):
    with pytest.raises(ConfigError, match="length 64 is too short for 2 replies of 12 words; use at least"):
        build(materials, length=64, needles=[2])
    short = Materials(tokenizer=tokenizer, words=words, documents=["One two three four. " * 60])
    with pytest.raises(DataError, match=r"has only \d+ replies of 12 words, too few for 4096 tokens"):
        build(short, length=4096)


def test_a_model_is_scored_end_to_end():
    settings = {"needles": [2], "reply_words": 12}
    result = unspool.evaluate("asset:tiny-base", "mrcr", [256], samples=3, suite_settings=settings)
    [cell] = result.summary["cells"]

    assert cell["n"] == 3 and cell["metric"] == "recovery"
    assert cell["oracle"] < cell["query"]
    assert sorted(cell["baselines"]) == ["first", "last", "random"]
