"""Hostile servers: evaluation, judge and generator end in one sentence or a right answer, and no key gets out."""

import base64
import gzip
import json
import logging
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from typer.testing import CliRunner

from synthesis.toy import write_documents, write_recipe
from unspool.cli.main import build_app
from unspool.core.errors import ConfigError, UnspoolError
from unspool.core.http_client import RetryPolicy, hide_key
from unspool.evals.backends.openai import OpenAiBackend, Server
from unspool.evals.config import eval_adapter
from unspool.evals.judge.protocols import Call
from unspool.evals.judge.run import Judge, JudgeReplies, ask_all
from unspool.evals.run import Scoring, score
from unspool.models.location import resolve_path
from unspool.models.tokenizer import load_tokenizer
from unspool.synthesis.config import ServerGenerator
from unspool.synthesis.generators import ServerBackend
from unspool.synthesis.requests import GeneratorClient, GeneratorReplies, Request, RequestFailedError

KEY = "sk-very/secret+0123456789"
SECRETS = (KEY, quote(KEY, safe=""), quote(KEY), base64.b64encode(KEY.encode()).decode()[:-4])
PATIENT = RetryPolicy(seconds=30, transfer=30, attempts=3, pause=0.001, reply_bytes=1 << 17)
HASTY = replace(PATIENT, seconds=0.1, transfer=0.1, attempts=1)
Behavior = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    server: "Hostile"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked += 1
        with suppress(OSError):
            self.server.behave(self)

    def log_message(self, *args: object) -> None:
        pass

    def send(self, content: bytes, status: int = 200, reason: str | None = None, **headers: str) -> None:
        self.send_response(status, reason)
        for name, value in {"Content_Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)

    def raw(self, content: bytes) -> None:
        self.wfile.write(content)
        self.close_connection = True

    def drip(self, content: bytes) -> None:
        """One byte after the other, as long as anybody listens and the test runs."""
        while not self.server.over.wait(0.01):
            self.wfile.write(content[:1])
            content = content[1:] or content


class Hostile(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, behave: Behavior) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behave, self.asked, self.over = behave, 0, threading.Event()

    def handle_error(self, *args: object) -> None:
        pass


def reply(text: Any, **more: Any) -> bytes:
    """A reply that is right at both endpoints."""
    return json.dumps({"choices": [{"text": text, "message": {"content": text}, "index": 0}], **more}).encode()


def later(*first: Behavior) -> Behavior:
    """Behave badly at first, then give the right answer."""
    return lambda handler: (first[handler.server.asked - 1] if handler.server.asked <= len(first) else right)(handler)


def right(handler: Handler) -> None:
    handler.send(reply("right"))


def says(content: bytes, status: int = 200, reason: str | None = None, **headers: str) -> Behavior:
    return lambda handler: handler.send(content, status, reason, **headers)


def raw(content: bytes) -> Behavior:
    return lambda handler: handler.raw(content)


def endless(start: bytes, block: bytes) -> Behavior:
    def behave(handler: Handler) -> None:
        handler.wfile.write(start)
        while not handler.server.over.is_set():
            handler.wfile.write(block)

    return behave


def drip(start: bytes, content: bytes) -> Behavior:
    def behave(handler: Handler) -> None:
        handler.wfile.write(start)
        handler.drip(content)

    return behave


def reset(handler: Handler) -> None:
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()


def date(seconds: float) -> str:
    return format_datetime(datetime.now(UTC) + timedelta(seconds=seconds))


OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
HTML = "<!DOCTYPE html>\n<html><head><title>{}</title></head><body><h1>nginx</h1></body></html>"
ESCAPED = "".join(f"\\u{ord(char):04x}" for char in KEY)
BASIC = base64.b64encode(f"me:{KEY}".encode()).decode()
ELSEWHERE = "http://127.0.0.2:1/v1/completions"

# Servers that take their time; the whole test must not.
SLOW: dict[str, tuple[Behavior, str]] = {
    "silent": (lambda handler: handler.server.over.wait(60) and None, r"no reply within 0\.1 s"),
    "drips its body": (drip(OK + b"Content-Length: 9000\r\n\r\n", reply("x" * 8000)), r"not complete 0\.1 s after"),
    "drips its body without a length": (drip(OK + b"\r\n", reply("x" * 8000)), r"not complete"),
    "drips its headers": (drip(OK, b"X-A: b\r\n" * 1000), r"not complete"),
    "drips its status": (drip(b"", b"HTTP/1.1 200 " + b"O" * 8000), r"not complete"),
    "drips chunks": (drip(CHUNKED, b"1\r\n \r\n" * 1000), r"not complete"),
    "drips an error page": (drip(b"HTTP/1.1 500 Broken\r\n\r\n", b"sorry " * 1000), r"HTTP 500: Broken"),
    "asks to continue forever": (drip(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000), r"not complete"),
    "sends blanks to keep the line open": (drip(OK + b"\r\n", b" " * 8000), r"not complete"),
}

# Servers that answer at once; None: the answer is right.
QUICK: dict[str, tuple[Behavior, str | None]] = {
    "promises ten gigabytes": (says(b"{", Content_Length="10000000000"), r"larger than"),
    "promises more digits than a number": (says(b"{", Content_Length="9" * 300), r"larger than|truncated|not JSON"),
    "sends without end": (endless(OK + b"\r\n", b"x" * 9999), r"larger than"),
    "sends chunks without end": (endless(CHUNKED, b"4\r\n    \r\n" * 999), r"larger than"),
    "sends one chunk of a terabyte": (endless(CHUNKED + b"ffffffffff\r\n", b"x" * 9999), r"larger than"),
    "sends headers without end": (endless(OK, b"X-A: b\r\n" * 999), r"truncated \(HTTPException\)"),
    "sends a header line without end": (endless(OK + b"X-A: ", b"b" * 9999), r"truncated \(LineTooLong\)"),
    "continues without end": (endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 99), r"larger than"),
    "sends trailers without end": (endless(CHUNKED + b"0\r\n", b"X-A: b\r\n" * 999), r"larger than"),
    "sends a large answer": (says(reply("x" * 200_000)), r"larger than"),
    "compresses unasked": (says(gzip.compress(reply("right")), Content_Encoding="gzip"), r"not JSON"),
    "nests lists deeply": (says(b"[" * 50_000 + b"]" * 50_000), r"nested deeper than 64 levels"),
    "nests objects deeply": (says(b'{"a":' * 10_000 + b"1" + b"}" * 10_000), r"nested deeper than 64 levels"),
    "nests a little deeply": (says(reply("right", usage=json.loads("[" * 99 + "]" * 99))), r"nested deeper than 64"),
    "nests its error deeply": (says(b"[" * 50_000, 500), r"HTTP 500: \[\["),
    "sends a number of 5,000 digits": (says(b'{"choices": ' + b"9" * 5000 + b"}"), r"not JSON"),
    "sends a count of 4,000 digits": (says(reply("right", usage={"completion_tokens": 10**3999})), None),
    "sends NaN": (says(b'{"choices": NaN}'), r"answered without `choices`"),
    "sends no JSON": (says(b"fine"), r"not JSON"),
    "sends a list": (says(b"[1]"), r"JSON but not an object"),
    "sends a text": (says(b'"right"'), r"JSON but not an object"),
    "sends nothing": (says(b""), r"not JSON"),
    "sends no content": (says(b"", 204), r"not JSON"),
    "sends broken UTF-8": (says(reply("right").replace(b"right", b"\xff\xfe\x80")), r"not JSON"),
    "streams unasked": (says(b"data: " + reply("right") + b"\n\ndata: [DONE]\n\n"), r"not JSON"),
    "gives choices as an object": (says(b'{"choices": {"0": {"text": "right"}}}'), r"answered without `choices`"),
    "gives no choices": (says(b'{"choices": []}'), r"answered without `choices`"),
    "gives a choice that is text": (says(b'{"choices": ["right"]}'), r"answered without `choices`"),
    "gives null": (says(b"null"), r"JSON but not an object"),
    "gives two choices": (says(b'{"choices": [{"text": "right"}, {"text": "wrong"}]}'), r"returned 2 answers"),
    "gives a number for a text": (says(reply(5)), r"no text in `(text|content)`"),
    "gives a list for a text": (says(reply(["right"])), r"no text in"),
    "gives a choice without text": (says(b'{"choices": [{"index": 0}]}'), r"no text in|no `message`"),
    "gives an error with status 200": (says(b'{"error": {"message": "no memory"}}'), r"no memory"),
    "gives text that no file can hold": (says(b'{"choices": [{"text": "right\\ud800", '
                                              b'"message": {"content": "right\\ud800"}}]}'), None),
    "redirects to another host (302)": (says(b"", 302, Location=ELSEWHERE), rf"redirects to {ELSEWHERE} \(HTTP 302\)"),
    "redirects to another host (307)": (says(b"", 307, Location=ELSEWHERE), r"are not followed"),
    "redirects to another host (308)": (says(b"", 308, Location=ELSEWHERE), r"are not followed"),
    "redirects to itself": (says(b"", 301, Location="/v1/completions"), r"are not followed"),
    "redirects to a file": (says(b"", 302, Location="file:///etc/passwd"), r"are not followed"),
    "redirects nowhere": (says(b"", 302), r"redirects to nowhere"),
    "redirects with the key": (says(b"", 302, Location=f"http://other/?key={KEY}"), r"redirects to http://other/\?…"),
    "echoes the key in its answer": (says(reply(f"right, {KEY}")), None),
    "echoes the key in escapes": (says(reply("right, ?").replace(b"?", ESCAPED.encode())), None),
    "echoes the key in Base64": (says(reply(f"right, Basic {BASIC}")), None),
    "echoes the key for an address": (says(reply(f"right, ?key={quote(KEY, safe='')}")), None),
    "echoes the key in capitals": (says(reply(f"right, {KEY.upper()}")), None),
    "echoes the key in an error": (says(f'{{"error": {{"message": "bad key {KEY}"}}}}'.encode(), 401), r"bad key …"),
    "echoes the key in a passing error": (says(f"broken: Bearer {KEY}".encode(), 500), r"broken: Bearer …"),
    "echoes the key in pieces": (says("\u200b".join(f"no {KEY}").encode(), 400), r"no …"),
    "echoes the key with control characters": (says("\x00".join(KEY).encode(), 403), r"HTTP 403: …"),
    "echoes the key as its reason": (says(b"", 400, KEY), r"HTTP 400: …"),
    "echoes the key in a page": (says(HTML.format(f"Bad {KEY}").encode(), 502), r"an HTML page, 'Bad …'"),
    "echoes the key at the end of a long line": (says(b"y" * 190 + KEY.encode(), 404), r"HTTP 404: y+…"),
    "echoes the key with status 200": (says(f'{{"error": "no {KEY}"}}'.encode()), r"without `choices` \(no …\)"),
    "closes at once": (lambda handler: handler.connection.shutdown(socket.SHUT_RDWR), r"RemoteDisconnected"),
    "closes in the middle": (raw(OK + b"Content-Length: 900\r\n\r\n" + reply("right")), r"truncated \(Incomp"),
    "closes after its headers": (raw(OK + b"Content-Length: 900\r\n\r\n"), r"truncated \(IncompleteRead\)"),
    "closes in a chunk": (raw(CHUNKED + b"ff\r\n{"), r"truncated \(IncompleteRead\)"),
    "resets the connection": (reset, r"reset|RemoteDisconnected"),
    "closes once": (later(lambda handler: handler.connection.shutdown(socket.SHUT_RDWR)), None),
    "speaks another protocol": (raw(b"SSH-2.0-OpenSSH_9.6\r\n"), r"truncated \(BadStatusLine\)"),
    "is busy for a moment": (later(says(b"", 429), says(b"", 503)), None),
    "is busy for a named time": (later(says(b"", 429, Retry_After="0.05")), None),
    "is busy until a date": (later(says(b"", 429, Retry_After=date(-9))), None),
    "is busy until no date": (later(says(b"", 429, Retry_After="soon"), says(b"", 429, Retry_After="nan")), None),
    "is busy for a year": (says(b"", 429, Retry_After="31536000"), r"demands a pause of 31536000 s"),
    "is busy forever": (says(b"", 503, Retry_After="inf"), r"demands a pause of inf s"),
    "is busy until next year": (says(b"", 429, Retry_After=date(3e7)), r"demands a pause of \d+ s"),
    "is always busy": (says(b'{"error": {"message": "slow down"}}', 429), r"HTTP 429: slow down"),
    "shows a page instead of an answer": (says(HTML.format("Welcome").encode()), r"not JSON"),
    "shows a page for a bad gateway": (says(HTML.format("502 Bad Gateway").encode(), 502), r"page, '502 Bad Gateway'"),
    "shows a page for a wrong path": (says(HTML.format("404").encode(), 404), r"refuses .* page, '404'\)\. Check the "),
    "clears the terminal": (says(b'{"error": {"message": "\\u001b[2J\\u202egone"}}', 404), r"404: \[2Jgone"),
}  # fmt: skip
ALL = {name: (behave, told, HASTY) for name, (behave, told) in SLOW.items()}
ALL |= {name: (behave, told, PATIENT) for name, (behave, told) in QUICK.items()}


