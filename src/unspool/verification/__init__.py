"""Checks of the numeric promises on this machine's devices."""
