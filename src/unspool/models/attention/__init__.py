"""Exact causal attention with document masks, registered with `transformers`."""
