"""Stochastic rounding to bf16: up or down with probabilities that make the mean exact.

In: fp32 values, a key. Out: bf16. Promise: the mean over keys is the value; the same key and place give the same bits
on every device, so that a resumed run rounds as the one that was never stopped.
Why: bf16 has 8 bits, so an update below 1/512 of its weight is lost whenever it is rounded to the nearest.
Elsewhere: the same inside the update on a GPU (adamw_kernel.py).
"""

import hashlib

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def rounding_key(seed: int, step: int, name: str) -> tuple[int, int]:
    """Two words of 32 bits for one parameter in one step."""
    words = hashlib.blake2b(f"{seed} {step} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(words[:4], "little"), int.from_bytes(words[4:], "little")


def random_bits(key: tuple[int, int], size: int, device: torch.device) -> Tensor:
    """int64[size] of 16 random bits each: a hash of the key and the place."""
    word = _mixed(torch.arange(size, device=device) ^ key[0])
    return _mixed(word ^ key[1]) >> 16


def round_stochastic(value: Tensor, key: tuple[int, int]) -> Tensor:
    """bf16 is the upper half of fp32's bits; adding a random lower half carries as often as what is cut off says."""
    bits = value.contiguous().view(torch.int32).long().view(-1) + random_bits(key, value.numel(), value.device)
    kept = (bits >> 16).to(torch.int16)
    return kept.view(torch.bfloat16).view(value.shape)


def _mixed(word: Tensor) -> Tensor:
    """A bijection of 32 bits in which every bit of the input moves every bit of the output (Wellons, lowbias32)."""
    word = word ^ (word >> 16)
    word = word * 0x7FEB352D & _MASK
    word = word ^ (word >> 15)
    word = word * 0x846CA68B & _MASK
    return word ^ (word >> 16)
