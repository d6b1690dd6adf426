"""Evaluation suites with fixed prompts, greedy answers, and scores with n and intervals."""
