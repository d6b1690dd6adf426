"""Suites that consist of tasks, from settings to summary, on a suite made for it."""

import json
import multiprocessing
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from unspool.base.errors import ConfigError, DataError
from unspool.eval import helmet, nocha, questions
from unspool.eval.backends.mock import Adversarial, Empty, Oracle
from unspool.eval.config import HelmetEval, RulerEval
from unspool.eval.grouping import ROW_TOKENS, common_prefix, groups, subset, whole_subset
from unspool.eval.helmet.suite import category_means
from unspool.eval.plan import Plan
from unspool.eval.prompt import prompt_hash
from unspool.eval.questions import Questions, Wanted
from unspool.eval.run import Scoring, score
from unspool.eval.summary import suite_summary, task_cells
from unspool.eval.task import Ask

from .suites import english_tokenizer
from .toy import LABELS, TOY

FILES = ("samples.jsonl", "summary.json", "prompts.jsonl")


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setitem(questions.SUITES, "ruler", TOY)


def entry(**options) -> RulerEval:
    return RulerEval.model_validate({"suite": "ruler", "lengths": [256, 512], "samples": 12, **options})


@pytest.fixture
def scoring(tmp_path: Path) -> Scoring:
    return Scoring(
        model="base", model_hash="m", evals=[entry()], seed=0, out_dir=tmp_path / "scores/base", root=tmp_path
    )


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def cell_of(summary: dict, task: str | None, length: int, depth: float | None = None) -> dict:
    found = [c for c in summary["cells"] if (c["task"], c["length"], c["depth"]) == (task, length, depth)]
    assert len(found) == 1
    return found[0]


def test_an_oracle_scores_100_and_silence_0_with_means_over_tasks(scoring, tokenizer):
    summary = score(scoring, Oracle(tokenizer))
    silent = score(replace(scoring, out_dir=scoring.root / "silent"), Empty(tokenizer))

    for length in (256, 512):
        for task in ("lone", "shared", "labelled"):
            cell = cell_of(summary, task, length)
            assert (cell["value"], cell["n"], cell["mode"]) == (1.0, 12, "fixed")
            assert cell_of(silent, task, length)["value"] == 0.0
        mean = cell_of(summary, None, length)
        assert (mean["value"], mean["n"], mean["tasks"], mean["of_tasks"], mean["not_judged"]) == (1.0, 36, 3, 4, 12)


def test_what_no_judge_has_scored_is_missing_and_not_zero(scoring, tokenizer):
    cell = cell_of(score(scoring, Oracle(tokenizer)), "judged", 256)

    assert (cell["value"], cell["low"], cell["n"], cell["not_judged"]) == (None, None, 0, 12)
    sample = next(one for one in lines(scoring.out_dir / "samples.jsonl") if one["task"] == "judged")
    assert sample["score"] is None
    assert sample["judge"] == {
        "protocol": "qa",
        "question": "What is it about?",
        "references": ["number 0"],
        "key_points": ["number 0"],
    }


def test_graded_scores_get_a_bootstrap_interval(scoring, tokenizer):
    class Half(Oracle):
        def answer(self, prompt, question):
            return super().answer(prompt, question) if "answer1" in question.words.oracle else "something else"

    cell = cell_of(score(scoring, Half(tokenizer)), "shared", 256)

    assert cell["value"] == pytest.approx(0.5 + 0.5 * 3 / 12)
    assert 0.5 <= cell["low"] < cell["value"] < cell["high"] < 0.9


def test_depths_become_rows_of_a_heatmap(scoring, tokenizer):
    summary = score(scoring, Oracle(tokenizer))

    deep = [cell for cell in summary["cells"] if cell["task"] == "lone" and cell["depth"] is not None]
    assert {cell["depth"] for cell in deep} == {0.0, 0.25, 0.5, 0.75, 1.0}
    assert sum(cell["n"] for cell in deep) == 24
    assert not [cell for cell in summary["cells"] if cell["task"] == "labelled" and cell["depth"] is not None]


def test_the_summary_says_how_far_it_holds(scoring, tokenizer):
    class Short(Oracle):
        def answer(self, prompt, question):
            return super().answer(prompt, question) if prompt.length == 256 else ""

    [suite] = score(scoring, Short(tokenizer))["suites"]

    assert suite["effective_length"] == 256
    assert (suite["adaptation_rate"]["value"], suite["adaptation_rate"]["to"]) == (0.0, 512)


