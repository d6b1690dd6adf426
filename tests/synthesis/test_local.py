"""A model in this process: replies side by side are those of requests on their own."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch

from unspool.evals.backends.transformers import ModelBackend
from unspool.models.location import resolve_path
from unspool.synthesis.generators import LocalBackend
from unspool.synthesis.requests import Reply, Request


@pytest.fixture(scope="module")
def backend() -> ModelBackend:
    return ModelBackend(str(resolve_path("asset:tiny-base", Path())), device=torch.device("cpu"), dtype=torch.float32)


class Counting:
    """A backend that counts its rows."""

    def __init__(self, backend: ModelBackend, row_tokens: int = 8192) -> None:
        self._backend, self.rows, self.row_tokens = backend, [], row_tokens
        self.tokenizer = backend.tokenizer

    def answers(self, prompt):
        self.rows.append(len(prompt.questions))
        return self._backend.answers(prompt)


REQUESTS = [
    Request(prompt=f"The keeper of lighthouse {number} wrote a book about {'birds and ' * number}", max_tokens=12)
    for number in range(7)
]


def together(answering: LocalBackend, requests: list[Request]) -> list[Reply]:
    ready = Barrier(len(requests))

    def one(request: Request) -> Reply:
        ready.wait()
        return answering.reply(request)

    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(one, requests))


def test_replies_side_by_side_are_those_of_requests_alone(backend):
    alone = LocalBackend(backend, "w")
    expected = [alone.reply(request) for request in REQUESTS]
    assert len({reply.text for reply in expected}) > 3, "replies that are all the same would show nothing"
    counting = Counting(backend)
    found = together(LocalBackend(counting, "w", width=4), REQUESTS)
    assert [(one.text, one.prompt_tokens, one.is_cut) for one in found] == [
        (one.text, one.prompt_tokens, one.is_cut) for one in expected
    ]
    assert sum(counting.rows) == 7
    assert 1 < max(counting.rows) <= 4


def test_a_row_holds_no_more_than_its_room_and_one_length_of_replies(backend):
    counting = Counting(backend, row_tokens=80)
    together(LocalBackend(counting, "w", width=7), REQUESTS)
    assert sum(counting.rows) == 7
    assert max(counting.rows) < 4
    counting = Counting(backend)
    mixed = [Request(prompt=request.prompt, max_tokens=8 + number) for number, request in enumerate(REQUESTS[:4])]
    found = together(LocalBackend(counting, "w", width=4), mixed)
    assert counting.rows == [1, 1, 1, 1]
    assert all(reply.reply_tokens <= request.max_tokens for reply, request in zip(found, mixed, strict=True))


def test_a_reply_continues_and_contains_its_first_words(backend):
    begun = Request(prompt="Tell me of the sea.", max_tokens=6, begin="Question: Who")
    reply = LocalBackend(backend, "w").reply(begun)
    assert reply.text.startswith("Question: Who")
    assert len(reply.text) > len("Question: Who")
    plain = LocalBackend(backend, "w").reply(Request(prompt="Tell me of the sea.", max_tokens=6))
    assert reply.prompt_tokens > plain.prompt_tokens
    whole = LocalBackend(backend, "w").reply(Request(prompt="Tell me of the sea.\n\nQuestion: Who", max_tokens=6))
    assert reply.text == "Question: Who" + whole.text


def test_an_error_reaches_everybody_who_waits(backend):
    class Broken(Counting):
        def answers(self, prompt):
            raise RuntimeError("out of memory")

    answering = LocalBackend(Broken(backend), "w", width=4)
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(answering.reply, request) for request in REQUESTS[:4]]
        for future in futures:
            with pytest.raises(RuntimeError, match="out of memory"):
                future.result(timeout=300)
