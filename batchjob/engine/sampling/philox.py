"""Counter-based random numbers: Philox4x32-10, vectorised.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). A draw is a function of key and
counter alone, so that it depends neither on what else is in the batch nor on what was drawn before. PyTorch has no
unsigned 32-bit arithmetic, so the words are held in int64; products of two of them wrap, which keeps all 64 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor], rounds: int = 10) -> Tensor:
    """Four random 32-bit words per counter.

    Counter and key words are int64 tensors of values in [0, 2**32), of shapes that broadcast to one shape [...].
    Returns int64 [..., 4].
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = ((p1 >> 32) & _MASK) ^ c1 ^ k0
        c1 = p1 & _MASK
        c2 = ((p0 >> 32) & _MASK) ^ c3 ^ k1
        c3 = p0 & _MASK
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return torch.stack(torch.broadcast_tensors(c0, c1, c2, c3), dim=-1)


def exponential(words: Tensor) -> Tensor:
    """Random words as float64 draws from the exponential distribution of rate 1, in (1.1e-10, 22.9)."""
    return words.double().add_(0.5).mul_(2.0**-32).log_().neg_()