def test_prompts_are_listed_by_hash_before_they_are_asked(scoring, tokenizer):
    score(scoring, Oracle(tokenizer))

    listed, samples = (lines(scoring.out_dir / name) for name in ("prompts.jsonl", "samples.jsonl"))
    assert len(listed) == len({line["hash"] for line in listed}) + 24, "labelled and judged prompts know no length"
    assert sorted((s["task"], s["length"], s["index"], s["hash"]) for s in samples) == sorted(
        (line["task"], line["length"], line["index"], line["hash"]) for line in listed
    )
    assert all(line["prompt_tokens"] + line["answer_tokens"] <= line["length"] for line in listed)


def test_questions_on_one_context_are_asked_together(scoring, tokenizer):
    asked = []

    class Watched(Oracle):
        def answers(self, prompt):
            asked.append((prompt.suite, prompt.length, len(prompt.context_ids), len(prompt.questions)))
            return super().answers(prompt)

    score(replace(scoring, evals=[entry(tasks=["shared"])]), Watched(tokenizer))

    assert [questions for _, _, _, questions in asked] == [4] * 6
    assert all(shared > 20 for _, _, shared, _ in asked)
    assert [length for _, length, _, _ in asked] == [256] * 3 + [512] * 3


def test_short_prompts_share_a_row_without_a_context(scoring, tokenizer):
    plan = Plan([entry(tasks=["lone"])], tokenizer, seed=0, root=Path())
    plan.arrange(list(plan.listing()))
    prompt = plan.prompt(plan.units[0])

    assert len(prompt.context_ids) == 0 and len(prompt.questions) == plan.units[0].num_samples == 12
    assert [prompt_hash(question.ids) for question in prompt.questions] == list(plan.units[0].hashes)


def test_base_prompts_are_the_ids_of_the_joined_text(tokenizer):
    made = Questions(entry(), tokenizer, seed=0, root=Path())
    wanted = Wanted(task="lone", length=256, index=3)
    asked, prompt = made.asked(wanted), made.prompt([wanted])

    ids = [*prompt.context_ids.tolist(), *prompt.questions[0].ids.tolist()]
    assert ids == tokenizer(asked.context + asked.question + asked.prefix)["input_ids"]
    assert made.chat == {"lone": False, "shared": False, "labelled": False, "judged": False}


@pytest.fixture
def chatty(tokenizer):
    template = "{% for m in messages %}<begin>{{ m.role }}\n{{ m.content | trim }}<end>\n{% endfor %}<begin>assistant\n"
    copy = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<end>", bos_token="<begin>")
    copy.chat_template = template
    return copy


def test_chat_prompts_are_those_of_the_template_with_the_answer_begun(chatty):
    made = Questions(entry(), chatty, seed=0, root=Path())
    wanted = Wanted(task="lone", length=256, index=3)
    asked, line = made.asked(wanted), made.line(wanted)
    prompt = made.prompt([wanted])

    turns = [{"role": "user", "content": asked.context + asked.question}]
    text = chatty.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) + asked.prefix
    ids = [*prompt.context_ids.tolist(), *prompt.questions[0].ids.tolist()]
    assert ids == chatty(text, add_special_tokens=False)["input_ids"]
    assert made.chat == {"lone": True, "shared": False, "labelled": False, "judged": False}
    assert line["prompt_tokens"] + 8 <= 256


def test_a_text_that_spells_a_control_token_is_only_text(chatty):
    made = Questions(entry(chat="on", tasks=["labelled"]), chatty, seed=0, root=Path())
    asked = replace(made.asked(Wanted(task="labelled", length=256, index=0)), context="It is <end> now.")

    ids = made.asker.ids(asked, chat=True).tolist()

    assert ids.count(chatty.eos_token_id) == 1, "the template's own"


def test_chat_can_be_turned_off_and_needs_a_template_to_be_on(tokenizer, chatty):
    assert not any(Questions(entry(chat="off"), chatty, seed=0, root=Path()).chat.values())
    assert all(Questions(entry(chat="on"), chatty, seed=0, root=Path()).chat.values())
    with pytest.raises(ConfigError, match="has no chat template; use chat: off"):
        Questions(entry(chat="on"), tokenizer, seed=0, root=Path())


def test_room_for_answers_is_taken_off_the_length(tokenizer):
    own = Questions(entry(tasks=["lone"]), tokenizer, seed=0, root=Path())
    more = Questions(entry(tasks=["lone"], answer_tokens=100), tokenizer, seed=0, root=Path())
    wanted = Wanted(task="lone", length=512, index=0)

    assert own.line(wanted)["prompt_tokens"] - more.line(wanted)["prompt_tokens"] > 30
    assert more.prompt([wanted]).answer_tokens == 100


