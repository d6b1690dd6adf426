"""How-to pages and concepts name what exists.

The extension of add-an-extension.md and the example of audit-a-trainer.md work as printed.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import typer
from safetensors import safe_open
from typer.testing import CliRunner

import unspool
from factory import save_folder
from unspool.cli.main import build_app
from unspool.data.packing.config import DatasetConfig
from unspool.data.sources.registry import build_source
from unspool.recipe.yaml_lines import read_yaml
from unspool.synthesis.config import SynthConfig
from unspool.training.config import StageConfig
from unspool.training.optim.base import ParamState
from unspool.training.optim.config import OPTIMIZERS
from unspool.verification.audits.promises import PROMISES

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "how-to" / "add-an-extension.md"
FENCES = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
EXTENSION, REGISTRATION = FENCES
RECIPE = """
name: my
model: {model}
device: cpu
sources:
  recall: {{kind: recall, tokens: 8K, length: [64, 120], prose: asset:demo/train.jsonl.zst}}
datasets:
  packed: {{from: recall, seq_len: 128}}
stages:
  - {{name: short, context_length: 128, mix: {{packed: 1}}, tokens: 512, batch_tokens: 256, lr: 1e-4}}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "my.yaml").write_text(RECIPE.format(model=save_folder(tmp_path / "model")))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    OPTIMIZERS.pop("lion", None)
    sys.modules.pop("lion", None)


def test_the_optimizer_of_the_page_trains_saves_and_loads_its_state(folder, monkeypatch):
    (folder / "lion.py").write_text(EXTENSION)
    monkeypatch.syspath_prepend(str(folder))
    names: dict[str, Any] = {}
    exec(REGISTRATION, names)

    saved = safe_open(folder / "runs/my/stages/short/optimizer.safetensors", "pt")
    momenta = [key for key in saved.keys() if key.endswith("/momentum")]  # noqa: SIM118
    assert momenta and any(saved.get_tensor(key).abs().max() > 0 for key in momenta)
    again = names["LionConfig"]().build()
    assert unspool.plan("my.yaml", {"stages.0.optimizer": {"name": "lion"}}, gpu="h100").fits
    momentum = saved.get_tensor(momenta[0])
    param = ParamState(name="w", weight=momentum.clone(), shape=tuple(momentum.shape))
    param.state = again.init_state(param)
    again.load_state(param, {"momentum": momentum})
    assert param.state.equal(momentum)


def test_the_optimizer_of_the_page_needs_one_file_and_one_line_to_be_built_in(folder):
    source = Path(unspool.__file__).parent
    copied = folder / "src" / "unspool"
    shutil.copytree(source, copied, ignore=shutil.ignore_patterns("__pycache__"))
    optim = copied / "training" / "optim"
    (optim / "lion.py").write_text(EXTENSION)
    registry = (optim / "config.py").read_text()
    listed = registry.replace('{"adamw": AdamWConfig}', '{"adamw": AdamWConfig, "lion": LionConfig}')
    assert listed != registry
    imported = "from unspool.training.optim.base import "
    (optim / "config.py").write_text(
        listed.replace(imported, f"from unspool.training.optim.lion import LionConfig\n{imported}", 1)
    )
    command = [sys.executable, "-m", "unspool", "recipes", "check", "my.yaml", "--set", "stages.0.optimizer.name=lion"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(folder / "src")}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "no problems" in done.stdout


def test_the_command_and_its_ranks_know_the_modules_of_unspool_extensions(folder):
    calls = "\n".join(line for line in REGISTRATION.splitlines() if "register_optimizer" in line)
    (folder / "lion.py").write_text(f"{EXTENSION}\n\n{calls}\n")

    def unspool_(*command: str, extensions: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "UNSPOOL_EXTENSIONS": extensions}
        words = [sys.executable, "-m", "unspool", *command]
        return subprocess.run(words, env=environment, capture_output=True, text=True, check=False)

    lion = ("--set", "stages.0.optimizer.name=lion")
    assert "Allowed: adamw" in unspool_("recipes", "check", "my.yaml", *lion, extensions="").stderr
    trained = unspool_("launch", "my.yaml", "--gpus", "2", "--verb", "train", *lion, extensions="lion")
    assert trained.returncode == 0, trained.stderr
    assert (folder / "runs/my/stages/short/model/model.safetensors").is_file()
    missing = unspool_("recipes", extensions="lino")
    assert missing.returncode == 2
    assert "error: UNSPOOL_EXTENSIONS: cannot import lino: ModuleNotFoundError" in missing.stderr


# audit-a-trainer.md

AUDIT_PAGE = DOCS / "how-to" / "audit-a-trainer.md"


