"""Auditing a training set-up that is not ours: probes of one optimizer step, with no knowledge of its code."""
