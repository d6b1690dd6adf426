"""Proofs of the numeric promises, on the devices of this machine."""