@contextmanager
def running(server: Hostile) -> Iterator[str]:
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.over.set()
        server.shutdown()
        server.server_close()


@pytest.fixture(params=ALL)
def case(request, monkeypatch) -> Iterator[tuple[Hostile, str, str | None, RetryPolicy]]:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    behave, told, retry = ALL[request.param]
    server = Hostile(behave)
    with running(server) as url:
        yield server, url, told, retry


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(resolve_path("asset:tiny-base", Path()))


def check_secrets(folder: Path, *texts: str) -> None:
    files = {str(path): path.read_bytes().decode() for path in folder.rglob("*") if path.is_file()}
    for name, text in {**files, **dict(enumerate(texts))}.items():
        assert not [secret for secret in SECRETS if secret.lower() in text.lower()], name


def test_there_are_many_of_them():
    assert len(ALL) >= 30


def test_an_evaluation_ends_in_a_sentence_or_a_right_answer(case, tmp_path, tokenizer, caplog, capfd):
    server, url, told, retry = case
    caplog.set_level(logging.DEBUG)
    config = eval_adapter().validate_python({"suite": "niah", "lengths": [256], "samples": 1})
    scoring = Scoring(model="m", model_hash="m", evals=[config], seed=0, out_dir=tmp_path / "scores", root=tmp_path)
    began = time.monotonic()
    message = ""
    try:
        score(scoring, OpenAiBackend(Server(url=url, model="m", retry=retry, width=2), tokenizer))
    except UnspoolError as error:
        message = str(error)
    assert time.monotonic() - began < 10
    if told is None:
        assert not message
        sample = json.loads((scoring.out_dir / "samples.jsonl").read_text().splitlines()[0])
        assert sample["output"].startswith("right")
        sample["output"].encode()
    else:
        assert re.search(told, message), message
        assert "\n" not in message and message.isprintable()
        assert not (scoring.out_dir / "summary.json").exists()
    assert server.asked <= retry.attempts
    check_secrets(tmp_path, message, caplog.text, *capfd.readouterr())


