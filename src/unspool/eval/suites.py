"""The suites that consist of tasks, by the name that a recipe gives them."""

from unspool.eval import helmet, infbench, lveval, nocha, ruler
from unspool.eval.task import Suite

SUITES: dict[str, Suite] = {
    "ruler": ruler.SUITE,
    "helmet": helmet.SUITE,
    "lveval": lveval.SUITE,
    "infbench": infbench.SUITE,
    "nocha": nocha.SUITE,
}
