"""Judges: models that grade answers that rules cannot score."""
