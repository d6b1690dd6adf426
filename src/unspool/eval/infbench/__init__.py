"""∞Bench's key tasks: a passkey, a number with repeated digits, a value of a JSON object, in generated filler."""

from unspool.eval.infbench.suite import SUITE

__all__ = ["SUITE"]