def test_a_task_that_exceeds_its_length_is_stopped(tokenizer, monkeypatch):
    long = replace(
        TOY.tasks["lone"], build=lambda sources, ask: TOY.tasks["lone"].build(sources, replace(ask, length=4000))
    )
    monkeypatch.setitem(questions.SUITES, "ruler", replace(TOY, tasks={"lone": long}))

    with pytest.raises(DataError, match=r"ruler lone: question 0 takes \d+ tokens of 256"):
        Plan([entry()], tokenizer, seed=0, root=Path()).check()


def test_unknown_tasks_and_doubled_ones_are_refused(scoring, tokenizer):
    with pytest.raises(ConfigError, match=r"task of ruler 'lon' is not known\. Did you mean 'lone'"):
        score(replace(scoring, evals=[entry(tasks=["lon"])]), Oracle(tokenizer))
    with pytest.raises(ConfigError, match=r"suite ruler \(lone\) at length 256 is asked for twice"):
        score(replace(scoring, evals=[entry(), entry(tasks=["lone"])]), Oracle(tokenizer))


def test_a_length_that_cannot_work_is_found_before_the_model_is_used(scoring, tokenizer):
    with pytest.raises(ConfigError, match="toy: too short"):
        score(replace(scoring, evals=[entry(lengths=[32])]), Oracle(tokenizer))


def test_subsets_take_equally_many_of_every_stratum():
    strata = [LABELS[at % 3] for at in range(30)]
    chosen = subset(strata, 12, seed=0)

    assert chosen == sorted(set(chosen)) and [sum(strata[at] == label for at in chosen) for label in LABELS] == [4] * 3
    assert subset(strata, 12, seed=0) == chosen != subset(strata, 12, seed=1)
    assert subset(strata, 99, seed=0) == list(range(30))
    # Every sixth item of a set with six depths in turn would have one depth only.
    assert len({at % 6 for at in subset([at % 6 for at in range(600)], 100, seed=0)}) == 6


def test_groups_keep_every_question_once():
    contexts = ["a", "b", "a", "c", "d", "a"]
    found = groups(contexts, [9000, 100, 9000, 9000, 100, 9000])

    assert found == [[0, 2, 5], [1, 4], [3]]
    assert all(len(row) <= 16 for row in groups([str(at) for at in range(100)], [10] * 100))
    assert all(600 * len(row) <= ROW_TOKENS for row in groups([str(at) for at in range(100)], [600] * 100))
    assert groups(list("abc"), [8000] * 3) == [[0], [1], [2]]
    assert groups(list("abc"), [8000] * 3, 1 << 16) == [[0, 1, 2]], "longer rows take longer prompts"


def test_a_common_prefix_leaves_something_to_ask():
    rows = [np.array([1, 2, 3, 4]), np.array([1, 2, 3]), np.array([1, 2, 9, 9])]

    assert common_prefix(rows) == 2
    assert common_prefix(rows[:2]) == 2
    assert common_prefix(rows[:1]) == 3


def test_answers_that_break_lines_do_not_break_the_files(scoring, tokenizer):
    score(scoring, Adversarial(tokenizer))

    samples = lines(scoring.out_dir / "samples.jsonl")
    assert len(samples) == 96
    assert "\u2028" in samples[0]["output"] and "\x1b" not in (scoring.out_dir / "samples.jsonl").read_text()


class Slow(Oracle):
    def answers(self, prompt):
        time.sleep(0.01)
        return super().answers(prompt)


def _run(scoring: Scoring, tokenizer) -> None:
    score(scoring, Slow(tokenizer))


def _written(folder: Path) -> int:
    try:
        return sum(path.stat().st_size for path in folder.glob("*.jsonl"))
    except FileNotFoundError:  # the folder was published just now
        return 1 << 60


def test_killed_at_ten_moments_the_results_equal_the_uninterrupted_ones(scoring, tokenizer):
    whole = replace(scoring, out_dir=scoring.root / "whole")
    score(whole, Oracle(tokenizer))
    fork = multiprocessing.get_context("fork")
    rng = random.Random(0)
    kills = 0
    for trial in range(10):
        killed = replace(scoring, out_dir=scoring.root / f"killed{trial}")
        work = killed.out_dir.with_name(killed.out_dir.name + ".work")
        moment = rng.uniform(0, 0.95) * _written(whole.out_dir)
        child = fork.Process(target=_run, args=(killed, tokenizer))
        child.start()
        while child.exitcode is None and _written(work) < moment:
            time.sleep(0.001)
        if child.exitcode is None:
            os.kill(child.pid, signal.SIGKILL)
            kills += 1
        child.join()
        score(killed, Oracle(tokenizer))
        for name in FILES:
            assert (killed.out_dir / name).read_bytes() == (whole.out_dir / name).read_bytes()
    assert kills >= 5, "the runs were over before they could be killed"


