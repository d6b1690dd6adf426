"""RULER's thirteen tasks at any length; `published.py` compares both modes with RULER's own code."""

from unspool.evals.suites.ruler.suite import SUITE, RulerEval

__all__ = ["SUITE", "RulerEval"]
