"""Weights of labels in the loss."""
