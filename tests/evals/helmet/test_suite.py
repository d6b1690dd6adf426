"""Every task of HELMET on generated data: length, oracle, empty output, depths, the same prompts everywhere."""

import os
import subprocess
import sys

import numpy as np
import pytest
from pydantic import ValidationError
from tests.evals.suites import byte_tokenizer, category_means, num_tokens, oracle, prompts_digest
from transformers import PreTrainedTokenizerFast

from unspool.core.errors import ConfigError
from unspool.evals import fill
from unspool.evals.suite import Ask
from unspool.evals.suites.helmet import books, icl, json_kv, rag
from unspool.evals.suites.helmet.data import Sources
from unspool.evals.suites.helmet.suite import CATEGORIES, SUITE, HelmetEval
from unspool.evals.suites.short_suite import chosen_tasks

# A summary of 1200 tokens does not fit into 1K.
SHORTEST = {"infbench_sum": 2048}


@pytest.fixture(scope="module")
def sources(tokenizer: PreTrainedTokenizerFast) -> Sources:
    loaded: Sources = SUITE.load(tokenizer, {})
    return loaded


@pytest.mark.parametrize("length", [1024, 8192, pytest.param(65536, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", list(SUITE.tasks))
def test_prompts_fill_the_length_and_an_oracle_gets_all_of_it(
    name: str, length: int, sources: Sources, tokenizer: PreTrainedTokenizerFast
):
    task = SUITE.tasks[name]
    length = max(length, SHORTEST.get(name, 0))
    for index in range(2):
        asked = task.build(sources, Ask(length=length, seed=3, index=index, overhead=5))
        used = num_tokens(tokenizer, task, asked) + 5
        assert 0.99 * length <= used <= length
        assert asked.meta["generated"] is True
        wanted = (None, None) if task.judge else (1.0, 0.0)
        assert (task.score(oracle(asked), asked), task.score("", asked)) == wanted


def test_the_categories_name_every_task_once():
    named = [task for tasks in CATEGORIES.values() for task in tasks]
    assert len(CATEGORIES) == 7
    assert set(SUITE.tasks) == set(named)
    assert len(named) == len(set(named)) == 21


def test_a_category_that_lacks_a_task_is_unknown_and_so_is_the_whole():
    means: dict[str, float | None] = {task: 0.5 for tasks in CATEGORIES.values() for task in tasks}
    means["msmarco"] = 1.0
    assert category_means(means)["rerank"] == 1
    assert category_means(means)["overall"] == pytest.approx((6 * 0.5 + 1) / 7)  # of categories, not of tasks
    found = category_means({**means, "narrativeqa": None})
    assert (found["longqa"], found["overall"], found["rag"]) == (None, None, 0.5)


def test_a_length_that_cannot_work_is_refused_in_a_sentence(sources: Sources):
    for name, task in SUITE.tasks.items():
        for length in (1, 64, task.answer_tokens):
            # The needle tasks speak as RULER does.
            said = rf"helmet {name}: length {length} is too short.*needs \d+ tokens" if "niah" not in name else name
            with pytest.raises(ConfigError, match=said):
                task.build(sources, Ask(length=length, seed=0, index=0))


def test_a_path_that_no_task_knows_is_refused(tokenizer: PreTrainedTokenizerFast):
    with pytest.raises(ConfigError, match="Did you mean 'nq_passages'"):
        SUITE.load(tokenizer, {"nq_passage": "x"})


@pytest.mark.parametrize("name", ["nq", "json_kv"])
def test_depths_of_consecutive_indices_cover_the_context_evenly(name: str, sources: Sources):
    depths = [
        SUITE.tasks[name].build(sources, Ask(length=8192, seed=0, index=index)).depth or 0.0 for index in range(20)
    ]
    assert np.histogram(depths, bins=4, range=(0, 1))[0].min() >= 3


def test_the_depth_is_the_position_of_the_passage(sources: Sources):
    for index in range(6):
        asked = SUITE.tasks["nq"].build(sources, Ask(length=8192, seed=0, index=index))
        passages = asked.context.rsplit("Answer: ", 1)[1].split("\n\n", 1)[1]
        found = passages.find(asked.references[0]) / len(passages)
        assert found == pytest.approx(asked.depth, abs=0.06)


def test_no_distractor_answers_the_question(sources: Sources):
    asked = SUITE.tasks["nq"].build(sources, Ask(length=8192, seed=0, index=1))
    assert asked.context.count(f"(Title: {asked.meta['question'].split(' found')[0].split()[-1]}") <= 1
    own = [passage for passage in asked.context.split("\n\n") if asked.references[0] in passage]
    assert len(own) == 1


def test_reference_mode_takes_helmets_numbers_and_depths(sources: Sources):
    depths = [
        SUITE.tasks["nq"].build(sources, Ask(length=16384, seed=0, index=index, mode="reference")) for index in range(6)
    ]
    assert len({asked.meta["id"] for asked in depths}) == 1
    assert [round(asked.depth or 0, 1) for asked in depths] == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert depths[0].context.count("Document (Title") == 105 + 2 * 3
    shown = SUITE.tasks["banking77"].build(sources, Ask(length=16384, seed=0, index=0, mode="reference"))
    named = dict(zip(icl.LENGTHS, icl.COUNTS["banking77"], strict=True))
    assert [rag.table_count(named, length) for length in (2048, 16384, 131072, 262144)] == [90, 720, 5900, 11800]
    assert shown.meta["shots"] <= 720  # as many as fit, the end cut off
    keys = SUITE.tasks["json_kv"].build(sources, Ask(length=16384, seed=0, index=0, mode="reference"))
    assert keys.meta["keys"] <= 220


def test_labels_are_reshuffled_for_every_question_and_balanced(sources: Sources):
    def shown(index: int) -> dict[str, list[str]]:
        asked = SUITE.tasks["trec_coarse"].build(sources, Ask(length=4096, seed=0, index=index))
        found: dict[str, list[str]] = {}
        for pair in asked.context.split("\n\n")[1:]:
            text, label = pair.rsplit("\nlabel: ", 1)
            found.setdefault(label, []).append(text)
        return found

    first, second = shown(0), shown(1)
    counts = [len(texts) for texts in first.values()]
    assert set(first) == {str(label) for label in range(6)}
    assert max(counts) <= 1.3 * min(counts) + 2
    moved = [label for label in first if not set(first[label]) & set(second[label])]
    assert moved, "every label kept its sentences, so labels were not reshuffled"


def test_the_right_label_is_shown_even_if_labels_outnumber_examples(sources: Sources):
    for index in range(5):
        asked = SUITE.tasks["clinc150"].build(sources, Ask(length=1024, seed=0, index=index))
        assert asked.meta["shots"] < 151
        assert f"\nlabel:{asked.references[0]}\n" in asked.context + "\n"


def test_balancing_is_helmets_own():
    # From HELMET's load_icl on the same pairs, count and seed.
    data = [(f"t{number}", f"l{number % 3}") for number in range(9)]
    assert icl.balance(data, 4, 7) == icl.balance(data, 4, 7)
    assert sorted(label for _, label in icl.balance(data, 6, 7)) == ["l0", "l0", "l1", "l1", "l2", "l2"]
    assert len(icl.balance(data, 40, 7)) == 40  # more than there are: they come again


def test_generation_beyond_the_first_line_counts_only_in_reference_mode(sources: Sources):
    fixed, reference = (
        SUITE.tasks["nq"].build(sources, Ask(length=2048, seed=0, index=0, mode=mode))
        for mode in ("fixed", "reference")
    )
    for asked, wanted in ((fixed, 0.0), (reference, 1.0)):
        assert rag.score(f" nothing\n{asked.references[0]}", asked) == wanted
        assert rag.score(f" {asked.references[0]}\nmore", asked) == 1


def test_an_empty_choice_is_right_where_the_answer_is_a_only_in_reference_mode(sources: Sources):
    for mode, wanted in (("reference", 1.0), ("fixed", 0.0)):
        found = [
            SUITE.tasks["infbench_mc"].build(sources, Ask(length=1024, seed=0, index=index, mode=mode))  # type: ignore[arg-type]
            for index in range(12)
        ]
        asked = next(asked for asked in found if asked.references[0] == "A")
        assert books.score_choice("", asked) == wanted
        assert books.score_choice("A", asked) == books.score_choice(f"it is {asked.references[1]}", asked) == 1
        assert books.score_choice("B", asked) == 0


def test_prompts_are_the_same_in_another_process(tmp_path: os.PathLike[str]):
    program = (
        "from tests.evals.suites import byte_tokenizer, prompts_digest\n"
        "from unspool.evals.suites.helmet import SUITE\n"
        "print(prompts_digest(SUITE, byte_tokenizer(), [12288]))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    here = prompts_digest(SUITE, byte_tokenizer(), [12288])
    assert run.stdout.split()[-1] == here
    # Prompts are frozen: whoever changes them raises the suite's version and this hash together.
    assert (SUITE.version, here[:16]) == (3, "4950cae8d6171060")


def test_a_builder_that_ignores_its_budget_is_caught(sources: Sources, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        fill.Meter,
        "take",
        lambda self, pieces, budget, **_: [text for text, _ in zip(pieces, range(999), strict=False)],
    )
    with pytest.raises(ConfigError, match="too short"):
        SUITE.tasks["nq"].build(sources, Ask(length=4096, seed=0, index=0))


def test_a_meter_that_counts_too_little_would_show(
    sources: Sources, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
):
    plain = fill.Meter.count
    monkeypatch.setattr(fill.Meter, "count", lambda self, text: plain(self, text) * 9 // 10)
    asked = json_kv.build(sources, Ask(length=4096, seed=0, index=0))
    assert num_tokens(tokenizer, SUITE.tasks["json_kv"], asked) > 4096


def test_the_preset_of_prolong_asks_its_tasks_and_has_the_mean_of_six_categories():
    config = HelmetEval.model_validate({"suite": "helmet", "preset": "prolong"})
    assert config.lengths == [32 << 10, 64 << 10]
    asked = {name: [task for task in tasks if task in config.tasks] for name, tasks in CATEGORIES.items()}
    assert {name: tasks for name, tasks in asked.items() if tasks} == {
        "recall": ["json_kv"],
        "rag": ["nq", "hotpotqa", "popqa"],
        "rerank": ["msmarco"],
        "longqa": ["narrativeqa"],
        "summ": ["multi_lexsum"],
        "icl": ["trec_coarse", "trec_fine", "banking77", "clinc150", "nlu"],
    }
    scores = {task: len(task) / 40 for task in config.tasks}
    samples = [
        {"suite": "helmet", "task": task, "length": length, "score": score, "depth": None}
        for length in config.lengths
        for task, score in scores.items()
    ]

    summary = SUITE.summary(config, SUITE.cells(config, samples), samples)

    means = [sum(scores[task] for task in tasks) / len(tasks) for tasks in asked.values() if tasks]
    assert summary["average"]["of"] == "overall" and summary["average"]["lengths"] == config.lengths
    assert summary["average"]["value"] == pytest.approx(sum(means) / 6)
    assert HelmetEval.model_validate({"suite": "helmet", "preset": "prolong-128k"}).lengths[-1] == 128 << 10


def test_the_average_of_tables_8_22_and_24_has_the_marked_tasks_at_512k_and_the_others_at_32k_and_64k():
    plain, marked = (
        HelmetEval.model_validate({"suite": "helmet", "preset": f"prolong{name}"}) for name in ("", "-512k")
    )
    assert (marked.lengths, marked.tasks) == ([512 << 10], ["json_kv", "narrativeqa", "multi_lexsum"])
    # The first line of Table 8; around it tasks of a category and lengths differ. Marked tasks are 0 at other lengths.
    paper = {"recall": 65.7, "rag": 58.1, "rerank": 38.5, "icl": 80.3, "longqa": 49.7, "summ": 42.1}
    samples = []
    for name, score in paper.items():
        tasks = [task for task in CATEGORIES[name] if task in plain.tasks]
        for at, task in enumerate(tasks):
            off = at - (len(tasks) - 1) / 2
            is_marked = task in marked.tasks
            scores = {32: 0, 64: 0, 512: score} if is_marked else {32: score + off + 3, 64: score + off - 3}
            samples += [
                {"suite": "helmet", "task": task, "length": length << 10, "score": value / 100, "depth": None}
                for length, value in scores.items()
            ]
    cells = [cell for config in (plain, marked) for cell in SUITE.cells(config, samples)]

    found = SUITE.summary(marked, cells, samples)["average"]

    assert found["value"] == pytest.approx(0.557, abs=5e-4) and found["lengths"] == [32 << 10, 64 << 10, 512 << 10]
    missing = [cell for cell in cells if cell["task"] != "nq"]
    assert SUITE.summary(marked, missing, samples)["average"] is None
    with pytest.raises(ValidationError, match="average_of: task of helmet 'nqq'"):
        HelmetEval.model_validate({"suite": "helmet", "lengths": ["1K"], "average_of": {"nqq": ["1K"]}})


def test_the_short_tasks_of_prolong_have_the_shots_of_the_leaderboard():
    chosen = chosen_tasks([], "prolong", sandboxed=False)
    assert chosen == ["hellaswag:10", "mmlu:5", "arc_challenge:25", "winogrande:5", "gsm8k:5"]
