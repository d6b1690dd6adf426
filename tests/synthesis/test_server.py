"""Against real servers on this machine that misbehave: everything is tried again, counted, and no key gets out."""

import json
import socket
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from unspool.cli.main import build_app
from unspool.core.errors import ConfigError, UnspoolError
from unspool.core.http_client import RetryPolicy, request_once
from unspool.synthesis import generators
from unspool.synthesis.config import ServerGenerator
from unspool.synthesis.generators import MockBackend, ServerBackend, build_client
from unspool.synthesis.requests import (
    GeneratorClient,
    GeneratorReplies,
    RateLimiter,
    Reply,
    Request,
    RequestFailedError,
)

from .toy import read_conversations, send, send_text, server, wait_for, write_documents, write_recipe

KEY = "sk-very-secret-0123456789"


def generator(url: str, **more: Any) -> ServerGenerator:
    settings = {"kind": "openai", "url": url, "model": "m", "timeout": 120, "attempts": 7, "pause": 0.001, **more}
    return ServerGenerator.model_validate(settings)


def half_closed(handler: BaseHTTPRequestHandler) -> None:
    """Promise more than is sent, and hang up."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [{"mess')
    handler.wfile.flush()
    handler.connection.shutdown(socket.SHUT_RDWR)


class Trouble:
    """Every request meets every trouble once, then gets its answer."""

    silent = 3  # the attempt that is never answered

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}
        self.keys: set[str | None] = set()
        self.over = threading.Event()
        self._lock = threading.Lock()

    def __call__(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        prompt = body["messages"][0]["content"]
        with self._lock:
            number = self.seen[prompt] = self.seen.get(prompt, 0) + 1
            self.keys.add(handler.headers.get("Authorization"))
        match number:
            case 1:
                send(handler, 429, b'{"error": {"message": "slow down"}}', {"Retry-After": "0.05"})
            case 2:
                send(handler, 500, f"broken, your header was Bearer {KEY}".encode())
            case self.silent:
                self.over.wait()
            case 4:
                send(handler, 200, b"<html>not json</html>")
            case 5:
                send(handler, 200, b'{"error": "no choices here"}')
            case 6:
                half_closed(handler)
            case _:
                send_text(handler, f"Answer to {len(prompt)}, {KEY}")

    def request_once(self, url: str, body: dict[str, Any], *, key_env: str, retry: RetryPolicy) -> dict[str, Any]:
        """Loses patience soon where the server is silent, and nowhere else, however slow the machine is."""
        prompt = body["messages"][0]["content"]
        number = self.seen.get(prompt, 0) + 1
        try:
            hasty = replace(retry, seconds=0.2) if number == self.silent else retry
            return request_once(url, body, key_env=key_env, retry=hasty)
        finally:
            wait_for(lambda: self.seen.get(prompt, 0) == number)


def test_every_trouble_is_tried_again_and_counted(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    trouble = Trouble()
    monkeypatch.setattr(generators, "request_once", trouble.request_once)
    with server(trouble) as url, GeneratorReplies(tmp_path / "replies.jsonl") as replies:
        client = build_client(generator(url), replies, open_backend=lambda ref: pytest.fail("no model is needed"))
        requests = [Request(prompt="x" * count, max_tokens=5) for count in (1, 2, 3)]
        found = client.send(*requests)
        assert [reply.text for reply in found] == [f"Answer to {count}, …" for count in (1, 2, 3)]
        expected = {"http_429": 3, "http_500": 3, "timeout": 3, "garbage": 6, "closed": 3}
        assert dict(client.stats.errors) == expected
        assert (client.stats.sent, client.stats.failed, client.stats.cached) == (3, 0, 0)
        # A reply is there a moment before its request is no longer under way.
        wait_for(lambda: not client._in_flight)
        assert client.send(*requests) == found
        assert client.stats.cached == 3
        client.close()
        trouble.over.set()
    assert trouble.keys == {f"Bearer {KEY}"}
    with GeneratorReplies(tmp_path / "replies.jsonl") as again:
        assert dict(again.errors) == expected, "errors are counted over all runs"
        assert len(again) == 3
    assert KEY not in (tmp_path / "replies.jsonl").read_text()


def test_the_command_with_a_bad_server_keeps_the_key_to_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("SYNTH_KEY", KEY)
    mock = MockBackend({}, 0.0)
    seen: dict[str, int] = {}

    def answer(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        prompt = body["messages"][0]["content"]
        seen[prompt] = seen.get(prompt, 0) + 1
        if len(prompt) % 11 == 0:
            send(handler, 503, b"never")
        elif seen[prompt] == 1 and len(prompt) % 3 == 0:
            send(handler, 500, f"echo {handler.headers['Authorization']}".encode())
        else:
            text = mock.reply(Request(prompt=prompt, max_tokens=9)).text
            send_text(handler, f"{text} (for {handler.headers['Authorization']})")

    write_documents(tmp_path / "docs.jsonl", 30)
    with server(answer) as url:
        source = {"kind": "openai", "url": url, "model": "m", "key_env": "SYNTH_KEY", "reply_tokens": 128}
        recipe = write_recipe(tmp_path, {"generator": {**source, "attempts": 3, "pause": 0.001}})
        done = CliRunner().invoke(build_app(), ["synth", str(recipe), "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)["long"]
    assert result["asked"] == result["kept"] + result["rejected"] + result["failed"]
    assert result["failed"] > 0
    assert result["requests"]["errors"]["http_500"] > 0
    assert result["requests"]["errors"]["http_503"] == 3 * result["requests"]["failed"]
    assert read_conversations(tmp_path / "run/synth/long")
    assert KEY not in done.output
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        assert KEY.encode() not in path.read_bytes(), path


@pytest.mark.parametrize("status", [401, 404, 302])
def test_errors_that_only_the_user_can_fix_are_reported_immediately(status, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    asked = []

    def answer(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        asked.append(handler.path)
        send(handler, status, f"bad key {KEY}".encode(), {"Location": "http://127.0.0.1:1/elsewhere"})

    with server(answer) as url, GeneratorReplies(tmp_path / "replies.jsonl") as replies:
        client = build_client(generator(url), replies, open_backend=lambda ref: pytest.fail("no model is needed"))
        with pytest.raises(ConfigError, match=str(status)) as told:
            client.send(Request(prompt="x", max_tokens=5))
        client.close()
    assert asked == ["/v1/chat/completions"], "neither tried again nor sent elsewhere"
    assert KEY not in str(told.value)


def test_a_server_that_is_down_ends_the_run_and_keeps_its_replies(tmp_path):
    down = generator("http://127.0.0.1:9/v1", attempts=2)
    with GeneratorReplies(tmp_path / "replies.jsonl") as replies:
        client = GeneratorClient(ServerBackend(down), replies, width=1, retry=RetryPolicy(attempts=2, pause=0.0001))
        failures = 0
        with pytest.raises(UnspoolError, match="20 requests in a row") as told:
            for number in range(30):
                try:
                    client.send(Request(prompt=str(number), max_tokens=1))
                except RequestFailedError:
                    failures += 1
        client.close()
    assert failures == 19
    assert not isinstance(told.value, ConfigError)
    assert replies.errors["connection"] == 40


class Slow:
    """Lets the first wait until there are `width` of them, however late; one more would come while they sleep."""

    identity = "slow"

    def __init__(self, width: int) -> None:
        self.at_once = self.most = self.calls = 0
        self._width, self._full, self._lock = width, threading.Event(), threading.Lock()

    def reply(self, request: Request) -> Reply:
        with self._lock:
            self.calls += 1
            self.at_once += 1
            self.most = max(self.most, self.at_once)
            if self.at_once == self._width:
                self._full.set()
        self._full.wait(60)
        time.sleep(0.02)
        with self._lock:
            self.at_once -= 1
        return Reply(text=request.prompt, prompt_tokens=1, reply_tokens=1, seconds=0.02)


def test_concurrent_requests_reach_the_limit_and_none_is_sent_twice(tmp_path):
    slow = Slow(width=3)
    with GeneratorReplies(tmp_path / "replies.jsonl") as replies:
        client = GeneratorClient(slow, replies, width=3)
        requests = [Request(prompt=str(number % 10), max_tokens=1) for number in range(40)]
        found = client.send(*requests)
        client.close()
    assert [reply.text for reply in found] == [request.prompt for request in requests]
    assert (slow.most, slow.calls) == (3, 10)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(("requests", "tokens", "expected"), [(60, None, 60), (None, 6000, 60), (60, 3000, 120)])
def test_requests_and_tokens_per_minute_stay_within_limits(requests, tokens, expected):
    clock = Clock()
    limiter = RateLimiter(
        requests_per_minute=requests, tokens_per_minute=tokens, clock=lambda: clock.now, sleep=clock.sleep
    )
    begun = []
    for _ in range(61):
        limiter.wait(100)
        begun.append(clock.now)
    assert begun[-1] - begun[0] == pytest.approx(expected, abs=4)
    allowed = min(requests or 1e9, (tokens or 1e9) / 100)
    for start in begun:
        assert sum(start <= at < start + 60 for at in begun) <= allowed * 1.05 + 1


def test_a_server_that_asks_for_a_pause_gets_it_from_all():
    clock = Clock()
    limiter = RateLimiter(clock=lambda: clock.now, sleep=clock.sleep)
    limiter.pause(30)
    limiter.wait(1)
    assert clock.now == 1030


def test_a_line_cut_by_a_kill_is_skipped_and_later_lines_are_complete(tmp_path):
    path = tmp_path / "replies.jsonl"
    reply = Reply(text="päivää\n\x85", prompt_tokens=1, reply_tokens=2, seconds=0.1)
    with GeneratorReplies(path) as replies:
        replies.add("a", reply)
        replies.add("b", reply)
    path.write_bytes(path.read_bytes()[:-20])
    with GeneratorReplies(path) as replies:
        assert ("a" in replies, "b" in replies) == (True, False)
        replies.add("b", reply)
        assert replies.get("b") == reply
    with GeneratorReplies(path) as replies:
        assert (len(replies), replies.get("a"), replies.get("b")) == (2, reply, reply)


def test_two_runs_do_not_write_to_one_file(tmp_path):
    path: Path = tmp_path / "replies.jsonl"
    with GeneratorReplies(path), pytest.raises(ConfigError, match="in use by another"):
        GeneratorReplies(path)