@pytest.mark.parametrize(
    "case", [name for name in QUICK if re.match("echoes|gives|redirects|is busy", name)], indirect=True
)
def test_a_judge_and_a_generator_keep_the_key_too(case, tmp_path, caplog, capfd):
    server, url, told, retry = case
    caplog.set_level(logging.DEBUG)
    messages = []
    judge = Judge(name="j", ask=lambda prompt: Server(url=url, model="m", retry=retry).chat(prompt, 5))
    with JudgeReplies(tmp_path / "judgements.jsonl", "j") as replies:
        try:
            ask_all([Call(name="a", prompt="p", ranges={})], judge, replies, label="judge")
            assert told is None
            assert replies.get("p").startswith("right")
        except UnspoolError as error:
            messages.append(str(error))
    server.asked = 0
    generator = ServerGenerator.model_validate({"kind": "openai", "url": url, "model": "m"})
    with GeneratorReplies(tmp_path / "replies.jsonl") as cached, pytest.MonkeyPatch.context() as patch:
        patch.setattr("unspool.synthesis.generators.server_retry", lambda config: retry)
        client = GeneratorClient(ServerBackend(generator), cached, width=1, retry=retry)
        try:
            assert client.send(Request(prompt="p", max_tokens=5))[0].text.startswith("right")
            assert told is None
        except (UnspoolError, RequestFailedError) as error:
            assert told is not None
            messages.append(str(error))
        finally:
            client.close()
    check_secrets(tmp_path, *messages, caplog.text, *capfd.readouterr())


