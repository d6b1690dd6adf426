"""Words of a user's own: they reach every prompt, are checked whole, and never mix with others."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError
from tests.evals.suites import english_tokenizer, num_tokens, oracle
from transformers import PreTrainedTokenizerFast

from unspool.core.errors import ConfigError
from unspool.evals.backends.mock import Oracle
from unspool.evals.heldout import PlanInputs
from unspool.evals.run import Scoring, score
from unspool.evals.suite import Ask, QuestionId
from unspool.evals.suites import helmet, lveval, nocha, ruler
from unspool.evals.suites.nocha import NochaEval
from unspool.evals.suites.ruler import RulerEval
from unspool.evals.task_suite import TaskSuite
from unspool.evals.wording import Wording, literal, read_wording, said_before

SUITES = {"ruler": ruler.SUITE, "helmet": helmet.SUITE, "lveval": lveval.SUITE}
TRACING = {
    "template": "Watch the variables.\n\n{context}\nNow {{think}}: who holds {query}?",
    "answer_prefix": " These {num_v} do: ",
    "noise": "Rain fell.",
    "answer_tokens": 40,
}


@pytest.fixture(scope="module")
def english() -> PreTrainedTokenizerFast:
    return english_tokenizer()


def written(path: Path, suite: str, tasks: dict) -> str:
    path.write_text(yaml.safe_dump({"suite": suite, "tasks": tasks}))
    return str(path)


def marked(suite: TaskSuite) -> dict[str, dict[str, str]]:
    """Our own words with a mark before each text that tells where it came from."""
    return {
        task: {name: f"<{name}> " + text.own for name, text in form.items() if name not in ("passage", "answer_prefix")}
        for task, form in suite.wording.items()
    }


@pytest.mark.parametrize("suite", SUITES.values(), ids=list(SUITES))
def test_every_task_has_a_form(suite: TaskSuite):
    assert suite.wording.keys() == suite.tasks.keys()
    for form in suite.wording.values():
        assert {"template", "answer_prefix"} <= form.keys()


def test_our_own_words_in_a_file_give_our_own_prompts(tmp_path: Path, english):
    for suite in SUITES.values():
        own = {task: {name: text.own for name, text in form.items()} for task, form in suite.wording.items()}
        wording = read_wording(written(tmp_path / "own.yaml", suite.name, own), suite.name, suite.wording)
        for task, form in suite.wording.items():
            assert {name: wording.text(task, name) for name in form} == own[task], "YAML keeps every space and line"
    task, ask = lveval.SUITE.tasks["factrecall_zh"], Ask(length=2048, seed=1, index=3)
    plain, given = lveval.SUITE.load(english, {}), lveval.SUITE.load(english, {}, wording)
    assert task.build(given, ask) == task.build(plain, ask)


@pytest.mark.parametrize("mode", ["fixed", "reference"])
@pytest.mark.parametrize("suite", SUITES.values(), ids=list(SUITES))
def test_other_words_reach_every_prompt_and_break_none(suite: TaskSuite, mode, tmp_path: Path, english):
    path = written(tmp_path / "marked.yaml", suite.name, marked(suite))
    sources = suite.load(english, {}, read_wording(path, suite.name, suite.wording))

    for name, task in suite.tasks.items():
        asked = task.build(sources, Ask(length=8192, seed=3, index=1, mode=mode))
        text = asked.context + asked.question + asked.prefix
        assert "<template> " in text
        for part in ("demo", "needle", "noise", "document"):
            if part in suite.wording[name]:
                assert f"<{part}> " in text, (name, part)
        assert num_tokens(english, task, asked) <= 8192
        assert task.score(oracle(asked), asked) in (pytest.approx(1), None), name


def test_passages_follow_the_wording_file(tmp_path: Path, english):
    form = {"passage": "#{id}# {title} -- {text}"}
    tasks = {"asqa": form, "msmarco": {**form, "passage_untitled": "#{id}# {text}"}, "nq": {"passage": "* {text}"}}
    sources = helmet.SUITE.load(
        english, {}, read_wording(written(tmp_path / "w.yaml", "helmet", tasks), "helmet", helmet.SUITE.wording)
    )
    asqa, msmarco, nq = (
        helmet.SUITE.tasks[task].build(sources, Ask(length=8192, seed=0, index=0)) for task in ("asqa", "msmarco", "nq")
    )

    shown = asqa.context.rsplit("Question:", 1)[1]
    assert [f"#{number}# " in shown for number in (1, 2, 1000)] == [True, True, False]
    assert asqa.meta["documents"][0].startswith("Title: ") and " -- " not in asqa.meta["documents"][0]
    ids = msmarco.meta["relevance"]
    assert len(ids) > 5 and all(f"#{number}# " in msmarco.context for number in ids)
    assert "\n\n* " in nq.context and "Document (Title" not in nq.context


def test_a_file_names_its_words_its_tokens_and_nothing_else_changes(tmp_path: Path, english):
    path = written(tmp_path / "w.yaml", "ruler", {"vt": TRACING})
    entry = RulerEval(suite="ruler", lengths=[2048], samples=2, tasks=["vt", "cwe"])
    inputs = PlanInputs(tokenizer=english, seed=0, root=tmp_path)
    plain, given = (ruler.SUITE.plan(one, inputs) for one in (entry, entry.model_copy(update={"wording": path})))
    vt, cwe = (QuestionId(task=task, length=2048, index=1) for task in ("vt", "cwe"))

    asked = given.question(vt)
    assert asked.question.startswith("Now {think}: who holds ") and asked.prefix == " These 5 do:", "fixed trims"
    assert "Rain fell." in asked.context and "The lake is calm" not in asked.context
    line = given.prompt_line(vt)
    assert line["answer_tokens"] == 40 and 0.99 * 2048 <= line["prompt_tokens"] + 40 <= 2048
    assert given.wording is not None and line["wording"] == given.wording.hash
    assert given.prompt_line(cwe)["hash"] == plain.prompt_line(cwe)["hash"] and "wording" not in plain.prompt_line(cwe)


def test_reference_keeps_the_space_that_a_prefix_ends_in(tmp_path: Path, english):
    wording = read_wording(written(tmp_path / "w.yaml", "ruler", {"vt": TRACING}), "ruler", ruler.SUITE.wording)
    sources = ruler.SUITE.load(english, {}, wording)

    asked = ruler.SUITE.tasks["vt"].build(sources, Ask(length=2048, seed=0, index=0, mode="reference"))

    assert asked.prefix == " These 5 do: "


def test_results_with_different_words_are_not_mixed(tmp_path: Path, english):
    path = tmp_path / "w.yaml"
    entry = RulerEval(suite="ruler", lengths=[1024], samples=2, tasks=["vt"], wording="w.yaml")
    scoring = Scoring(model="m", model_hash="m", evals=[entry], seed=0, out_dir=tmp_path / "scores", root=tmp_path)
    built = []

    class Counting(Oracle):
        def answers(self, prompt):
            built.append(prompt)
            return super().answers(prompt)

    written(path, "ruler", {"vt": TRACING})
    first = score(scoring, Counting(english))
    samples = [json.loads(line) for line in (scoring.out_dir / "samples.jsonl").read_text().splitlines()]
    path.write_text("# a remark changes nothing\n" + path.read_text())
    assert score(scoring, Counting(english)) == first and len(built) == 1
    written(path, "ruler", {"vt": {**TRACING, "noise": "Snow fell."}})
    second = score(scoring, Counting(english))

    assert len(built) == 2
    hashes = [summary["suites"][0]["wording"] for summary in (first, second)]
    assert None not in hashes and hashes[0] != hashes[1]
    assert {sample["wording"] for sample in samples} == {hashes[0]}
    plain = score(replace(scoring, evals=[entry.model_copy(update={"wording": None})]), Counting(english))
    assert plain["suites"][0]["wording"] is None


@pytest.mark.parametrize(
    ("content", "messages"),
    [
        ("{", ["cannot be read as YAML or JSON"]),
        ("- a", ["it needs the keys suite .a name. and tasks"]),
        ("suite: ruler\ntasks: {}", ["it needs the keys suite .a name. and tasks"]),
        ("suite: helmet\ntasks: {vt: {template: x}}", ["it is for suite 'helmet' instead of ruler"]),
        ("suite: ruler\ntask: 1\ntasks: {vt: {noise: x}}", ["'task' is not a known key; the keys are suite and tasks"]),
        ("suite: ruler\ntasks: {vtt: {noise: x}}", ["vtt: ruler has no such task .did you mean 'vt'?"]),
        ("suite: ruler\ntasks: {vt: hello}", ["vt: add its texts"]),
        ("suite: ruler\ntasks: {vt: {templat: x}}", ["vt, templat: .*did you mean 'template'?", "it has template"]),
        ("suite: ruler\ntasks: {vt: {template: 3}}", ["vt, template: must be text, but is 3"]),
        ("suite: ruler\ntasks: {vt: {template: 'who? {query}'}}", [r"vt, template: \{context\} is missing"]),
        ("suite: ruler\ntasks: {vt: {template: '{context}{context}{query}'}}", [r"\{context\} must occur once"]),
        ("suite: ruler\ntasks: {vt: {template: '{context} {quary}'}}", ["did you mean 'query'", "{query} is missing"]),
        (
            "suite: ruler\ntasks: {vt: {template: '{context.__class__} {query}'}}",
            [r"\{context.__class__\} is not known"],
        ),
        ("suite: ruler\ntasks: {vt: {template: '{context!r} {query}'}}", ["plain names in braces"]),
        ("suite: ruler\ntasks: {vt: {template: '{context {query}'}}", ["braces"]),
        ("suite: ruler\ntasks: {vt: {answer_tokens: 0}}", ["vt, answer_tokens: must be a whole number"]),
        (
            "suite: ruler\ntasks: {vt: {answer_tokens: true}}",
            ["must be a whole number of tokens, at least 1, but is True"],
        ),
    ],
)
def test_a_broken_file_is_refused_with_everything_that_is_wrong(content, messages, tmp_path: Path):
    path = tmp_path / "w.yaml"
    path.write_text(content)

    for message in messages:
        with pytest.raises(
            ConfigError, match=message.replace("?", r"\?").replace("{q", r"\{q").replace("y} is", r"y\} is")
        ):
            read_wording(str(path), "ruler", ruler.SUITE.wording)


def test_all_mistakes_are_reported_together(tmp_path: Path):
    path = written(tmp_path / "w.yaml", "helmet", {"nqq": {"demo": "x"}, "msmarco": {"passage": "{text} {id}"}})

    with pytest.raises(ConfigError) as refused:
        read_wording(path, "helmet", helmet.SUITE.wording)

    assert "2 mistakes" in str(refused.value)
    assert "nqq: helmet has no such task (did you mean 'nq'?)" in str(refused.value)
    assert "msmarco, passage: {id} must be the first placeholder" in str(refused.value)


def test_a_suite_without_texts_and_a_file_that_is_not_there_are_refused(tmp_path: Path):
    with pytest.raises(ValidationError, match="wording"):
        NochaEval.model_validate({"suite": "nocha", "lengths": [1024], "wording": "w.yaml"})
    with pytest.raises(ConfigError, match="suite nocha has no replaceable texts"):
        read_wording("w.yaml", "nocha", nocha.SUITE.wording)
    with pytest.raises(ConfigError, match="no such file"):
        read_wording(str(tmp_path / "none.yaml"), "ruler", ruler.SUITE.wording)


def test_braces_of_a_text_stay_braces():
    assert literal("{a} b").format() == "{a} b"
    assert said_before("x {{y}} {id} z", "id") == "x {y} "
    wording = Wording(forms=lveval.SUITE.wording, given={"lic_mixup": {"template": "{{a}} {context} {{b}} {input}"}})
    assert wording.around("lic_mixup", input="{c}") == ("{a} ", " {b} {c}")


def test_json_is_read_as_well(tmp_path: Path):
    path = tmp_path / "w.json"
    path.write_text(json.dumps({"suite": "ruler", "tasks": {"vt": TRACING}}))

    found = read_wording(str(path), "ruler", ruler.SUITE.wording)

    assert found.answer_tokens == {"vt": 40} and found.text("vt", "noise") == "Rain fell."


EXAMPLE = r"""
suite: ruler
tasks:
  vt:
    template: "Follow the variables.\n\n{context}\nQuestion: Which of them are {query}?"
    answer_prefix: " Answer: These {num_v} are:"
    answer_tokens: 30
  niah_single_1: &one
    template: "A magic {type_needle_v} hides here.\n{context}\nWhat is the magic {type_needle_v} of {query}?"
    answer_prefix: " It is"
    needle: "The magic {type} of {key} is {value}."
  niah_single_2: *one
"""


def test_templates_of_a_file_with_anchors_reach_the_prompts(tmp_path: Path, english):
    path = tmp_path / "ruler.yaml"
    path.write_text(EXAMPLE)

    wording = read_wording(str(path), "ruler", ruler.SUITE.wording)
    sources = ruler.SUITE.load(english, {}, wording)
    asked = ruler.SUITE.tasks["niah_single_2"].build(sources, Ask(length=2048, seed=0, index=0))

    assert asked.context.startswith("A magic number hides here.\n") and asked.prefix == " It is"
    assert f"The magic number of {asked.meta['keys'][0]} is {asked.references[0]}." in asked.context
