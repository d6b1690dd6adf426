"""Graph walks: a directed graph as a list of edges fills the context, with a question about it at the end.

`bfs` asks for the nodes at depth 1, 2 or 3 of a breadth-first search, `parents` for the nodes with an edge to a node.
Graphs, names and wording are our own; tasks and score are those of OpenAI's GraphWalks. The score is the F1 of the
set of nodes. Graphs have two edges per node on average, and answers have one to eight nodes.

`fixed` reads the first list of an answer. `reference` reads an answer like the published code: only its last line
counts, and it must contain "Final Answer:".
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, count
from typing import Any, Literal

import numpy as np

from unspool.core.errors import ConfigError
from unspool.core.rng import rng_for
from unspool.evals.config import TaskEval
from unspool.evals.fill import Meter, fill, room
from unspool.evals.suite import Ask, Question, Task
from unspool.evals.task_suite import TaskSuite

DEPTHS = 3  # of breadth-first searches: 1 to 3
MOST_NODES = 8  # of an answer
ANSWER_TOKENS = 80  # eight names of seven characters and commas, if every character is a token
NODES_PER_EDGE = 0.5
FEWEST_EDGES, FEWEST_NODES = 12, 8
NAME_DIGITS = 6  # hexadecimal; some names get one more, so that the prompt has its length
EDGE_CHARS = 2 * NAME_DIGITS + len(" -> \n")
CUE = "Final Answer:"
PREFIX = f"{CUE} ["
EXAMPLE = ("ab -> ce", "ce -> df", "ab -> fa", "fa -> ce", "df -> bc")
HEAD = (
    'The text below lists the edges of a directed graph. "a -> b" is an edge from node a to node b. Carry out the '
    "operation after the list, and answer with a list of nodes.\n\nExample\nEdges:\n{edges}\n\nOperation: {operation}\n"
    f"{PREFIX}{{answer}}]\n\nGraph\nEdges:\n"
)
OPERATIONS = {
    "bfs": "Run a breadth-first search from node {node}. Return the nodes at depth {depth}: the shortest path from "
    "{node} to them has {depth} edges.",
    "parents": "Return the parents of node {node}: the nodes with an edge to {node}.",
}
EXAMPLE_OF = {"bfs": ("ab", 2, "df"), "parents": ("ce", 1, "ab, fa")}

Edges = list[tuple[int, int]]


@dataclass(frozen=True)
class Sources:
    meter: Meter
    edge_tokens: float  # per edge


def load(tokenizer: Any, paths: Mapping[str, str]) -> Sources:
    if paths:
        raise ConfigError(f"graphwalks: graphs are generated; remove {', '.join(sorted(paths))} from `paths`.")
    rng = np.random.default_rng(0)
    sample = _edge_lines(draw_edges(256, 128, rng), draw_names(128, rng))
    meter = Meter(tokenizer, [sample, *map(head, OPERATIONS)])
    return Sources(meter, meter.count(sample) / 256)


def head(task: str) -> str:
    node, depth, answer = EXAMPLE_OF[task]
    operation = OPERATIONS[task].format(node=node, depth=depth)
    return HEAD.format(edges="\n".join(EXAMPLE), operation=operation, answer=answer)


def draw_names(size: int, rng: np.random.Generator) -> list[str]:
    """Draw distinct names of nodes."""
    return [f"{number:0{NAME_DIGITS}x}" for number in rng.choice(16**NAME_DIGITS, size=size, replace=False).tolist()]


def lengthen(names: list[str], edges: Edges, chars: int) -> list[str]:
    """Append a digit to names of nodes with few edges, until the list of edges has at most `chars` more characters."""
    degrees = Counter(node for edge in edges for node in edge)
    longer = list(names)
    for node, degree in sorted(degrees.items(), key=lambda one: (one[1], one[0])):
        if degree > chars:
            break
        longer[node] += f"{node % 16:x}"
        chars -= degree
    return longer


def draw_edges(num_edges: int, num_nodes: int, rng: np.random.Generator) -> Edges:
    """Draw distinct edges without loops, in random order."""
    drawn = rng.choice(num_nodes * (num_nodes - 1), size=num_edges, replace=False, shuffle=True)
    start, end = np.divmod(drawn, num_nodes - 1)
    return list(zip(start.tolist(), (end + (end >= start)).tolist(), strict=True))


def _neighbors(edges: Edges) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for start, end in edges:
        found.setdefault(start, []).append(end)
    return found


def _level(after: Mapping[int, Sequence[int]], start: int, depth: int) -> set[int]:
    """Return the nodes whose shortest path from `start` has `depth` edges."""
    seen, level = {start}, {start}
    for _ in range(depth):
        level = {end for node in level for end in after.get(node, ())} - seen
        seen |= level
    return level


def _choose(task: str, edges: Edges, num_nodes: int, depth: int, rng: np.random.Generator) -> tuple[int, set[int]]:
    """Choose the node of the question so that the answer has one to `MOST_NODES` nodes. Returns (node, answer)."""
    # The parents of a node are at depth 1 of the reversed graph.
    after = _neighbors([(end, start) for start, end in edges] if task == "parents" else edges)
    for node in rng.permutation(num_nodes).tolist():
        answer = _level(after, node, depth)
        if 1 <= len(answer) <= MOST_NODES:
            return node, answer
    return -1, set()


def build(task: str, sources: Sources, ask: Ask) -> Question:
    meter, depth = sources.meter, 1 + ask.index % DEPTHS if task == "bfs" else 1
    begin, limit = head(task), room(ask, ANSWER_TOKENS)
    used = meter.piece(begin) + meter.piece(_operation(task, "000000", depth) + PREFIX)
    expected = max(FEWEST_EDGES, int((limit - used) / sources.edge_tokens))
    num_nodes = max(FEWEST_NODES, round(NODES_PER_EDGE * expected))

    @cache
    def graph(attempt: int) -> tuple[Edges, list[str]]:
        rng = rng_for(ask.seed, "graphwalks", task, ask.length, ask.index, attempt)
        return draw_edges(min(2 * expected, num_nodes**2 // 2), num_nodes, rng), draw_names(num_nodes, rng)

    def build_within(budget: int) -> Question:
        free = max(0, budget - used) / sources.edge_tokens
        num_edges = max(FEWEST_EDGES, int(free))
        for attempt in count():
            edges, names = graph(attempt)[0][:num_edges], graph(attempt)[1]
            rng = rng_for(ask.seed, "graphwalks node", task, ask.length, ask.index, attempt)
            node, answer = _choose(task, edges, num_nodes, depth, rng)
            if answer:
                break
        names = lengthen(names, edges, int(max(0, free - num_edges) * EDGE_CHARS))
        listed = sorted(names[one] for one in answer)
        return Question(
            context=begin + _edge_lines(edges, names),
            question=_operation(task, names[node], depth),
            prefix=PREFIX,
            references=tuple(listed),
            items=tuple(f"{names[one]}]" for one in dict.fromkeys(chain.from_iterable(edges)) if one != node),
            meta={
                "mode": ask.mode,
                "generated": True,
                "edges": num_edges,
                "oracle": f"{', '.join(listed)}]",
                **({"groups": [f"depth {depth}"]} if task == "bfs" else {}),
            },
        )

    return fill(build_within, meter, limit, what=f"graphwalks {task}", length=ask.length)


def _edge_lines(edges: Edges, names: Sequence[str]) -> str:
    return "\n".join(f"{names[start]} -> {names[end]}" for start, end in edges)


def _operation(task: str, node: str, depth: int) -> str:
    return f"\n\nOperation: {OPERATIONS[task].format(node=node, depth=depth)}\n"


def read_nodes(output: str, question: Question) -> set[str]:
    """Read the set of nodes from an answer that continues the question's prefix. Empty if there is no list."""
    whole = question.prefix + output
    if question.meta["mode"] == "reference":
        last = re.search(rf"{CUE} ?\[.*\]", whole.split("\n")[-1])
        return set() if last is None else _split(last[0].removeprefix(CUE).strip().strip("[]"))
    begun = re.match(r"[^\[\]\n]*\]", output)
    if begun is not None:  # the output continues the list of the prefix
        return _split(begun[0].rstrip("]"))
    lists = re.findall(rf"{CUE}\W*\[([^\[\]\n]*)\]", output)
    return _split(lists[-1]) if lists else set()


def _split(listed: str) -> set[str]:
    return {node for part in listed.split(",") if (node := part.strip(" `'\"*"))}


def score(output: str, question: Question) -> float:
    """Return the F1 of the set of nodes."""
    given, wanted = read_nodes(output, question), set(question.references)
    shared = len(given & wanted)
    return 2 * shared / (len(given) + len(wanted)) if shared else 0.0


class GraphwalksEval(TaskEval):
    """Walks in a directed graph whose edges fill the context: breadth-first search and parents of a node."""

    suite: Literal["graphwalks"]


SUITE = TaskSuite(
    name="graphwalks",
    title="Graph walks",
    config=GraphwalksEval,
    version=1,
    tasks={
        task: Task(
            name=task, metric="F1", answer_tokens=ANSWER_TOKENS, build=partial(build, task), score=score, chat=True
        )
        for task in OPERATIONS
    },
    load=load,
)
