"""Scores of one output against its references, and how scores change with length; all are pure functions."""
