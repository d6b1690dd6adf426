"""Recipes: the YAML file that describes a whole run, its checker, the bundled recipes, and the runner."""
