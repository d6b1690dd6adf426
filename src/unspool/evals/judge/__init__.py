"""Judges: models that grade answers which no rule can score."""
