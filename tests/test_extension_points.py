"""One toy of every kind of extension, defined here and registered by one call, goes through the whole product.

A RoPE method, a strategy, a source, a suite, an optimizer, loss weights and a backend: check, plan, run, eval, report
and model card.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
from safetensors import safe_open
from typer.testing import CliRunner

from factory import save_folder
from unspool.cli.main import build_app
from unspool.data.packing.config import STRATEGIES, DatasetConfig, register_strategy
from unspool.data.packing.row import Row
from unspool.data.packing.store import open_rows
from unspool.data.sources.base import Document, Estimate, Item, Source
from unspool.data.sources.registry import SOURCES, register_source
from unspool.data.strategies.base import Finish, PackingInputs, StrategyConfig
from unspool.evals.backends.base import BACKENDS, Backend, BackendOptions, register_backend
from unspool.evals.config import TaskEval
from unspool.evals.prompts import Prompt
from unspool.evals.suite import Ask, Question, Task
from unspool.evals.suites import SUITES, register_suite
from unspool.evals.task_suite import TaskSuite
from unspool.models.tokenizer import load_tokenizer
from unspool.rope.methods import ROPE_METHODS, register_rope_method
from unspool.rope.tables import RopeMethod, RopeSettings, RopeShape, one_base
from unspool.training.losses.base import LossConfig, LossWeights
from unspool.training.losses.config import LOSSES, register_loss
from unspool.training.optim.base import OptimizerConfig, ParamState, Rates
from unspool.training.optim.config import OPTIMIZERS, register_optimizer


class DoubledBase(RopeMethod):
    method: Literal["doubled-base"]

    def resolve(self, rope: RopeShape, context_len: int) -> RopeSettings:
        return RopeSettings(parameters=one_base(2 * 10_000.0), max_positions=max(context_len, rope.max_positions))


class Backwards(StrategyConfig):
    """Documents of a row in the opposite order."""

    name: ClassVar[str] = "backwards"
    title: ClassVar[str] = "with documents backwards (toy)"
    every: int = 1

    def finish(self, dataset: DatasetConfig, inputs: PackingInputs) -> Finish:
        def turn(rows: Sequence[Row]) -> Sequence[Row]:
            return [_turned(row) for row in rows]

        return turn


def _turned(row: Row) -> Row:
    texts = np.split(row.tokens, np.cumsum(row.doc_lens)[:-1])
    return replace(row, tokens=np.concatenate(texts[::-1]), doc_lens=row.doc_lens[::-1].copy())


class Counting(Source):
    """Documents that count: one, two, three …"""

    kind: Literal["counting"]
    documents: int = 40

    generated: ClassVar[bool] = True

    def units(self, root: Path) -> list[Path]:
        return []

    def divide(self, units: list[Path], seed: int) -> list[Any]:
        return [self.documents]

    def read(self, task: Any, seed: int, encoder: Any = None) -> Iterator[Item]:
        return (Document(f"counting:{number + 1}", self._text(number)) for number in range(task))

    def sample(self, units: list[Path], seed: int) -> Iterator[str]:
        yield self._text(0)

    def estimate(self) -> Estimate:
        return Estimate(self.documents * 100, "by counting", document_len=100.0)

    def _text(self, number: int) -> str:
        return " ".join(f"number {at} follows {at - 1}." for at in range(number + 1, number + 13))


class SignSgdConfig(OptimizerConfig):
    name: Literal["sign-sgd"] = "sign-sgd"

    def build(self) -> "SignSgd":
        return SignSgd()

    def state_bytes(self) -> float:
        return 0.0


class SignSgd:
    steps: ClassVar[int] = 0

    def init_state(self, param: ParamState) -> Any:
        return None

    def takes_fp32_grad(self, param: ParamState) -> bool:
        return True

    def step(self, params: Sequence[ParamState], rates: Rates) -> None:
        SignSgd.steps += 1
        for param in params:
            if param.grad is not None:
                param.weight.sub_(rates.lr * param.lr_ratio * param.grad.sign())

    def step_in_backward(self, param: ParamState, rates: Rates, norm: Any) -> None:
        self.step([param], rates)

    def state_tensors(self, param: ParamState) -> dict[str, Any]:
        return {}

    def load_state(self, param: ParamState, saved: Mapping[str, Any]) -> None:
        pass


class LateLoss(LossConfig):
    """The second half of each row weighs twice as much."""

    weights: Literal["late"] = "late"

    def build(self, stage: Any, measured: Any) -> "LateWeights":
        return LateWeights()


class LateWeights(LossWeights):
    rows: ClassVar[int] = 0

    def of_row(self, row: Row, spans: np.ndarray) -> np.ndarray:
        LateWeights.rows += 1
        return np.where(np.arange(len(row.tokens)) < len(row.tokens) // 2, 1.0, 2.0)


class EchoEval(TaskEval):
    suite: Literal["echo"]


def _echo(sources: Any, ask: Ask) -> Question:
    word = f"word{ask.index}"
    return Question(context=f"Remember {word}.", question=" Which word?", references=(word,), depth=0.0)


ECHO = TaskSuite(
    name="echo",
    title="Echo of words",
    config=EchoEval,
    version=1,
    tasks={
        "echo": Task(
            name="echo",
            metric="recall",
            answer_tokens=4,
            build=_echo,
            score=lambda output, question: float(question.references[0] in output),
        )
    },
    load=lambda tokenizer, paths, wording=None: None,
)


class Parrot(Backend):
    """Answers with the whole prompt."""

    def __init__(self, options: BackendOptions) -> None:
        self.tokenizer = load_tokenizer(options.model)

    def answers(self, prompt: Prompt) -> list[str]:
        return [
            self.tokenizer.decode([*prompt.context_ids.tolist(), *question.ids.tolist()])
            for question in prompt.questions
        ]


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """The only thing that an extension does, and its end: other tests in this process know the built-in ones only."""
    register_rope_method(DoubledBase)
    register_strategy(Backwards)
    register_source(Counting)
    register_optimizer(SignSgdConfig)
    register_loss(LateLoss)
    register_suite(ECHO)
    register_backend("parrot", Parrot)
    yield
    for registry, name in (
        (ROPE_METHODS, "doubled-base"),
        (STRATEGIES, "backwards"),
        (SOURCES, "counting"),
        (OPTIMIZERS, "sign-sgd"),
        (LOSSES, "late"),
        (SUITES, "echo"),
        (BACKENDS, "parrot"),
    ):
        del registry[name]
    del DatasetConfig.__pydantic_fields__["backwards"]
    DatasetConfig.model_rebuild(force=True)


RECIPE = """
name: toys
model: {model}
out: {out}
device: cpu
sources:
  numbers: {{kind: counting, documents: 40}}
