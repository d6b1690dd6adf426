"""Registry of suites by recipe name. A new suite is one file or folder here and one line in `SUITES`.

Recipes are checked against the suites' config classes, so importing a suite must not import torch, transformers,
datatrove or pyarrow.
"""

from unspool.core.config import lookup, register
from unspool.evals.config import EvalConfig
from unspool.evals.suite import Suite
from unspool.evals.suites import (
    graphwalks,
    helmet,
    indirect_needle,
    infbench,
    key_value,
    longbench_v2,
    longppl,
    lveval,
    mrcr,
    niah,
    nocha,
    oolong,
    perplexity,
    ruler,
    short_suite,
)

SUITES: dict[str, Suite] = {
    "niah": niah.SUITE,
    "key_value": key_value.SUITE,
    "perplexity": perplexity.SUITE,
    "longppl": longppl.SUITE,
    "mrcr": mrcr.SUITE,
    "graphwalks": graphwalks.SUITE,
    "indirect_needle": indirect_needle.SUITE,
    "ruler": ruler.SUITE,
    "helmet": helmet.SUITE,
    "lveval": lveval.SUITE,
    "infbench": infbench.SUITE,
    "nocha": nocha.SUITE,
    "longbench_v2": longbench_v2.SUITE,
    "oolong": oolong.SUITE,
    "short": short_suite.SUITE,
}


def register_suite(suite: Suite) -> None:
    """Register a suite for recipes, the command line and reports.

    Replaces a suite of the same name.
    """
    register(SUITES, suite.name, suite, kind="suite", replace=True)


def suite_of(config: EvalConfig) -> Suite:
    return lookup(SUITES, config.suite, kind="suite")
