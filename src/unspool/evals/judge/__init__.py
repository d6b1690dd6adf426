"""Judges: models that say how good an answer is, where no rule can."""
