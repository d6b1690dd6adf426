"""A model is named by a folder, a run, a stage or a Hub id: what is taken, and what a wrong name is answered with."""

import json
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from huggingface_hub import constants
from typer.testing import CliRunner

from factory import save_folder
from unspool.cli.main import build_app
from unspool.core.artifacts import seal
from unspool.models.location import resolve_path

PUBLIC, HANGS = "a-public/model", "hangs"
# A name: status and headers of the answer, as the Hub sends them.
ANSWERS: dict[str, tuple[int, dict[str, str]]] = {
    "missing": (401, {"X-Error-Code": "RepoNotFound"}),
    "plain-404": (404, {}),
    "gated": (403, {"X-Error-Code": "GatedRepo"}),
    "bad-token": (401, {"X-Error-Message": "Invalid credentials in Authorization header"}),
    "forbidden": (403, {}),
    "broken": (500, {}),
}


class _Hub(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        name = self.path.split("/")[2]
        if name == HANGS:
            time.sleep(1)
            return
        status, headers = ANSWERS.get(name, (200, {}))
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty current folder, an empty cache of the Hub, and no network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.3)
    use_hub(monkeypatch, "http://127.0.0.1:9")
    return tmp_path


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """As HF_ENDPOINT does for a new process."""
    rest = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + rest)


def run(*words: Any) -> Any:
    return CliRunner().invoke(build_app(), [str(word) for word in words])


def said(done: Any) -> str:
    """The one line of an error that a user can fix."""
    assert done.exit_code == 2, done.output
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.output
    return errors[0].removeprefix("error: ")


@pytest.mark.parametrize(
    ("name", "what", "remedy"),
    [
        ("missing", "has no such model, or it is private (401)", "check the name, or log in with `hf auth login`"),
        ("plain-404", "has no such model, or it is private (404)", "check the name, or log in with `hf auth login`"),
        ("gated", "gives it only to users who accepted its terms", "accept them at http"),
        ("bad-token", "refused your access token (401)", "log in again with `hf auth login`, or correct HF_TOKEN."),
        ("forbidden", "refused access to it (403)", "use an access token with read access to it"),
        ("broken", "answered with an error (500)", "try again later"),
        (HANGS, "did not answer within 0.3 seconds", "check the network and HF_ENDPOINT"),
    ],
)
def test_a_name_is_answered_with_what_the_hub_said(here, monkeypatch, name, what, remedy):
    with hub() as url:
        use_hub(monkeypatch, url)
        began = time.monotonic()
        message = said(run("rope", "--model", f"org/{name}", "--context", "8K"))

    host = url.removeprefix("http://")
    assert f"model org/{name}: not a folder here and not in the Hub's cache, and {host} {what}; {remedy}" in message
    assert time.monotonic() - began < 4


def test_without_a_network_or_in_offline_mode_the_answer_is_quick_and_says_so(here, monkeypatch):
    began = time.monotonic()
    message = said(run("rope", "--model", "org/name", "--context", "8K"))
    assert "127.0.0.1:9 cannot be reached ([Errno 111] Connection refused); check the network and HF_END" in message

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    message = said(run("rope", "--model", "org/name", "--context", "8K"))
    assert "offline mode is set (HF_HUB_OFFLINE), so the Hub was not contacted; unset it, or give a local" in message
    assert time.monotonic() - began < 4


def test_a_hub_that_never_accepts_cannot_hold_a_command(here, monkeypatch):
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        use_hub(monkeypatch, f"http://127.0.0.1:{full.getsockname()[1]}")
        began = time.monotonic()
        assert "did not answer within 0.3 seconds" in said(run("rope", "--model", "org/name", "--context", "8K"))
        assert time.monotonic() - began < 4


def test_similar_names_of_folders_cached_and_shipped_models_are_suggested(here):
    save_folder(here / "exported" / "tiny-2k")
    (here / "cache" / "models--HuggingFaceTB--SmolLM2-135M").mkdir(parents=True)

    def asked(name: str) -> str:
        return said(run("rope", "--model", name, "--context", "8K"))

    assert asked("exported/tinny-2k").endswith(" Did you mean exported/tiny-2k (here)?")
    assert asked("exprted/tiny-2k").endswith(" Did you mean exported/tiny-2k (here)?")
    cached = " Did you mean HuggingFaceTB/SmolLM2-135M (in the Hub's cache)?"
    assert asked("HuggingFaceTB/SmolLM2-153M").endswith(cached)
    assert asked("SmolLM2-135M").endswith(cached)
    assert asked("tiny-base").endswith(" Did you mean asset:tiny-base (shipped)?")
    assert asked("./no/such/../folder").startswith("model no/such/../folder: no such file or folder; correct the path.")
    assert "Did you mean" not in asked("something-else-entirely")


RECIPE = """\
name: x
model: {model}
out: run
sources: {{books: {{kind: jsonl, path: books.jsonl}}}}
datasets: {{long: {{from: books, seq_len: 256}}}}
stages: [{{name: a, context_length: 256, mix: {{long: 1}}, tokens: 256, batch_tokens: 256, lr: 1e-3}}]
"""