@pytest.mark.parametrize("url", ["https://me:pa55/word@host/v1", "http://host/v1?key=pa55word", "http://host/#pa55"])
def test_no_part_of_an_address_can_hold_a_password(url):
    with pytest.raises(ConfigError, match="environment variable OPENAI_API_KEY") as told:
        Server(url=url, model="m")
    assert "pa55" not in str(told.value)


@pytest.mark.parametrize("url", ["https://me:pa55word@host/v1", "me:pa55word@host"])
def test_an_address_with_a_password_is_refused_without_printing_it(url, tmp_path):
    (tmp_path / "graded.jsonl").write_text("{}\n")
    recipe = write_recipe(tmp_path, {"generator": {"kind": "openai", "url": url, "model": "m"}})
    write_documents(tmp_path / "docs.jsonl", 1)
    for command in (
        ["eval", "asset:tiny-base", "--backend", "openai", "--url", url, "--out", str(tmp_path / "out")],
        ["eval", "asset:tiny-base", "--backend", "openai", "--url", url, "--suite", "short"],
        ["judge", "--check", str(tmp_path / "graded.jsonl"), "--url", url, "--model-name", "m"],
        ["synth", str(recipe)],
    ):
        done = CliRunner().invoke(build_app(), command)
        assert done.exit_code == 2, done.output
        assert "environment variable OPENAI_API_KEY" in " ".join(done.output.split())
        assert "pa55" not in done.output and "pa55" not in repr(done.exception)
    assert not (tmp_path / "out").exists()


