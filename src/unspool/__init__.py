"""Unspool: extend the context window of open language models from one recipe file."""

__version__ = "0.1.0"