@pytest.mark.parametrize(
    "words",
    [
        ("eval", "MODEL", "--suite", "niah", "--lengths", "256", "--samples", "1", "--device", "cpu"),
        ("eval", "MODEL", "--backend", "oracle", "--suite", "niah", "--lengths", "256"),
        ("generate", "MODEL", "--question", "Who?", "--device", "cpu"),
        ("verify", "--model", "MODEL", "--device", "cpu", "--only", "packing"),
        ("inspect", "attention", "MODEL", "--text", "books.jsonl"),
        ("plan", "recipe.yaml", "--gpu", "h100", "--model", "MODEL"),
        ("plan", "recipe.yaml", "--gpu", "h100"),
        ("run", "recipe.yaml"),
        ("tokenize", "recipe.yaml"),
        ("recipes", "check", "recipe.yaml", "--inputs"),
        ("export", "MODEL", "out"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_every_command_that_takes_a_model_suggests_a_name_and_writes_nothing(here, words):
    (here / "books.jsonl").write_text(json.dumps({"text": "the river runs past the old mill " * 50}) + "\n")
    (here / "recipe.yaml").write_text(RECIPE.format(model="tiny-bse"))
    before = sorted(here.rglob("*"))

    message = said(run(*("tiny-bse" if word == "MODEL" else word for word in words)))

    assert "Did you mean asset:tiny-base (shipped)?" in message
    assert "tiny-bse" in message
    assert sorted(here.rglob("*")) == before


def test_a_cached_model_is_used_where_the_hub_does_not_answer(here, monkeypatch):
    folder = here / "cache" / f"models--{PUBLIC.replace('/', '--')}"
    commit = "0" * 40
    save_folder(folder / "snapshots" / commit)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)

    done = run("rope", "--model", PUBLIC, "--context", "8K")

    assert done.exit_code == 0, done.output
    assert f"model {PUBLIC}: 127.0.0.1:9 cannot be reached" in done.stderr
    assert "using the copy in the cache" in done.stderr


# Runs and stages


@pytest.fixture
def finished(here):
    """A run whose stage `long` continues `short`."""
    return write_run(here / "runs" / "mine", {"short": "base", "long": "short"})


def write_run(folder: Path, stages: dict[str, str], *, untrained: tuple[str, ...] = ()) -> Path:
    entries = [{"name": name, "init": init} for name, init in stages.items()]
    for name in stages:
        if name not in untrained:
            draft = folder / "stages" / f"{name}.partial"
            shutil.copytree(resolve_path("asset:tiny-base", Path()), draft / "model")
            seal(draft, folder / "stages" / name, kind="stage", inputs={}, settings={}, counts={})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(json.dumps({"name": folder.name, "stages": entries}))
    return folder


EVAL = ("--suite", "niah", "--lengths", "256", "--samples", "1", "--device", "cpu", "--json")


@pytest.mark.parametrize("part", ["", "/stages", "/stages/long", "/stages/long/model"])
def test_a_run_or_stage_folder_stands_for_its_model(finished, part):
    given = f"runs/mine{part}"
    done = run("eval", given, *EVAL)

    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["model"] == "mine/long"
    taken = f"{given}: using the model in runs/mine/stages/long/model"
    assert (taken in done.stderr) == (not given.endswith("model"))


@pytest.mark.parametrize(
    "words",
    [
        ("generate", "runs/mine", "--question", "Who?", "--max-new-tokens", "1", "--device", "cpu"),
        ("rope", "--model", "runs/mine", "--context", "1K"),
        ("inspect", "attention", "runs/mine", "--text", "books.txt", "--length", "64", "--beyond", "9"),
        pytest.param(
            ("verify", "--model", "runs/mine", "--device", "cpu", "--only", "isolation"), marks=pytest.mark.slow
        ),
        ("plan", "recipe.yaml", "--gpu", "h100", "--model", "runs/mine"),
        ("plan", "recipe.yaml", "--gpu", "h100"),
        ("tokenize", "recipe.yaml"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_a_run_folder_is_a_model_everywhere(finished, here, words):
    (here / "books.txt").write_text("the river runs past the old mill " * 50)
    (here / "books.jsonl").write_text(json.dumps({"text": "the river runs past the old mill " * 50}) + "\n")
    (here / "recipe.yaml").write_text(RECIPE.format(model="runs/mine"))

    done = run(*words)

    assert done.exit_code == 0, done.output
    assert "runs/mine: using the model in runs/mine/stages/long/model" in done.stderr


def test_a_run_without_one_final_model_is_refused_with_what_to_give(here):
    write_run(here / "arms", {"abf": "base", "utk": "base"})
    write_run(here / "half", {"first": "base", "second": "previous"}, untrained=("second",))
    write_run(here / "begun", {"first": "base"}, untrained=("first",))
    (here / "begun" / "stages" / "first.work" / "model").mkdir(parents=True)
    (here / "empty").mkdir()

    for folder, sentence in {
        "arms": "arms: the run ends in 2 models (abf and utk); give one of them, such as arms/stages/utk.",
        "half": "half: the run is not finished, since stage second is not trained; run the recipe to its end, or give "
        "a trained stage, such as half/stages/first.",
        "begun": "begun: no stage of this run is trained yet; run the recipe first.",
        "begun/stages/first.work": "begun/stages/first.work: this stage is still being trained; run the recipe to its "
        "end first.",
        "empty": "empty: the folder holds no model (config.json); give the folder of a model, a run or a stage.",
    }.items():
        assert said(run("eval", folder, *EVAL)) == sentence
    (here / "recipe.yaml").write_text(RECIPE.format(model="arms"))
    (here / "books.jsonl").write_text('{"text": "x"}\n')
    assert said(run("run", "recipe.yaml")).startswith("recipe.yaml:2: model: arms: the run ends in 2 models")
    assert said(run("export", "arms", "out")).startswith("arms: the run ends in 2 models")