def run_audit(code: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the command of the page on its example, in the current folder."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "train", raising=False)
    Path("train.py").write_text(code)
    _, command, *target = fences(AUDIT_PAGE, "sh")[0].split()
    found = CliRunner().invoke(build_app(), [command, *target])
    del sys.modules["train"]  # monkeypatch.delitem would put this module back after the test
    return found


def test_the_audit_of_the_page_finds_the_mistake_as_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,), (output,) = fences(AUDIT_PAGE, "python"), fences(AUDIT_PAGE, "text")
    found = run_audit(code, monkeypatch)

    lines = iter(found.output.splitlines())
    printed = [line for line in output.splitlines() if line != "…"]
    assert len(printed) >= 4
    assert all(line in lines for line in printed), found.output  # in this order
    assert found.exit_code == 1


def test_the_audit_of_the_page_passes_without_the_mistake(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = fences(AUDIT_PAGE, "python")
    labels, page = '"labels": ids', AUDIT_PAGE.read_text(encoding="utf-8")
    assert f"With `{labels}`, no promise is broken" in page
    fixed, count = re.subn(r'"labels": pad\(.*\)', labels, code)
    found = run_audit(fixed, monkeypatch)

    assert count == 1
    assert found.output.endswith("no promise broken\n")
    assert found.exit_code == 0


def test_the_table_of_the_audit_has_every_promise_in_order():
    names = re.findall(r"^\| `(\w+)` \|(?: [^|]+ \|){3}$", AUDIT_PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert names == [*PROMISES]


# What the pages name

PAGES = [path for folder in ("how-to", "concepts") for path in sorted((DOCS / folder).glob("*.md"))]


STAGE = {"name": "x", "context_length": "64K", "mix": {"x": 1}, "tokens": "1B", "batch_tokens": "64K", "lr": 1}


def by_name(path: Path) -> str:
    return path.relative_to(DOCS).as_posix()


def fences(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def parse_yaml(text: str) -> dict[str, Any]:
    values, _, problems = read_yaml(text, "page")
    assert problems == []
    return values


def commands() -> dict[str, click.Command]:
    """Every command by its words, such as `inspect rows`, and its options."""
    found: dict[str, click.Command] = {}

    def add(words: str, command: click.Command) -> None:
        found[words] = command
        for name, below in getattr(command, "commands", {}).items():
            add(f"{words} {name}".strip(), below)

    add("", typer.main.get_command(build_app()))
    return found


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_every_option_of_a_command_on_a_page_exists(page):
    known = commands()
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = re.findall(r"```(?:sh|text)\n(.*?)```", text, re.DOTALL)
    lines = [line.partition("#")[0] for block in blocks for line in block.splitlines()]
    lines += re.findall(r"`(unspool [^`\n]+)`", text)
    for line in (line for line in lines if line.startswith("unspool ")):
        words = line.split()[1:]
        # `inspect PATH` is the hidden command `inspect at PATH`.
        places = (" ".join(words[:2]), f"{words[0]} at", words[0])
        command = next(known[place] for place in places if place in known)
        options = {name for parameter in command.params for name in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options, line


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_every_option_alone_on_a_page_is_one_of_some_command(page):
    options = {name for command in commands().values() for parameter in command.params for name in parameter.opts}
    spans = re.findall(r"`(--[a-z][^`\n]*)`", page.read_text(encoding="utf-8"))
    named = {word for span in spans for word in re.findall(r"--[a-z][a-z-]*", span)}
    assert named - options - {"--max-model-len"} == set()  # vLLM's


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_every_part_of_a_recipe_on_a_page_is_valid(page):
    for fence in fences(page, "yaml"):
        given = parse_yaml(fence)
        for source in given.get("sources", {}).values():
            build_source(source)
        for dataset in given.get("datasets", {}).values():
            DatasetConfig.model_validate(dataset)
        for synth in given.get("synth", {}).values():
            SynthConfig.model_validate(synth)
        required = STAGE | {"batch_tokens": "1M"}
        stages = given.get("stages", []) + ([{"rope": given["rope"]}] if "rope" in given else [])
        for stage in stages:
            StageConfig.model_validate(required | stage)
        assert set(given) <= {"sources", "datasets", "synth", "stages", "rope"}


def test_a_key_or_value_of_a_stage_in_code_is_valid():
    """Settings that pages name as `key: value`."""
    page = (DOCS / "how-to" / "out-of-memory.md").read_text(encoding="utf-8")
    spans = [span for span in re.findall(r"`([^`\n]+)`", page) if re.match(r"[a-z_]+: ", span)]
    assert len(spans) > 6
    settings = [parse_yaml(span) for span in spans]
    for setting in settings:
        if set(setting) <= {"weights", "states", "step"}:
            setting = {"optimizer": setting}
        recompute = {"activation_checkpointing": "full"} if set(setting) & {"offload", "layers_per_checkpoint"} else {}
        StageConfig.model_validate(STAGE | recompute | setting)


def test_the_glossary_has_at_most_40_terms_and_each_a_sentence():
    text = (DOCS / "reference" / "glossary.md").read_text(encoding="utf-8")
    terms = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", text.partition("| --- |")[2], re.MULTILINE))
    assert 20 <= len(terms) <= 40
    assert list(terms) == sorted(terms, key=str.lower)
    assert [term for term, meaning in terms.items() if not meaning.endswith(".") or meaning.count(". ")] == []
