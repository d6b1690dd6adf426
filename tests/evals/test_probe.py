"""The server is probed once: how it can be asked, its context, log-probabilities; what it cannot do is not tried."""

import json
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from unspool.cli.main import build_app
from unspool.core.errors import ConfigError, UnspoolError
from unspool.core.http_client import RetryPolicy
from unspool.evals.backends.openai import OpenAiBackend, Server, ServerAbilities
from unspool.evals.backends.probe import probe

from .toy import JsonAnswers

QUICK = RetryPolicy(seconds=60, attempts=6, pause=0.001)
# Which requests a server answers; what it says to others.
STYLES = {
    "vllm": ({"ids", "text", "chat", "logprobs"}, 400),
    "tgi": ({"text", "chat"}, 422),  # also llama-cpp-python
    "transformers serve": ({"chat"}, 404),
    "broken for ids": ({"text"}, 500),
    "ids as text": ({"ids as text", "text"}, 400),
}


class Styled(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, style: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.takes, self.refusal = STYLES[style]
        self.bodies: list[dict[str, Any]] = []
        self.key: str | None = None
        self.models = [{"id": "served", "max_model_len": 4096}]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    @property
    def questions(self) -> list[dict[str, Any]]:
        """Requests that are not of the probe."""
        return [body for body in self.bodies if body["max_tokens"] > 1 or len(body.get("prompt", "")) > 200]


class Handler(JsonAnswers, BaseHTTPRequestHandler):
    server: Styled

    def do_GET(self) -> None:
        self._send(200, {"data": self.server.models})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        self._send(*self._answer(body))

    def _answer(self, body: dict[str, Any]) -> tuple[int, Any]:
        if self.server.key and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            return 401, {"error": {"message": "wrong key"}}
        if body["model"] not in {entry["id"] for entry in self.server.models}:
            return 404, {"error": {"message": "no such model"}}
        takes, prompt = self.server.takes, body.get("prompt")
        kind = "chat" if "messages" in body else "ids" if isinstance(prompt, list) else "text"
        count = len(prompt) if kind == "ids" else 10
        if kind == "ids" and "ids as text" in takes:
            count *= 5
        elif kind not in takes or ("logprobs" in body and "logprobs" not in takes):
            return self.server.refusal, {"detail": f"no {kind}"}
        choice: dict[str, Any] = {"text": "right", "message": {"content": "right"}}
        if "logprobs" in body:
            numbers = [None, *(-float(at % 7) for at in range(1, len(prompt))), -1.0]
            tops = [None, *({"a": 0.0 if at % 7 else -0.0} for at in range(1, len(prompt))), {"a": -1.0}]
            choice["logprobs"] = {"token_logprobs": numbers, "top_logprobs": tops}
        return 200, {"choices": [choice], "usage": {"prompt_tokens": count}}


@pytest.fixture
def styled(request) -> Iterator[Styled]:
    server = Styled(request.param)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def served(styled: Styled, **more: Any) -> Server:
    return Server(url=styled.url, model="served", retry=QUICK, **more)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(build_app(), ["eval", "asset:tiny-base", "--backend", "openai", *arguments])


@pytest.mark.parametrize(
    ("styled", "endpoint", "logprobs", "requests"),
    [
        ("vllm", "completions", True, 3),
        ("tgi", "text", False, 3),
        ("transformers serve", "chat", False, 4),
        ("broken for ids", "text", False, 3),
        ("ids as text", "text", False, 3),
    ],
    indirect=["styled"],
)
def test_the_best_endpoint_of_the_server_is_chosen_and_printed(styled, endpoint, logprobs, requests, tokenizer, caplog):
    caplog.set_level(logging.INFO)
    found = probe(served(styled), tokenizer, None)

    assert (found.form.endpoint, found.logprobs, found.context) == (endpoint, logprobs, 4096)
    assert len(styled.bodies) == requests, "nothing is tried again that the server refuses"
    line = caplog.records[-1].getMessage()
    assert f"Using `endpoint={endpoint!r}`; pass `endpoint` (" in line and "context 4096 tokens" in line
    assert ("not token ids (" in line) == (endpoint != "completions")
    assert ("with prompt log-prob" in line) == logprobs


@pytest.mark.parametrize("styled", ["transformers serve"], indirect=True)
def test_a_chosen_endpoint_that_the_server_lacks_is_refused(styled, tokenizer):
    with pytest.raises(ConfigError, match=r"does not answer token ids .*HTTP 404: no ids.*Remove `endpoint`"):
        probe(served(styled), tokenizer, "completions")
    assert len(styled.bodies) == 1


@pytest.mark.parametrize("styled", ["vllm"], indirect=True)
def test_a_wrong_model_name_is_answered_with_the_names_that_there_are(styled, tokenizer):
    with pytest.raises(ConfigError, match=r"'servd': token ids: HTTP 404: no such model; .* `model_name`: served\."):
        probe(replace(served(styled), model="servd"), tokenizer, None)


@pytest.mark.parametrize("styled", ["vllm"], indirect=True)
def test_a_wrong_key_is_one_request(styled, tokenizer, monkeypatch):
    styled.key = "the right key"
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"HTTP 401: wrong key.*environment variable OPENAI_API_KEY, which is not"):
        probe(served(styled), tokenizer, None)
    assert len(styled.bodies) == 1


def test_a_dead_port_is_a_sentence(tokenizer):
    with pytest.raises(UnspoolError, match=r"gave no usable answer in 3 attempts .*refused"):
        probe(Server(url="http://127.0.0.1:9/v1", model="m", retry=QUICK), tokenizer, None)


@pytest.mark.parametrize("styled", ["vllm"], indirect=True)
def test_losses_are_those_of_the_server(styled, tokenizer):
    found = OpenAiBackend(served(styled), tokenizer, ServerAbilities(logprobs=True)).window_losses(np.arange(10))

    assert found.tolist() == [float(at % 7) for at in range(1, 10)]


@pytest.mark.parametrize(
    ("styled", "suites"),
    [("vllm", {"niah", "key_value", "perplexity"}), ("tgi", {"niah", "key_value"})],
    indirect=["styled"],
)
def test_the_default_suites_are_those_that_the_server_can_answer(styled, suites, tmp_path):
    out = tmp_path / "scores"
    options = ("--lengths", "256", "--samples", "1", "--out", str(out), "--json")
    done = run("--url", styled.url, "--model-name", "served", *options)

    assert done.exit_code == 0, done.output
    assert {cell["suite"] for cell in json.loads((out / "summary.json").read_text())["cells"]} == suites


@pytest.mark.parametrize("styled", ["tgi"], indirect=True)
def test_a_suite_that_the_server_cannot_answer_is_refused_before_the_first_question(styled):
    done = run("--url", styled.url, "--model-name", "served", "--suite", "niah,perplexity", "--lengths", "256")

    assert done.exit_code == 2 and "suite perplexity needs token losses" in " ".join(done.output.split())
    assert styled.bodies and not styled.questions
