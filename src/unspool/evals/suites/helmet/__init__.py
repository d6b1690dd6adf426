"""HELMET: seven kinds of long-context tasks at any length, from released files, a user's own or generated ones."""

from unspool.evals.suites.helmet.suite import SUITE, HelmetEval

__all__ = ["SUITE", "HelmetEval"]
