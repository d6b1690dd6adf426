"""Frozen prompts, greedy answers, scores with `n` and intervals."""