datasets:
  packed: {{from: numbers, seq_len: 128, backwards: {{every: 1}}}}
stages:
  - name: toy
    context_length: 128
    rope: {{method: doubled-base}}
    mix: {{packed: 1}}
    tokens: 512
    batch_tokens: 256
    lr: 1e-4
    optimizer: {{name: sign-sgd}}
    loss: {{weights: late}}
evals:
  - {{suite: echo, lengths: [64], samples: 4}}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toys")
    path = folder / "toys.yaml"
    path.write_text(RECIPE.format(model=save_folder(folder / "model"), out=folder / "run"))
    return path


def invoke(*words: Any) -> str:
    done = CliRunner().invoke(build_app(), [str(word) for word in words])
    assert done.exit_code == 0, f"{done.output}\n{done.exception!r}"
    return done.stdout


def test_the_checker_takes_them_and_names_them_where_one_is_misspelled(recipe):
    assert "no problems" in invoke("recipes", "check", recipe)
    for key, value, known in (
        ("sources.numbers.kind", "countin", "counting"),
        ("stages.0.rope.method", "doubled-bas", "doubled-base"),
        ("stages.0.optimizer.name", "sign-sg", "sign-sgd"),
        ("stages.0.loss.weights", "lat", "late"),
        ("evals.0.suite", "ech", "echo"),
        ("datasets.packed.backward", "{}", "backwards"),
    ):
        done = CliRunner().invoke(build_app(), ["recipes", "check", str(recipe), "--set", f"{key}={value}"])
        assert done.exit_code == 2 and known in done.stderr, done.stderr


def test_the_schema_lists_them():
    text = invoke("recipes", "schema")
    for name in ("counting", "backwards", "doubled-base", "sign-sgd", "late", "echo"):
        assert f'"{name}"' in text, name


def test_a_plan_asks_them(recipe):
    plan = invoke("plan", recipe, "--gpu", "h100", "--json")
    assert json.loads(plan)["stages"]
    assert "by counting" in invoke("plan", recipe, "--gpu", "h100")


@pytest.fixture(scope="module")
def run_dir(recipe):
    SignSgd.steps = LateWeights.rows = 0
    invoke("run", recipe)
    return recipe.parent / "run"


def test_a_run_uses_them(recipe, run_dir, tmp_path):
    assert json.loads((run_dir / "corpus" / "numbers" / "manifest.json").read_text())["counts"]["documents"] == 40
    rows = open_rows(run_dir / "datasets" / "packed")
    invoke("pack", recipe, "--set", "datasets.packed={from: numbers, seq_len: 128}", "--set", f"out={tmp_path}")
    plain = open_rows(tmp_path / "datasets" / "packed")
    assert len(rows) == len(plain) > 2
    assert any(len(row.doc_lens) > 1 for row in (plain[at] for at in range(len(plain)))), "nothing to turn"
    assert all(rows[at].tokens.tolist() == _turned(plain[at]).tokens.tolist() for at in range(len(plain)))
    config = json.loads((run_dir / "stages" / "toy" / "model" / "config.json").read_text())
    assert config["rope_parameters"]["rope_theta"] == 20_000.0
    steps = [json.loads(line) for line in (run_dir / "stages" / "toy" / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == SignSgd.steps == 2, "another optimizer took the steps"
    assert LateWeights.rows == 4, "rows were not weighed"
    saved = safe_open(run_dir / "stages" / "toy" / "optimizer.safetensors", "np").keys()
    assert not [name for name in saved if "exp_avg" in name]
    summary = json.loads((run_dir / "scores" / "toy" / "summary.json").read_text())
    assert {cell["suite"] for cell in summary["cells"]} == {"echo"}


def test_a_command_evaluates_with_them(run_dir):
    model = run_dir / "stages" / "toy" / "model"
    found = json.loads(
        invoke("eval", model, "--suite", "echo", "--lengths", 64, "--samples", 4, "--backend", "parrot", "--json")
    )
    (mean,) = {cell["value"] for cell in found["cells"] if cell.get("task") == "echo" and cell["depth"] is None}
    assert mean == 1.0, "the parrot repeats every word"


def test_the_report_and_the_model_card_name_them(run_dir, tmp_path):
    page = (run_dir / "report.html").read_text()
    assert "Echo of words" in page
    invoke("export", run_dir, tmp_path / "exported", "--device", "cpu")
    card = (tmp_path / "exported" / "README.md").read_text()
    assert "with documents backwards (toy)" in card
    assert "Echo of words" in card
