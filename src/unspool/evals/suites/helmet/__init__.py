"""HELMET: seven categories of long-context tasks at any length, from released, user-provided or generated data."""

from unspool.evals.suites.helmet.suite import SUITE, HelmetEval

__all__ = ["SUITE", "HelmetEval"]
