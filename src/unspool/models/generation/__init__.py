"""Greedy generation: shared prefixes, padded batches, CUDA graphs."""
