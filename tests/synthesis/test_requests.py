"""Requests in the user's words: checked, filled, asked in two steps, with the first words of a reply given."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from unspool.cli.main import build_app
from unspool.core.errors import ConfigError
from unspool.synthesis.config import REJECT_REASONS, ChecksConfig, ServerGenerator
from unspool.synthesis.generators import ServerBackend
from unspool.synthesis.quality import echoes, pair_reason, repeats, summary_reason
from unspool.synthesis.requests import GeneratorClient, GeneratorReplies, Request
from unspool.synthesis.templates import (
    DEFAULT_REQUESTS,
    PAIR_PROMPT,
    Pair,
    Templates,
    fill,
    load_templates,
    parse_answer,
    parse_question,
)

from .toy import read_conversations, send_text, server, write_documents, write_recipe

OWN = """
ask:
  question: {text: "{part} Ask.", begin: ["Question: Who", "Question: Where"], tokens: 20}
  answer: "{part} Reply to {question}"
  join: "{summaries} Join."
"""
CHECKS = ChecksConfig.model_validate({})


def load(folder: Path, text: str) -> Templates:
    (folder / "own.yaml").write_text(text)
    return load_templates(folder / "own.yaml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ask: {question: '{part}'}", "both question and answer"),
        ("ask: {pair: '{part}', question: '{part}', answer: '{part} {question}'}", "remove one"),
        ("ask: {sumary: '{part}'}", "did you mean 'summary'?"),
        ("ask: {summary: 'Sum up.'}", "lacks the placeholder {part}"),
        ("ask: {join: '{summaries} {part}'}", "unknown placeholder {part}; allowed: {summaries}"),
        ("ask: {summary: {text: '{part}', start: x}}", "unknown key 'start'"),
        ("ask: {summary: {begin: x}}", "must be a text"),
        ("ask: {summary: {text: '{part}', begin: ['']}}", "first words"),
        ("ask: {summary: {text: '{part}', tokens: 0}}", "at least 1"),
        ("ask: [1]", "must be a mapping"),
    ],
)
def test_a_mistake_in_the_users_requests_is_reported(text, said, tmp_path):
    with pytest.raises(ConfigError) as told:
        load(tmp_path, text)
    assert said in str(told.value)
    assert "own.yaml: ask" in str(told.value)


def test_missing_requests_use_the_built_in_wording(tmp_path):
    asks = load(tmp_path, OWN).requests
    assert asks.in_two_steps
    assert not DEFAULT_REQUESTS.in_two_steps
    assert asks.join(["a", "b"], 100, is_whole=True) == Request(prompt="a\n\nb Join.", max_tokens=100)
    assert asks.summaries(["some"], 100) == DEFAULT_REQUESTS.summaries(["some"], 100)
    assert DEFAULT_REQUESTS.pair("some", 100) == Request(prompt=fill(PAIR_PROMPT, part="some"), max_tokens=100)


def test_text_is_not_read_as_a_template_and_replies_begin_in_all_ways(tmp_path):
    asks = load(tmp_path, OWN).requests
    assert asks.answer("{question}", "Why?", 100).prompt == "{question} Reply to Why?"
    begun = {asks.question(f"part {number}", 100).begin for number in range(30)}
    assert begun == {"Question: Who", "Question: Where"}
    assert asks.question("a", 100) == asks.question("a", 100)
    assert asks.question("a", 100).max_tokens == 20
    assert asks.question("a", 10).max_tokens == 10, "never more than the generator allows"


def test_first_words_make_another_request_and_no_words_the_old_one():
    plain = Request(prompt="a", max_tokens=5)
    assert plain.key("x") != Request(prompt="a", max_tokens=5, begin="b").key("x")
    from unspool.core.artifacts import digest

    assert plain.key("x") == digest(["x", "a", 5]), "replies of earlier runs would be asked for again"


def test_wording_that_asks_otherwise_makes_another_set(tmp_path):
    assert load(tmp_path, OWN).digest != load(tmp_path, "{}").digest == load_templates(None).digest


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("Question: Who sold the mill?\n\nAnswer: Jonas.", "Who sold the mill?"),
        ("Who sold the mill? It was Jonas.", "Who sold the mill?"),
        ("**Question:** Who sold the mill?", "Who sold the mill?"),
        ("Here are some:\n1. Who sold the mill?\n2. When?", "Who sold the mill?"),
        ("QUESTION: who sold the mill?", "who sold the mill?"),
        ("The mill was sold.", None),
        ("Question: the mill", None),
        ("?", None),
        ("", None),
    ],
)
def test_the_question_of_a_reply_is_found(reply, expected):
    assert parse_question(reply) == expected


def test_the_answer_of_a_reply_is_found():
    assert parse_answer("Jonas Berg did.") == "Jonas Berg did."
    assert parse_answer("**Answer:** Jonas.") == "Jonas."
    assert parse_answer(" \n") is None
    assert parse_answer("Question: Who?") is None


def test_repetitive_text_is_rejected():
    circle = "The mill is the mill of the man who owns the mill. " * 3
    assert repeats(circle)
    assert "repeats" in REJECT_REASONS
    assert pair_reason(Pair("Whose mill?", circle), circle, CHECKS) == "repeats"
    assert summary_reason(circle, circle, CHECKS) == "repeats"
    fine = (
        "Jonas Berg sold the mill at the bend of the river to his cousin Marta, and Marta sold the mill at the bend "
        "to nobody, since she liked the sound of water at night and the smell of flour in the morning."
    )
    assert not repeats(fine)
    assert not repeats("Jonas.")
    assert pair_reason(Pair("Who?", fine), fine, CHECKS) is None


def test_an_answer_that_only_says_the_question_again_is_refused():
    echo = Pair("What happened to the mill that Jonas Berg owned?", "The mill owned by Jonas Berg happened.")
    assert pair_reason(echo, "the mill that Jonas Berg owned happened", CHECKS) == "echoes"
    assert not echoes(Pair("Was the mill red or blue?", "Red."))
    assert not echoes(Pair("Did he sell the mill?", "No."))
    assert not echoes(Pair("Why did Jonas Berg sell the mill?", "Jonas Berg wanted to go to sea."))


def test_a_server_request_with_begin_is_refused():
    config = ServerGenerator.model_validate({"kind": "openai", "url": "http://localhost:1/v1", "model": "m"})
    with pytest.raises(ConfigError, match="begin"):
        ServerBackend(config).reply(Request(prompt="a", max_tokens=5, begin="Question:"))


def test_question_and_answer_are_requested_one_after_the_other(tmp_path):
    write_documents(tmp_path / "docs.jsonl", 6)
    (tmp_path / "own.yaml").write_text(
        'ask: {question: {text: "{part}\\nASK", tokens: 30}, answer: "{part}\\nREPLY {question}"}'
    )
    seen: list[tuple[str, int]] = []

    def answer(handler, body):
        words = body["messages"][0]["content"]
        seen.append((words, body["max_tokens"]))
        first = words.split(".")[0]
        send_text(handler, f"What of {first.split()[0]}?" if words.endswith("ASK") else f"{first}.")

    with server(answer) as url:
        generator = {"kind": "openai", "url": url, "model": "m", "reply_tokens": 128}
        recipe = write_recipe(
            tmp_path, {"generator": generator, "templates": str(tmp_path / "own.yaml"), "shares": {"qa": 1}}
        )
        done = CliRunner().invoke(build_app(), ["synth", str(recipe), "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)["long"]
    assert result["kept"] == 6
    assert sorted({tokens for _, tokens in seen}) == [30, 128]
    assert len(seen) == 12
    for record in read_conversations(tmp_path / "run/synth/long"):
        assert len(record["provenance"]["requests"]) == 2
        asked, told = (message["content"] for message in record["messages"])
        assert "What of " in asked
        assert told.rstrip(".").split()[-1] in asked


# An error that stops the run, such as a full disk


class Silent:
    """A generator that answers when it is told to."""

    identity = "silent"

    def __init__(self) -> None:
        self.may_answer = threading.Event()

    def reply(self, request: Request) -> Any:
        self.may_answer.wait(20)
        raise AssertionError("stopped")


def test_closing_while_a_request_is_added_does_not_hang(tmp_path, monkeypatch):
    """The pool cancels what waits under a lock of its own, which adding a request also needs."""
    backend = Silent()
    client = GeneratorClient(backend, GeneratorReplies(tmp_path / "replies.jsonl"), width=1)
    pool, inside = client._pool, threading.Event()
    add = pool.submit

    def add_late(*args: Any) -> Any:
        if args[-1].prompt == "late":
            inside.set()
            while not pool._shutdown:
                time.sleep(0.001)
        return add(*args)

    monkeypatch.setattr(pool, "submit", add_late)
    client._submit(Request(prompt="first", max_tokens=1))
    client._submit(Request(prompt="second", max_tokens=1))  # waits, and will be cancelled

    def add_request() -> None:
        with pytest.raises(RuntimeError, match="shutdown"):
            client._submit(Request(prompt="late", max_tokens=1))

    adding, closing = (threading.Thread(target=work, daemon=True) for work in (add_request, client.close))
    adding.start()
    inside.wait(10)
    closing.start()
    adding.join(5)
    backend.may_answer.set()
    closing.join(10)
    assert not adding.is_alive() and not closing.is_alive()
