"""What a server is sent on each endpoint is what is hashed, shown and counted; nothing is asked for twice."""

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from unspool.cli.main import build_app
from unspool.evals import suites

from .toy import TOY, JsonAnswers, lines

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '#' + message['role'] + '\\n' + message['content'] + '<end>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '#assistant\\n' }}{% endif %}"
)
NEEDLE = re.compile(r"The special magic (number|word) for (\S+) is (\w+)\.")


class Faithful(ThreadingHTTPServer):
    """Tokenizes as vLLM does: BOS before every text, the model's own template for messages."""

    daemon_threads = True

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.tokenizer = tokenizer
        self.takes = {"text", "chat"}
        self.context = 4096
        self.is_strict = False  # whether it refuses fields that it does not know
        self.continues = False  # whether it continues a last message of the assistant
        self.answer: Callable[[dict[str, Any]], str] = lambda body: "fine"
        self.bodies: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        self.dead = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    @property
    def questions(self) -> list[dict[str, Any]]:
        """Requests that are not of the probe."""
        return [body for body in self.bodies if body["max_tokens"] > 1]

    def read(self, body: dict[str, Any]) -> list[int]:
        if isinstance(body.get("prompt"), list):
            return body["prompt"]
        if "prompt" in body:
            return self.tokenizer(body["prompt"])["input_ids"]
        messages = body["messages"]
        begun = messages[-1]["content"] if self.continues and messages[-1]["role"] == "assistant" else ""
        messages = messages[:-1] if begun else messages
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) + begun
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


class Handler(JsonAnswers, BaseHTTPRequestHandler):
    server: Faithful

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "served", "max_model_len": self.server.context}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kind = "chat" if "messages" in body else "ids" if isinstance(body["prompt"], list) else "text"
        if self.server.is_strict and "repeat_penalty" in body:
            self._send(422, {"detail": "unexpected repeat_penalty"})
            return
        if kind not in self.server.takes or (kind == "chat" and "continue_final_message" in body):
            self._send(400, {"error": f"no {kind}"})
            return
        with self.server.lock:  # tokenizers must not be used by several threads
            self.server.bodies.append(body)
            count = len(self.server.read(body))
        text = self.server.answer(body) if body["max_tokens"] > 1 else "fine"
        if self.server.dead.is_set():
            self.close_connection = True
            return
        choice = {"message": {"content": text}} if kind == "chat" else {"text": text}
        self._send(200, {"choices": [choice], "usage": {"prompt_tokens": count}})


def text_of(body: dict[str, Any]) -> str:
    return body["messages"][0]["content"] if "messages" in body else body["prompt"]


