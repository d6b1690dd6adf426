"""Documents, names, replies and arguments that hold control sequences reach the terminal only as signs."""

import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from reporting.fake_run import write_fake_run
from unspool.cli.main import build_app

ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202eabc\u2066\u200b\u2028\x7f"
MARKUP = "[red]x[/red][link=https://evil]y[/link]"
UNSAFE = set("\x1b\x07\x9b\u202e\u2066\u200b\u2028\x7f\r")


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]):
    """Run a command; what it printed, which holds no control sequence, and its exit code."""

    def run(*args: str) -> tuple[str, int]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            build_app()(list(args))
        printed = capsys.readouterr()
        found = UNSAFE & set(printed.out + printed.err)
        assert not found, [hex(ord(character)) for character in found]
        return printed.out + printed.err, int(stop.value.code or 0)

    return run


def test_a_document_and_its_file_name(tmp_path, shown):
    path = tmp_path / f"{ESCAPE[:8]}.jsonl"
    path.write_text(json.dumps({"text": ESCAPE + MARKUP}) + "\n", encoding="utf-8")
    text, code = shown("inspect", str(path), "--tokenizer", "asset:tiny-base", "--full")
    assert code == 0 and "␛]0;owned" in text and "[red]x[/red][link=" in text

    text, code = shown("inspect", str(path), "--tokenizer", "asset:tiny-base", "--json")
    assert code == 0 and json.loads(text)
    assert r"\u001b]0;owned\u0007\u001b[2J\u009b31m\u202eabc\u2066\u200b\u2028\u007f" in text


def test_a_file_that_cannot_be_read(tmp_path, shown):
    path = tmp_path / f"{ESCAPE[:8]}{MARKUP[:12].replace('/', '')}.txt"
    path.write_bytes(b"\xff\xff")
    text, _ = shown("inspect", str(path), "--tokenizer", "asset:tiny-base")
    assert "␛]0;owne" in text and "[red]" in text


@pytest.mark.parametrize(
    "args",
    [
        ("plan", f"{ESCAPE}.yaml"),
        ("run", "tiny", "--set", f"stages.0.{ESCAPE}=1"),
        ("run", f"{ESCAPE}{MARKUP}"),
        ("report", f"{ESCAPE}{MARKUP}"),
        ("inspect", f"{ESCAPE}"),
        ("rope", "--model", f"{ESCAPE}/x", "--context", "4K"),
        ("recipes", "show", ESCAPE),
        ("recipes", "show", "tiny", ESCAPE),
        (f"{ESCAPE}",),
        ("export", f"no-{ESCAPE}", "x"),
    ],
)
def test_an_argument(args, shown):
    text, code = shown(*args)
    assert code == 2 and text


def test_a_recipe(tmp_path, shown):
    recipe = tmp_path / "a.yaml"
    spelled = json.dumps("x" + ESCAPE + MARKUP)
    recipe.write_text(f"name: {spelled}\nmodel: {spelled}\n{spelled}: 1\n")
    text, code = shown("recipes", "check", str(recipe))
    assert code == 2 and text.count("error: ") >= 2


def test_names_and_results_of_a_run(tmp_path, shown):
    run = write_fake_run(tmp_path / "run")
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(facts | {"base_model": ESCAPE + MARKUP, "versions": {ESCAPE: ESCAPE}}))
    (run / "scores" / "abf").rename(run / "scores" / f"a{ESCAPE[:6]}")
    for args in (("report", str(run)), ("report", str(run), "--json"), ("inspect", str(run))):
        text, code = shown(*args)
        assert code in (0, 2) and text
    page = (run / "report.html").read_text(encoding="utf-8")
    assert not (UNSAFE - {"\u200b"}) & set(page)


@pytest.fixture
def server() -> Iterator[str]:
    """A server that answers with control sequences."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            body = json.dumps({"error": {"message": f"no {ESCAPE}{MARKUP}"}}).encode()
            self.send_response(400)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None: ...

    listening = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{listening.server_port}/v1"
    listening.shutdown()
    listening.server_close()


def test_the_reply_of_a_server(server, tmp_path, shown):
    graded = tmp_path / "graded.jsonl"
    record = {"question": "q", "references": ["a"], "output": "a", "label": 3}
    graded.write_text(json.dumps(record) + "\n")
    text, code = shown("judge", "--check", str(graded), "--url", server, "--model-name", f"judge{ESCAPE}")
    assert code == 2 and "refuses the request" in text and "owned" in text


def test_the_output_of_a_model_in_a_log_line(capsys):
    """As stages log their samples."""
    logging.getLogger("unspool.training").info(f"step 3  {ESCAPE}{MARKUP}")
    printed = capsys.readouterr().err
    assert not UNSAFE & set(printed)
    assert "step 3  ␛]0;owned" in printed and MARKUP in printed
