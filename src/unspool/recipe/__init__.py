"""Recipes: the YAML file that is the whole run, its checker, the bundled ones, and the runner."""
