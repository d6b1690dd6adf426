"""The server backend and judges, against a small server on this machine."""

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from unspool.core.errors import ConfigError, UnspoolError
from unspool.core.http_client import RetryPolicy, printable_line, request_json
from unspool.evals import suites
from unspool.evals.backends.base import Endpoint, PromptForm
from unspool.evals.backends.mock import Oracle
from unspool.evals.backends.openai import OpenAiBackend, Server, ServerAbilities
from unspool.evals.run import Scoring, score
from unspool.evals.suites.perplexity import PerplexityEval
from unspool.evals.suites.ruler import RulerEval

from .toy import TOY

QUICK = RetryPolicy(seconds=120, attempts=3, pause=0.001)


class Talk:
    """What the server was asked, and what it shall say next: a status, or a function of the request."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict, str | None]] = []
        self.troubles: list[int] = []
        self.answer = lambda path, body: "fine"
        self.raw: bytes | None = None


@pytest.fixture
def talk() -> Talk:
    return Talk()


@pytest.fixture
def url(talk: Talk) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            talk.asked.append((self.path, body, self.headers.get("Authorization")))
            if talk.troubles:
                status = talk.troubles.pop(0)
                self._send(status, json.dumps({"error": {"message": "no\x1b[2J such thing\nmore"}}).encode())
                return
            if talk.raw is not None:
                self._send(200, talk.raw)
                return
            text = talk.answer(self.path, body)
            choice = {"message": {"content": text}} if "chat" in self.path else {"text": text}
            self._send(200, json.dumps({"choices": [choice]}).encode())

        def _send(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setitem(suites.SUITES, "ruler", TOY)


@pytest.fixture
def scoring(tmp_path: Path) -> Scoring:
    config = RulerEval.model_validate({"suite": "ruler", "lengths": [256], "samples": 8, "tasks": ["lone", "shared"]})
    return Scoring(model="m", model_hash="m", evals=[config], seed=0, out_dir=tmp_path / "scores", root=tmp_path)


def backend_of(url: str, tokenizer, endpoint: Endpoint = "completions", **options) -> OpenAiBackend:
    abilities = ServerAbilities(form=PromptForm(endpoint=endpoint))
    return OpenAiBackend(Server(url=url, model="served", retry=QUICK, **options), tokenizer, abilities)


def test_completions_get_token_ids_and_give_the_scores_of_the_same_answers(url, talk, scoring, tokenizer):
    oracle = {}

    class Remembering(Oracle):
        def answer(self, prompt, question):
            ids = [*prompt.context_ids.tolist(), *question.ids.tolist()]
            oracle[tuple(ids)] = super().answer(prompt, question)
            return oracle[tuple(ids)]

    here = replace(scoring, out_dir=scoring.root / "here")
    score(here, Remembering(tokenizer))
    talk.answer = lambda path, body: oracle[tuple(body["prompt"])]
    score(scoring, backend_of(url, tokenizer, width=4))

    assert (scoring.out_dir / "samples.jsonl").read_bytes() == (here.out_dir / "samples.jsonl").read_bytes()
    path, body, key = talk.asked[0]
    assert path == "/v1/completions" and key is None
    assert {name: body[name] for name in ("model", "temperature", "max_tokens")} == {
        "model": "served",
        "temperature": 0.0,
        "max_tokens": 8,
    }


@pytest.mark.parametrize("endpoint", ["chat", "text"])
def test_words_are_sent_where_ids_are_not_taken(url, talk, scoring, tokenizer, endpoint, monkeypatch):
    monkeypatch.setenv("THE_KEY", "secret")
    score(scoring, backend_of(url, tokenizer, endpoint=endpoint, key_env="THE_KEY"))

    bodies = [body for _, body, _ in talk.asked]
    words = [body["messages"][0]["content"] if endpoint == "chat" else body["prompt"] for body in bodies]
    asked = "What is the number of 3?"
    asked += "\n\nBegin your answer with: It is" if endpoint == "chat" else " It is"
    assert any(text.endswith(asked) for text in words)
    assert {key for _, _, key in talk.asked} == {"Bearer secret"}


def test_passing_troubles_are_tried_again(url, talk):
    talk.troubles = [503, 429]
    paused = []

    found = request_json(f"{url}/completions", {}, parse=dict, retry=QUICK, sleep=paused.append)

    assert found["choices"][0]["text"] == "fine" and len(talk.asked) == 3
    assert 0 < paused[0] <= 0.001 and paused[1] <= 0.002


def test_errors_that_the_user_can_fix_are_reported_immediately(url, talk):
    talk.troubles = [404]

    with pytest.raises(ConfigError, match=r"refuses the request \(HTTP 404: no\[2J such thing\)") as error:
        request_json(f"{url}/completions", {}, parse=dict, retry=QUICK)
    assert len(talk.asked) == 1 and "\x1b" not in str(error.value)


@pytest.mark.parametrize(
    ("trouble", "message"),
    [([500] * 9, "HTTP 500"), ("no json", "the reply is not JSON"), ("[1]", "JSON but not an object")],
)
def test_a_server_that_never_answers_is_one_sentence(url, talk, trouble, message):
    if isinstance(trouble, list):
        talk.troubles = trouble
    else:
        talk.raw = trouble.encode()

    with pytest.raises(UnspoolError, match=rf"gave no usable answer in 3 attempts \(.*{message}"):
        request_json(f"{url}/x", {}, parse=dict, retry=QUICK, sleep=lambda seconds: None)
    assert len(talk.asked) == 3


def test_a_missing_server_and_an_invalid_address(url):
    with pytest.raises(UnspoolError, match="gave no usable answer in 1 attempt"):
        request_json("http://127.0.0.1:9/v1", {}, parse=dict, retry=replace(QUICK, attempts=1))
    with pytest.raises(ConfigError, match="is not a valid URL"):
        request_json("localhost", {}, parse=dict, retry=QUICK)


def test_a_server_of_another_kind_is_recognised(url, talk, tokenizer):
    talk.raw = b'{"result": 1}'

    with pytest.raises(UnspoolError, match="answered without `choices`"):
        Server(url=url, model="m", retry=QUICK).complete([1], 4)


def test_foreign_text_is_one_printable_line():
    assert printable_line("\n\x1b[31mred\x00\nnext") == "[31mred"


def test_a_server_cannot_compute_losses(url, scoring, tokenizer):
    config = PerplexityEval.model_validate({"suite": "perplexity", "length": 256, "samples": 1})

    with pytest.raises(ConfigError, match="suite perplexity needs token losses"):
        score(replace(scoring, evals=[config]), backend_of(url, tokenizer))


def test_a_run_resumes_after_the_server_was_down(url, talk, scoring, tokenizer):
    talk.answer = lambda path, body: talk.troubles.extend([500] * 3) or "late" if len(talk.asked) == 10 else "fine"
    with pytest.raises(UnspoolError):
        score(scoring, backend_of(url, tokenizer, width=1))
    before = len(talk.asked)
    talk.troubles.clear()
    talk.answer = lambda path, body: "fine"

    score(scoring, backend_of(url, tokenizer, width=1))

    assert len(talk.asked) - before < 16


def test_concurrent_requests_stay_within_the_limit(url, talk, scoring, tokenizer):
    now, most = [0], [0]
    lock, full = threading.Lock(), threading.Event()

    def slow(path, body):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
            if now[0] == 3:
                full.set()
        # The first ones wait for the third, however late it comes; a fourth would come while they sleep.
        full.wait(60)
        time.sleep(0.02)
        with lock:
            now[0] -= 1
        return "fine"

    talk.answer = slow
    score(scoring, backend_of(url, tokenizer, width=3))

    assert most[0] == 3