def test_a_key_that_no_header_can_hold_is_refused_without_printing_it(monkeypatch):
    for key in ("sk-pa55\nword", "sk-pa55wörd"):
        monkeypatch.setenv("OPENAI_API_KEY", key)
        with pytest.raises(ConfigError, match="environment variable OPENAI_API_KEY contains control") as told:
            Server(url="http://127.0.0.1:9/v1", model="m").chat("p", 5)
        assert "pa55" not in str(told.value)


def test_a_short_placeholder_is_not_a_secret():
    assert hide_key("the bucket is EMPTY", "EMPTY") == "the bucket is EMPTY"


@pytest.mark.parametrize(
    ("header", "low", "high"), [("7", 7, 7), ("date", 200, 300), (None, 0, 0.01)], ids=["seconds", "date", "none"]
)
def test_the_pause_is_the_one_that_the_server_demands(header, low, high, monkeypatch):
    header = date(300) if header == "date" else header  # now, because collection may be minutes ago
    busy = later(says(b"", 429, **({} if header is None else {"Retry_After": header})))
    paused: list[float] = []
    with running(Hostile(busy)) as url:
        assert Server(url=url, model="m", retry=PATIENT).complete("p", 5, sleep=paused.append) == "right"
    assert len(paused) == 1 and low <= paused[0] <= high
