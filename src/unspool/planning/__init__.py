"""Predict memory, time and cost of a recipe before it runs."""