def test_work_is_counted_in_tokens(scoring, tokenizer, monkeypatch):
    from contextlib import contextmanager

    from unspool.eval import run

    bars = {}

    @contextmanager
    def bar(label, total):
        bars[label] = [total]
        yield lambda amount, note="": bars[label].append(amount)

    monkeypatch.setattr(run, "progress_bar", bar)
    score(replace(scoring, evals=[entry(tasks=["shared"])]), Oracle(tokenizer))

    total, *steps = bars["score base"]
    # A context that is shared is read once.
    assert total == sum(steps) == 3 * 256 + 3 * 512


def test_a_backend_that_takes_blocks_gives_the_same_files(scoring, tokenizer):
    class Engine(Oracle):
        block = 5
        calls = 0

        def answers_all(self, prompts):
            Engine.calls += 1
            return [self.answers(prompt) for prompt in prompts]

    score(scoring, Oracle(tokenizer))
    other = replace(scoring, out_dir=scoring.root / "other")
    score(other, Engine(tokenizer))

    assert 1 < Engine.calls < 20
    assert (scoring.out_dir / "samples.jsonl").read_bytes() == (other.out_dir / "samples.jsonl").read_bytes()


def test_a_server_that_answers_many_at_a_time_gives_the_same_files(scoring, tokenizer):
    class Wide(Oracle):
        width = 4

        def answers(self, prompt):
            time.sleep(0.005 * (prompt.index % 3))
            return super().answers(prompt)

    score(scoring, Oracle(tokenizer))
    other = replace(scoring, out_dir=scoring.root / "other")
    score(other, Wide(tokenizer))

    assert (scoring.out_dir / "samples.jsonl").read_bytes() == (other.out_dir / "samples.jsonl").read_bytes()


