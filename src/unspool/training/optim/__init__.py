"""Optimizers and the update of the weights."""
