"""HELMET: seven kinds of long-context tasks, any length, from its released files, one's own or generated ones."""

from unspool.evals.suites.helmet.suite import SUITE, HelmetEval

__all__ = ["SUITE", "HelmetEval"]
