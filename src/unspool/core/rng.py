"""One random generator per named purpose, independent of call order."""

import hashlib

import numpy as np


def rng_for(seed: int, *purpose: str | int) -> np.random.Generator:
    """The same (seed, purpose) gives the same numbers on any machine and in any process."""
    name = "\x1f".join([str(seed), *map(str, purpose)])
    words = np.frombuffer(hashlib.sha256(name.encode()).digest(), dtype=np.uint32)
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(words.tolist())))
