"""Distances between tokens of one document in packed rows."""