def test_questions_in_pairs_also_count_as_pairs(scoring, tokenizer, monkeypatch):
    lone = TOY.tasks["lone"]

    def paired(sources, ask):
        return replace(lone.build(sources, ask), meta={"pair": ask.index // 2})

    monkeypatch.setitem(questions.SUITES, "ruler", replace(TOY, tasks={"lone": replace(lone, build=paired)}))

    class Odd(Oracle):
        def answer(self, prompt, question):
            number = int(question.reference) - 1000
            return super().answer(prompt, question) if number % 2 or number < 4 else ""

    summary = score(scoring, Odd(tokenizer))

    assert cell_of(summary, "lone", 256)["value"] == pytest.approx(8 / 12)
    pairs = cell_of(summary, "lone, pairs", 256)
    assert (pairs["value"], pairs["n"], pairs["metric"]) == (pytest.approx(2 / 6), 6, "pair accuracy")
    assert cell_of(summary, None, 256)["value"] == pytest.approx(8 / 12), "pairs are no task of their own"


def test_what_belongs_together_is_asked_whole_or_not_at_all(scoring, tokenizer, monkeypatch):
    labelled = TOY.tasks["labelled"]
    pairs = replace(labelled, together=2, stratum=None)
    endless = replace(TOY.tasks["lone"], together=3)
    monkeypatch.setitem(questions.SUITES, "ruler", replace(TOY, tasks={"labelled": pairs, "lone": endless}))

    for samples, expected in ((1, 2), (7, 6), (29, 28), (100, 30)):
        asked = Questions(entry(samples=samples, lengths=[256]), tokenizer, seed=5, root=Path())
        indices = [wanted.index for wanted in asked.wanted if wanted.task == "labelled"]
        assert len(indices) == expected
        assert all(at ^ 1 in indices for at in indices), "a pair was split"
    assert len([wanted for wanted in asked.wanted if wanted.task == "lone"]) == 99
    assert whole_subset(LABELS * 4, 5, 0, together=1) == subset(LABELS * 4, 5, 0)
    firsts = whole_subset(["a", "x", "b", "x"] * 5, 8, 0, together=2)
    assert [index % 4 // 2 for index in firsts[::2]].count(0) == 2, "strata are those of the first of each pair"


def test_real_pairs_of_claims_are_never_split(english_sources):
    task, sources = english_sources
    size = task.size(sources)

    for samples in (2, 49, 50, 51, size - 1):
        indices = whole_subset([None] * size, samples, 0, together=task.together)
        assert len(indices) == samples // 2 * 2
        pairs = [task.build(sources, Ask(length=1024, seed=0, index=at)).meta["pair"] for at in indices[:6]]
        assert pairs == [pair for pair in pairs[::2] for _ in range(2)]


@pytest.fixture
def english_sources():
    return nocha.SUITE.tasks["claims"], nocha.SUITE.load(english_tokenizer(), {})


def test_a_mean_gives_every_task_the_same_weight(scoring, tokenizer):
    """Six hundred right answers of one task do not drown twelve wrong ones of another."""

    class LoneOnly(Oracle):
        def answer(self, prompt, question):
            return super().answer(prompt, question) if "number" in question.words.asked.question else ""

    config = entry(tasks=["lone", "labelled"], samples=40)
    summary = score(replace(scoring, evals=[config]), LoneOnly(tokenizer))
    mean = cell_of(summary, None, 256)

    assert (cell_of(summary, "lone", 256)["n"], cell_of(summary, "labelled", 256)["n"]) == (40, 30)
    assert mean["value"] == 0.5 and mean["n"] == 70 and (mean["tasks"], mean["of_tasks"]) == (2, 4)
    half = [cell_of(summary, task, 256)["high"] - cell_of(summary, task, 256)["value"] for task in ("lone", "labelled")]
    assert mean["high"] == pytest.approx(0.5 + (half[0] ** 2 + half[1] ** 2) ** 0.5 / 2)
    [suite] = summary["suites"]
    assert [(one["length"], one["name"], one["value"], one["n"]) for one in suite["means"]] == [
        (256, "mean", 0.5, 70),
        (512, "mean", 0.5, 70),
    ]
    assert suite["adaptation_rate"]["value"] == 1.0


CATEGORIES = {"first": ("lone", "shared"), "second": ("labelled",)}


def test_categories_are_means_of_their_tasks_and_the_whole_is_their_mean(scoring, tokenizer, monkeypatch):
    monkeypatch.setitem(questions.SUITES, "ruler", replace(TOY, categories=CATEGORIES))

    class NoLabels(Oracle):
        def answer(self, prompt, question):
            return "" if "colour" in question.words.asked.question else super().answer(prompt, question)

    [suite] = score(replace(scoring, evals=[entry(lengths=[256])]), NoLabels(tokenizer))["suites"]
    means = {one["name"]: one for one in suite["means"]}

    assert (means["first"]["value"], means["second"]["value"]) == (1.0, 0.0)
    assert means["overall"]["value"] == 0.5, "of categories"
    assert means["mean"]["value"] == pytest.approx(2 / 3), "of tasks"
    assert (means["overall"]["categories"], means["overall"]["n"]) == (2, 36)
    assert suite["effective_length_of"] == "overall"


def test_a_category_without_one_of_its_tasks_is_missing_and_so_is_the_whole(scoring, tokenizer, monkeypatch):
    categories = {**CATEGORIES, "third": ("judged",)}
    monkeypatch.setitem(questions.SUITES, "ruler", replace(TOY, categories=categories))

    found = score(replace(scoring, evals=[entry(tasks=["lone", "judged"], lengths=[256])]), Oracle(tokenizer))
    [suite] = found["suites"]
    means = {one["name"]: one for one in suite["means"]}

    assert [means[name]["value"] for name in ("mean", "first", "second", "third", "overall")] == [1.0, *[None] * 4]
    assert [(means[name]["tasks"], means[name]["of_tasks"]) for name in categories] == [(1, 2), (0, 1), (0, 1)]
    assert (means["overall"]["categories"], means["overall"]["of_categories"], means["overall"]["n"]) == (0, 3, 0)
    assert (suite["effective_length"], suite["effective_length_of"]) == (256, "mean")


def test_helmets_means_are_those_of_its_own_function():
    tasks = {task: at / 20 for at, task in enumerate(helmet.SUITE.tasks)}
    config = HelmetEval(suite="helmet", lengths=[8192])
    samples = [
        {"suite": "helmet", "length": 8192, "task": task, "depth": None, "score": value}
        for task, value in tasks.items()
        for _ in range(2)
    ]
    cells = task_cells(config, list(helmet.SUITE.tasks.values()), samples)

    found = {one["name"]: one["value"] for one in suite_summary(config, helmet.SUITE, cells, samples)["means"]}

    for name, value in category_means(tasks).items():
        assert found[name] == pytest.approx(value)
    assert found["mean"] != pytest.approx(found["overall"]), "nothing would be told apart"
