"""Synthetic tasks as documents: facts, questions and answers, at any length.

The five tasks are those of Untie the Knots' synthetic rival; the paper names them and says no more, so what a
document of each looks like is ours.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from unspool.data.sources.synthetic import attributes, hops, similarity, sorting, states
from unspool.data.sources.synthetic.draft import Builder
from unspool.data.sources.synthetic.solvers import attributes as solve_attributes
from unspool.data.sources.synthetic.solvers import hops as solve_hops
from unspool.data.sources.synthetic.solvers import similar as solve_similar
from unspool.data.sources.synthetic.solvers import sorting as solve_sorting
from unspool.data.sources.synthetic.solvers import states as solve_states
from unspool.data.sources.synthetic.solvers.reading import Solution


class Task(NamedTuple):
    choose: Callable[[np.random.Generator], Builder]  # a theme and its wording
    solve: Callable[[str], list[Solution]]
    reads: Callable[[str], object]  # whether the solver could take a line for a fact


TASKS: dict[str, Task] = {
    "sorting": Task(sorting.choose, solve_sorting.solve, solve_sorting.LINE.match),
    "hops": Task(hops.choose, solve_hops.solve, solve_hops.LINE.match),
    "states": Task(states.choose, solve_states.solve, solve_states.LINE.match),
    "similar": Task(similarity.choose, solve_similar.solve, solve_similar.LINE.match),
    "attributes": Task(attributes.choose, solve_attributes.solve, solve_attributes.LINE.match),
}
