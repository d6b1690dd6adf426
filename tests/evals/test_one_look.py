"""`unspool eval MODEL`: doubling lengths within a budget, an effective length with an interval, honest sentences."""

import json
import logging
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from unspool.cli.main import build_app
from unspool.core.errors import ConfigError
from unspool.core.http_client import RefusedError
from unspool.evals.backends import mock
from unspool.evals.backends.base import ContextLimit
from unspool.evals.backends.mock import Oracle
from unspool.evals.one_look import OneLook, default_folder, look_evals, look_lengths
from unspool.evals.scoring.effective_length import relative_effective_length
from unspool.reporting.evaluate import parse_duration
from unspool.reporting.look_page import write_look

from .toy import lines


class Clock:
    """Time passes when a model reads."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Reader(Oracle):
    """Right up to `reach` tokens, and takes `pace` seconds per token."""

    def __init__(self, tokenizer, *, reach=1 << 30, pace=0.0, context=2048, dies_after=1 << 30):
        super().__init__(tokenizer, None if context is None else ContextLimit(context, "max_position_embeddings"))
        self.reach, self.pace, self.clock, self.dies_after = reach, pace, Clock(), dies_after
        self.asked = []

    def answers(self, prompt):
        if len(self.asked) >= self.dies_after:
            raise KeyboardInterrupt
        self.clock.now += self.pace * prompt.length
        self.asked.append((prompt.suite, prompt.length, prompt.index))
        return super().answers(prompt)

    def answer(self, prompt, question):
        return super().answer(prompt, question) if prompt.length <= self.reach else "no idea"


@pytest.fixture
def look(scoring):
    """Runs one look without variable tracing, which takes a second per prompt to build."""

    def run(backend, *, budget=1e9, samples=10, lengths=None):
        context = backend.context_limit
        lengths = lengths or look_lengths(None if context is None else context.tokens)
        evals = look_evals(lengths, samples=samples)[:2]
        return OneLook(replace(scoring, evals=evals), backend, budget=budget, clock=backend.clock).run()

    return run


def test_lengths_double_up_to_the_claimed_context():
    assert look_lengths(8192) == [512, 1024, 2048, 4096, 8192]
    assert look_lengths(2048) == [256, 512, 1024, 2048]
    assert look_lengths(256) == [64, 128, 256]
    assert look_lengths(5000) == [512, 1024, 2048, 4096, 5000]
    assert look_lengths(40) == [40]
    assert look_lengths(None)[-1] == 1 << 20


def test_a_model_that_forgets_beyond_1k_has_an_effective_length_of_1k(look, tokenizer, tmp_path):
    backend = Reader(tokenizer, reach=1024, context=8192)
    summary = look(backend)

    facts = summary["look"]
    assert facts["effective_length"] == {"value": 1024, "low": 1024, "high": 1024}
    assert facts["stop"] == "collapse" and facts["not_asked"] == [4096, 8192]
    assert facts["sentence"].startswith(
        "The effective length of base is 1K tokens of 8K claimed (95% interval 1K to 1K, among the tested lengths "
        "512, 1K and 2K): the longest tested length at which it keeps 85% of its score at 512 (100%"
    )
    assert [(row["length"], row["value"]) for row in facts["lengths"]] == [(512, 1), (1024, 1), (2048, 0)]
    assert {cell["length"] for cell in summary["cells"]} == {512, 1024, 2048}

    write_look(summary, tmp_path / "look.html")
    page = (tmp_path / "look.html").read_text(encoding="utf-8")
    assert "effective length 1K" in page and page.count("<svg") >= 2 and "Needle by depth" in page
    assert "Both of its ends are tested lengths" in page and "a model may score much lower in other wordings" in page


def test_a_model_that_never_forgets_keeps_all_of_its_context(look, tokenizer):
    facts = look(Reader(tokenizer, context=1024))["look"]

    assert (facts["effective_length"]["value"], facts["stop"], facts["not_asked"]) == (1024, "context", [])
    assert not facts["at_least"]


@pytest.mark.parametrize("pace", [0.001, 0.01, 0.1])
def test_the_budget_is_kept_and_skipped_lengths_are_named(look, tokenizer, pace):
    backend = Reader(tokenizer, pace=pace, context=8192)
    facts = look(backend, budget=60.0, samples=40)["look"]

    assert backend.clock.now <= 60 * 1.1
    assert facts["stop"] == "budget" and facts["not_asked"]
    assert "the budget of 1 min 0 s was used up" in facts["notes"][-1]
    if pace < 0.01:
        assert facts["at_least"] and "is at least" in facts["sentence"] and "or more" in facts["sentence"]


def test_a_budget_too_small_for_two_lengths_states_no_length(look, tokenizer):
    facts = look(Reader(tokenizer, pace=1.0, context=1 << 20), budget=600.0)["look"]

    assert facts["effective_length"] is None
    assert "The effective length was not determined" in facts["sentence"]


def test_a_model_that_answers_nothing_gets_no_length(look, tokenizer):
    backend = Reader(tokenizer, reach=0, context=8192)
    facts = look(backend)["look"]

    assert facts["sentence"] == (
        "base answers none of 20 questions correctly even at 512 tokens. The effective length was not determined."
    )
    assert {length for _, length, _ in backend.asked} == {512}
    assert facts["lengths"][0]["value"] == 0


def test_a_server_that_refuses_a_length_ends_the_search_there(look, tokenizer):
    class Refusing(Reader):
        def answers(self, prompt):
            if prompt.length > 1024:
                raise RefusedError("http://x/v1", 400, "too many tokens")
            return super().answers(prompt)

    facts = look(Refusing(tokenizer, context=None), lengths=[512, 1024, 2048])["look"]

    assert facts["at_least"] and facts["effective_length"]["value"] == 1024
    assert any("2K not tested: the server refused" in note for note in facts["notes"])
    assert any("claimed context is unknown" in note for note in facts["notes"])


def test_an_interrupted_measurement_repeats_no_question(look, scoring, tokenizer):
    whole = look(Reader(tokenizer, pace=0.001))
    first, second = Reader(tokenizer, pace=0.001, dies_after=7), Reader(tokenizer, pace=0.001)
    scoring.out_dir.rename(scoring.out_dir.with_name("whole"))

    with pytest.raises(KeyboardInterrupt):
        look(first)
    resumed = look(second)

    assert not set(first.asked) & set(second.asked) and len(first.asked) == 7
    assert resumed["cells"] == whole["cells"]
    assert resumed["look"] == whole["look"]


def test_a_greater_budget_adds_to_the_answers(look, scoring, tokenizer):
    first, again, more = (Reader(tokenizer, pace=0.01) for _ in range(3))
    look(first, budget=60.0)
    before = lines(scoring.out_dir / "samples.jsonl")
    same = look(again, budget=60.0)
    longer = look(more, budget=1000.0)

    assert again.asked == [] and same["look"]["questions"] == len(before)
    assert more.asked and not set(more.asked) & set(first.asked)
    assert longer["look"]["questions"] > len(before)
    assert lines(scoring.out_dir / "samples.jsonl")[: len(before)] == before


def test_noise_at_one_length_does_not_end_the_effective_length():
    right, noisy = {"niah": [1.0] * 20}, {"niah": [1.0] * 16 + [0.0] * 4}

    found = relative_effective_length({512: right, 1024: noisy, 2048: right, 4096: {"niah": [0.0] * 20}})

    assert found.value == 2048 and found.low <= 2048 <= found.high < 4096


def test_few_questions_give_a_wide_interval():
    def scores(n):
        return {length: {"niah": [1.0] * (n - n // 4) + [0.0] * (n // 4)} for length in (512, 1024, 2048)}

    few, many = relative_effective_length(scores(4)), relative_effective_length(scores(400))

    assert (few.low, many.low) == (512, 2048)


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10m", 600), ("1.5h", 5400), (" 2 H ", 7200)])
def test_a_budget_is_a_time(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["10", "ten", "-5m", "0s", "1d", "1e9h", ""])
def test_an_invalid_budget_is_refused(text):
    with pytest.raises(ConfigError, match="write for example 90s, 10m or 2h"):
        parse_duration(text)


def test_the_command_ends_in_a_table_a_page_and_a_sentence(tokenizer, monkeypatch, tmp_path, caplog):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mock, "build", lambda options: Reader(tokenizer, reach=256, context=512))
    arguments = ["eval", "asset:tiny-base", "--backend", "oracle", "--samples", "10"]

    with caplog.at_level(logging.INFO):
        shown = CliRunner().invoke(build_app(), arguments, env={"COLUMNS": "120"})
    as_json = CliRunner().invoke(build_app(), [*arguments, "--json"])

    assert shown.exit_code == 0, shown.output
    assert "The effective length of tiny-base is 256 tokens of 512 claimed" in " ".join(shown.stdout.split())
    assert (tmp_path / "scores/tiny-base/look.html").is_file()
    assert "see all numbers with: unspool report scores/tiny-base" in caplog.text
    assert json.loads(as_json.stdout)["look"]["effective_length"]["value"] == 256
    report = CliRunner().invoke(build_app(), ["report", "scores/tiny-base"])
    assert report.exit_code == 0, report.output
    assert "The effective length of tiny-base is 256 tokens of 512 claimed" in report.stdout
    page = (tmp_path / "scores/tiny-base/report.html").read_text(encoding="utf-8")
    assert page.count("The effective length of tiny-base is 256 tokens of 512 claimed") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--value", "words"], "--value needs --suite or --lengths"),
        (["--beyond-context", "skip"], "--beyond-context needs --suite or --lengths"),
        (["--budget", "10m", "--suite", "niah"], "--budget works only without --suite and --lengths"),
        (["--rope", "yarn"], "without --lengths, --rope needs a target context length, such as --context 32K"),
        (["--budget", "10"], "--budget '10' is not a duration"),
    ],
)
def test_options_that_do_not_fit_are_refused(arguments, message):
    shown = CliRunner().invoke(build_app(), ["eval", "asset:tiny-base", "--backend", "oracle", *arguments])

    assert shown.exit_code == 2 and message in shown.stderr


def test_two_models_of_one_name_do_not_share_a_folder(look, scoring, tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    look(Reader(tokenizer, context=256))  # into scores/base, with the model hash "m"

    assert default_folder("base", "m") == scoring.out_dir.relative_to(tmp_path)
    assert default_folder("base", "another model").name == "base-another "
    assert default_folder("new", "m").name == "new"
