"""LV-Eval: eleven data sets of questions on articles mixed into long ones, scored by keywords and words."""

from unspool.eval.lveval.suite import SUITE

__all__ = ["SUITE"]
