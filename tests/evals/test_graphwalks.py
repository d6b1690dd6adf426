"""Graph walks: answers against a solver that reads the prompt, length, score, baselines."""

import re
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean

import pytest

from unspool.core.errors import ConfigError
from unspool.evals.backends.mock import Oracle
from unspool.evals.run import score as score_run
from unspool.evals.suite import Ask, Question
from unspool.evals.suites import graphwalks
from unspool.evals.suites.graphwalks import SUITE, GraphwalksEval, read_nodes, score

from .suites import byte_tokenizer, num_tokens, oracle, prompts_digest
from .toy import cell_of


def solve(text: str) -> set[str]:
    """Solve a prompt from its text alone: relax all edges until no distance changes."""
    edges = re.findall(r"^(\w+) -> (\w+)$", text.rpartition("Edges:\n")[2], re.MULTILINE)
    parents = re.search(r"parents of node (\w+): the nodes with an edge to \1\.\nFinal Answer: \[$", text)
    if parents is not None:
        return {start for start, end in edges if end == parents[1]}
    asked = re.search(r"search from node (\w+)\. Return the nodes at depth (\d): .+\nFinal Answer: \[$", text)
    assert asked is not None
    distance = {asked[1]: 0}
    for _ in edges:
        before = dict(distance)
        for start, end in edges:
            if start in distance:
                distance[end] = min(distance.get(end, len(edges)), distance[start] + 1)
        if distance == before:
            break
    return {node for node, steps in distance.items() if steps == int(asked[2])}


def build(tokenizer, task: str, index: int, length: int = 1024, **options) -> Question:
    return SUITE.tasks[task].build(
        SUITE.load(tokenizer, {}), Ask(length=length, seed=options.pop("seed", 3), index=index, **options)
    )


def disagreements(tokenizer, count: int, length: int = 1024) -> int:
    sources = SUITE.load(tokenizer, {})
    found = 0
    for index in range(count):
        task = SUITE.tasks[("bfs", "parents")[index % 2]]
        asked = task.build(sources, Ask(length=length, seed=3, index=index // 2))
        found += solve(asked.context + asked.question + asked.prefix) != set(asked.references)
    return found


def test_a_solver_that_reads_the_prompt_finds_the_same_answers(tokenizer):
    assert disagreements(tokenizer, 60) == 0


@pytest.mark.slow
def test_a_solver_that_reads_the_prompt_finds_the_same_1000_answers(tokenizer):
    assert disagreements(tokenizer, 1000, length=2048) == 0


@pytest.mark.parametrize(
    "fault",
    [
        lambda after, start, depth: {end for node in after for end in after[node] if node == start},  # always depth 1
        lambda after, start, depth: _revisiting(after, start, depth),
    ],
)
def test_a_wrong_search_is_noticed(tokenizer, monkeypatch, fault: Callable):
    monkeypatch.setattr(graphwalks, "_level", fault)

    assert disagreements(tokenizer, 60) > 0


def _revisiting(after, start, depth):
    level = {start}
    for _ in range(depth):
        level = {end for node in level for end in after.get(node, ())}
    return level


@pytest.mark.parametrize("length", [1024, 8192, 65536])
def test_prompts_fill_the_length_and_an_oracle_gets_all_of_it(tokenizer, length):
    sources = SUITE.load(tokenizer, {})
    for task in SUITE.tasks.values():
        for index in range(3):
            asked = task.build(sources, Ask(length=length, seed=1, index=index))
            assert 0.98 * length <= num_tokens(tokenizer, task, asked) <= length
            assert (task.score(oracle(asked), asked), task.score("", asked)) == (1, 0)


def test_answers_fit_their_tokens_even_if_every_character_is_a_token():
    tokenizer, task = byte_tokenizer(), SUITE.tasks["bfs"]
    longest = max(len(oracle(build(tokenizer, "bfs", index, length=4096))) for index in range(60))

    assert longest <= task.answer_tokens
    assert longest > task.answer_tokens // 2, "long answers occur"


def test_every_depth_is_asked_for_equally_often_and_edges_and_names_are_distinct(tokenizer):
    depths = [build(tokenizer, "bfs", index).meta["groups"] for index in range(6)]
    asked = build(tokenizer, "parents", 0, length=8192)
    edges = asked.context.rpartition("Edges:\n")[2].split("\n")

    assert sorted(depths) == [[f"depth {depth}"] for depth in (1, 1, 2, 2, 3, 3)]
    assert len(edges) == len(set(edges)) == asked.meta["edges"]
    assert all(start != end for start, _, end in (edge.partition(" -> ") for edge in edges))


def test_the_score_is_the_f1_of_the_set():
    asked = Question(context="", question="", prefix="Final Answer: [", references=("a1", "b2"), meta={"mode": "fixed"})

    assert score("a1, b2]", asked) == score("b2, a1, a1]\n\nOperation: [c3]", asked) == 1
    assert score("a1]", asked) == pytest.approx(2 / 3)
    assert score("a1, c3, d4]", asked) == pytest.approx(2 * (1 / 3) * (1 / 2) / (1 / 3 + 1 / 2))
    assert score("c3]", asked) == score("]", asked) == score("a1, b2", asked) == 0
    assert score("From x [1] we get y.\nFinal Answer: [`a1`, b2]", asked) == 1, "a model that thinks first"


def test_reference_mode_reads_only_the_last_line():
    asked = Question(context="", question="", prefix="Final Answer: [", references=("a1",), meta={"mode": "reference"})

    assert read_nodes("a1]", asked) == {"a1"}
    assert read_nodes("a1]\n", asked) == read_nodes("a1]\nDone.", asked) == set()
    assert read_nodes("no]\nFinal Answer: [a1, b2]", asked) == {"a1", "b2"}


def test_trivial_baselines_stand_beside_the_scores(scoring, tokenizer):
    config = GraphwalksEval.model_validate({"suite": "graphwalks", "lengths": [1024], "samples": 12})
    summary = score_run(replace(scoring, evals=[config]), Oracle(tokenizer))
    bfs, mean = cell_of(summary, "bfs", 1024), cell_of(summary, None, 1024)

    assert bfs["value"] == mean["value"] == 1
    assert sorted(bfs["baselines"]) == sorted(mean["baselines"]) == ["first", "last", "random"]
    assert all(0 <= value < 0.5 for value in mean["baselines"].values())
    assert [cell_of(summary, f"bfs, depth {depth}", 1024)["n"] for depth in (1, 2, 3)] == [4, 4, 4]
    samples = [build(tokenizer, "bfs", index, seed=0, overhead=1) for index in range(12)]
    assert bfs["baselines"]["first"] == pytest.approx(fmean(score(one.items[0], one) for one in samples))
    assert bfs["baselines"]["last"] == pytest.approx(fmean(score(one.items[-1], one) for one in samples))


def test_what_cannot_work_is_refused(tokenizer):
    with pytest.raises(ConfigError, match="graphs are generated; remove edges from `paths`"):
        SUITE.load(tokenizer, {"edges": "x"})
    with pytest.raises(ConfigError, match="length 64 is too short"):
        build(tokenizer, "bfs", 0, length=64)


def test_prompts_are_frozen():
    assert prompts_digest(SUITE, byte_tokenizer(), [4096])[:16] == "3689f5ead0091f2a"
