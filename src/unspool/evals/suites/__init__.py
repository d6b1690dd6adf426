"""The suites that consist of tasks, by the name that a recipe gives them."""

from unspool.evals.suite import Suite
from unspool.evals.suites import helmet, infbench, lveval, nocha, ruler

SUITES: dict[str, Suite] = {
    "ruler": ruler.SUITE,
    "helmet": helmet.SUITE,
    "lveval": lveval.SUITE,
    "infbench": infbench.SUITE,
    "nocha": nocha.SUITE,
}
