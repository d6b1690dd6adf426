"""Audit any training setup by probing one optimizer step, without knowledge of its code."""
