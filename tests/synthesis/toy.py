"""Documents, recipes and servers that tests of synth share."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from unspool.data.facts import word_list

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
MOCK = {"kind": "mock", "reply_tokens": 128}
SMALL = {
    "length": 512,
    "min_tokens": 128,
    "chunk": 64,
    "summary_chunk": 128,
    "summary_group": 2,
    "chat_template": "plain.jinja",
}


@cache
def _words() -> np.ndarray:
    return np.array(word_list())


def document(rng: np.random.Generator, sentences: int) -> str:
    """Sentences of random words, so that no two documents share a run of them."""
    words = _words()
    made = []
    for number in range(sentences):
        chosen = rng.choice(words, size=int(rng.integers(7, 13)))
        made.append(" ".join(chosen).capitalize() + "." + ("\n\n" if number % 5 == 4 else " "))
    return "".join(made).strip()


def write_documents(path: Path, count: int, *, sentences: tuple[int, int] = (12, 40), seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    texts = [document(rng, int(rng.integers(*sentences))) for _ in range(count)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


def write_recipe(folder: Path, synth: dict[str, Any], **more: Any) -> Path:
    """A recipe whose set `long` is made of `docs.jsonl` with a small tokenizer."""
    (folder / "plain.jinja").write_text(CHAT_TEMPLATE)
    recipe = {
        "name": "made",
        "model": {"size": "4M", "tokenizer": "asset:tiny-base", "context_length": 512},
        "out": str(folder / "run"),
        "engine": {"workers": 1},
        "sources": {"docs": {"kind": "jsonl", "path": str(folder / "docs.jsonl")}},
        "datasets": {},
        "stages": [],
        "synth": {"long": {"from": "docs", "generator": MOCK, **SMALL, **synth}},
        **more,
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe))  # JSON is YAML
    return path


def read_conversations(folder: Path) -> list[dict[str, Any]]:
    records = []
    for path in sorted(folder.glob("conversations-*.jsonl.zst")):
        with path.open("rb") as file:
            text = zstandard.ZstdDecompressor().stream_reader(file).read().decode()
        records += [json.loads(line) for line in text.splitlines()]
    return records


@contextmanager
def server(answer: Callable[[BaseHTTPRequestHandler, dict[str, Any]], None]) -> Iterator[str]:
    """A real HTTP server on this machine; `answer` does as it likes with each request."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer(self, body)

        def log_message(self, *args: object) -> None:
            pass

    served = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.daemon_threads = True
    threading.Thread(target=served.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{served.server_port}/v1"
    finally:
        served.shutdown()
        served.server_close()


def send(handler: BaseHTTPRequestHandler, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
    handler.send_response(status)
    for name, value in (headers or {}).items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content)


def send_text(handler: BaseHTTPRequestHandler, text: str) -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 3}
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    send(handler, 200, json.dumps({"choices": [choice], "usage": usage}).encode())


def wait_for(condition: Callable[[], bool], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)