@pytest.fixture(scope="module")
def model(tmp_path_factory, tokenizer) -> Path:
    """A tokenizer that begins every text with BOS, with a chat template that has a BOS too."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": len(tokenizer)}))
    return folder


@pytest.fixture
def server(model) -> Iterator[Faithful]:
    from transformers import AutoTokenizer

    made = Faithful(AutoTokenizer.from_pretrained(model))
    threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture(autouse=True)
def toy(monkeypatch) -> None:
    monkeypatch.setitem(suites.SUITES, "ruler", TOY)
    monkeypatch.setattr("unspool.core.http_client.MAX_PAUSE", 0.001)


def run(model: Path, *arguments: str) -> Any:
    return CliRunner().invoke(build_app(), ["eval", str(model), *arguments])


def ask(model: Path, server: Faithful, out: Path, *arguments: str) -> list[dict[str, Any]]:
    where = ("--backend", "openai", "--url", server.url, "--model-name", "served", "--lengths", "256")
    done = run(model, *where, "--samples", "4", "--out", str(out), *arguments)
    assert done.exit_code == 0, done.output
    return lines(out / "samples.jsonl")


ALL = ("--suite", "niah,key_value,ruler", "--value", "words", "--tasks", "lone,shared")


def sha256(payload: Any) -> str:
    return hashlib.sha256(json.dumps(payload).encode()).hexdigest()


def test_text_is_the_text_of_the_prompt_that_a_local_model_reads(model, server, tmp_path):
    here = run(model, "--backend", "oracle", "--lengths", "256", "--samples", "4", "--out", str(tmp_path / "h"), *ALL)
    assert here.exit_code == 0, here.output
    hashes = [sample["hash"] for sample in lines(tmp_path / "h/samples.jsonl")]
    samples = ask(model, server, tmp_path / "s", "--endpoint", "text", *ALL)

    read = [
        hashlib.sha256(b"".join(one.to_bytes(4, "little") for one in server.read(body))) for body in server.questions
    ]
    assert Counter(found.hexdigest() for found in read) == Counter(hashes), "with the template, and with one BOS"
    sent = {sha256(body["prompt"]): body["prompt"] for body in server.questions}
    for sample in samples:
        shown = sample["prompt"]
        assert sent[sample["hash"]].startswith(shown["start"]) and sent[sample["hash"]].endswith(shown["end"])
    assert not set(sent) & set(hashes), "text is not ids, even if it means the same"


def test_chat_asks_for_the_prefix_that_it_cannot_prefill_and_leaves_room_for_a_sentence(model, server, tmp_path):
    def sentence(body: dict[str, Any]) -> str:
        text = text_of(body)
        key = re.search(r"What is the special magic \w+ for (\S+)\?", text)[1]
        assert text.endswith(f"\n\nBegin your answer with: The special magic word for {key} is")
        value = next(found[3] for found in NEEDLE.finditer(text) if found[2] == key)
        return f"Well:\nThe special magic word for {key} is {value}, as the text says."

    server.answer = sentence
    samples = ask(model, server, tmp_path, "--endpoint", "chat", "--suite", "niah", "--value", "words")

    assert [sample["score"] for sample in samples] == [1.0] * 4
    assert all(body["max_tokens"] >= 32 for body in server.questions)
    assert {sample["hash"] for sample in samples} == {sha256(body["messages"]) for body in server.questions}


def test_chat_asks_for_a_value_of_an_object_in_words(model, server, tmp_path):
    def look_up(body: dict[str, Any]) -> str:
        text = text_of(body)
        key = re.search(r'for the key "([^"]+)"\?', text)[1]
        assert text.endswith(f'Begin your answer with: "{key}": "')
        return f'"{key}": "{json.loads(text.splitlines()[0])[key]}"'

    server.answer = look_up
    samples = ask(model, server, tmp_path, "--endpoint", "chat", "--suite", "key_value", "--value", "words")
    assert [sample["score"] for sample in samples] == [1.0] * 4


def test_a_server_that_continues_a_message_gets_the_prefix_as_one(model, server, tmp_path):
    server.continues = True
    server.answer = lambda body: " nothing"
    samples = ask(model, server, tmp_path, "--endpoint", "chat", "--suite", "niah")

    for body in server.questions:
        user, begun = body["messages"]
        assert user["content"].endswith("?") and begun["role"] == "assistant"
        assert re.fullmatch(r" The special magic number for \S+ is", begun["content"])
    # Requests arrive in any order.
    begun_by_hash = {sha256(body["messages"]): body["messages"][1]["content"] for body in server.questions}
    assert {sample["hash"]: sample["prompt"]["assistant"] for sample in samples} == begun_by_hash


@pytest.mark.parametrize("continues", [False, True])
def test_the_tokens_of_the_template_count_against_the_length(model, server, tmp_path, continues):
    server.continues = continues
    samples = ask(model, server, tmp_path, "--endpoint", "chat", *ALL)

    used = [len(server.read(body)) + body["max_tokens"] for body in server.questions]
    assert max(used) <= 256
    by_hash = {sha256(body["messages"]): len(server.read(body)) for body in server.questions}
    for sample in samples:
        assert 0 <= sample["prompt_tokens"] - by_hash[sample["hash"]] <= 2


def test_chat_off_is_refused_on_the_chat_endpoint_before_the_first_question(model, server):
    where = ("--backend", "openai", "--url", server.url, "--model-name", "served", "--endpoint", "chat")
    done = run(model, *where, "--suite", "ruler", "--chat", "off", "--lengths", "256")
    assert done.exit_code == 2 and "always applies the server's template" in " ".join(done.output.split())
    assert not server.questions


def test_no_reply_is_lost_or_requested_twice_when_the_server_dies(model, server, tmp_path):
    """One question is never answered, the later ones are; then the server is gone."""
    first = threading.Event()

    def stall(body: dict[str, Any]) -> str:
        if len(server.questions) >= 6:
            server.dead.set()
            first.set()
        elif body is server.questions[0]:
            first.wait(60)
        return "fine"

    server.answer = stall
    options = ("--suite", "niah,key_value", "--value", "words", "--samples", "8", "--requests", "4")
    where = ("--backend", "openai", "--url", server.url, "--model-name", "served", "--endpoint", "text")
    out = ("--lengths", "256", "--out", str(tmp_path / "scores"))
    done = run(model, *where, *options, *out)
    assert done.exit_code != 0
    answered = {body["prompt"] for body in server.questions[1:5]}
    assert len(answered) == 4

    server.dead.clear()
    server.answer = lambda body: "fine"
    server.bodies.clear()
    done = run(model, *where, *options, *out)
    assert done.exit_code == 0, done.output
    again = [body["prompt"] for body in server.questions]
    assert not answered & set(again) and len(again) == len(set(again)) == 16 - 4
    assert len(lines(tmp_path / "scores/samples.jsonl")) == 16
    assert not list((tmp_path / "scores").glob("replies*"))


@pytest.mark.parametrize("endpoint", ["auto", "chat"])
def test_finished_results_need_no_server(model, server, tmp_path, endpoint):
    # Without --suite: which suites there are depends on what the server can do.
    before = ask(model, server, tmp_path / "scores", "--endpoint", endpoint, "--value", "words")
    server.shutdown()
    server.server_close()
    server.bodies.clear()

    assert ask(model, server, tmp_path / "scores", "--endpoint", endpoint, "--value", "words") == before


def test_results_record_the_prompts_and_the_endpoint(model, server, tmp_path):
    for endpoint, template in (("text", "of the tokenizer, sha256 "), ("chat", "of the server")):
        ask(model, server, tmp_path / endpoint, "--endpoint", endpoint, "--suite", "niah")
        record = json.loads((tmp_path / endpoint / "summary.json").read_text())["backend"]
        wanted = {"kind": "openai", "url": server.url, "model": "served", "endpoint": endpoint, "context": 4096}
        assert {**record, **wanted} == record
        assert record["template"].startswith(template)
    assert record["template_tokens"] > 5 and record["prefill"] is None


@pytest.mark.parametrize("endpoint", ["text", "chat"])
def test_a_question_beyond_the_context_is_cut_in_what_is_sent(model, server, tmp_path, endpoint):
    server.context = 300
    cut = ("--lengths", "512", "--beyond-context", "truncate", "--endpoint", endpoint)
    samples = ask(model, server, tmp_path, *ALL, *cut)

    assert max(len(server.read(body)) + body["max_tokens"] for body in server.questions) <= 300
    asked = {sha256(body.get("messages") or body["prompt"]) for body in server.questions}
    assert {sample["hash"] for sample in samples} == asked
    assert all(sample["cut_tokens"] > 100 for sample in samples if sample["suite"] == "niah")


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        ((), ("--endpoint", "text"), "backend transformers and openai"),
        (("--endpoint", "completions"), ("--endpoint", "completions", "--model-name", "other"), "server model served"),
        (("--endpoint", "text"), ("--endpoint", "chat"), "endpoint text and chat"),
        (("--endpoint", "text"), ("--endpoint", "text"), None),
    ],
)
def test_results_of_different_backends_are_not_paired(model, server, tmp_path, first, second, why):
    server.takes = {"ids", "text", "chat"}
    run_dir = tmp_path / "run"
    for name, options in (("base", first), ("other", second)):
        if options:
            ask(model, server, run_dir / "scores" / name, "--suite", "niah", *options)
        else:
            options = ("--backend", "oracle", "--lengths", "256", "--samples", "4", "--suite", "niah")
            done = run(model, *options, "--out", str(run_dir / "scores" / name))
            assert done.exit_code == 0, done.output
            summary = run_dir / "scores" / name / "summary.json"
            summary.write_text(summary.read_text().replace('"oracle"', '"transformers"'))
    (run_dir / "run.json").write_text("{}")
    done = CliRunner().invoke(build_app(), ["report", str(run_dir), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["runs"][0]

    assert bool(found["comparisons"]) == (why is None)
    assert len(found["not_paired"]) == (why is not None)
    assert why is None or why in found["not_paired"][0]
    page = CliRunner().invoke(build_app(), ["report", str(run_dir), "--out", str(tmp_path / "page.html")])
    assert page.exit_code == 0, page.output
    assert ("no paired comparison" in (tmp_path / "page.html").read_text()) == (why is not None)


@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize("endpoint", ["text", "chat"])
def test_penalties_on_repeated_tokens_are_turned_off_where_the_server_lets_them(
    model, server, tmp_path, endpoint, is_strict
):
    """llama-cpp-python's server applies 1.1 by itself, and so cannot copy a value whose characters repeat."""
    server.is_strict = is_strict
    ask(model, server, tmp_path, "--endpoint", endpoint, "--suite", "niah")
    penalties = {(body.get("repeat_penalty"), body.get("repetition_penalty")) for body in server.questions}
    assert penalties == ({(None, None)} if is_strict else {(1.0, 1.0)})
