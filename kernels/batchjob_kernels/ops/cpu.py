"""The elementwise operations of a decoder layer in few calls of PyTorch, in place where it helps: float32 on a CPU.

The same functions as `reference` with one difference: `rotary_write` takes the two numbers that are rotated together
side by side (`head_order`), as one complex product rotates them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from batchjob_kernels.attention.gather import write_kv
from batchjob_kernels.attention.meta import AttnMeta
from batchjob_kernels.ops.reference import ACTIVATIONS


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """As `reference.rms_norm`."""
    return functional.rms_norm(x, weight.shape, weight + offset if offset else weight, eps)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """As `reference.add_rms_norm`."""
    total = x + residual
    return rms_norm(total, weight, eps, offset=offset), total


def act_and_mul(gate_up: Tensor, activation: str) -> Tensor:
    """As `reference.act_and_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate).mul_(up)


def head_order(head_dim: int) -> Tensor | None:
    """The two halves of a head, interleaved: 0, head_dim / 2, 1, head_dim / 2 + 1, ..."""
    return torch.arange(head_dim).view(2, head_dim // 2).T.flatten()


def rotary_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    meta: AttnMeta,
    *,
    num_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
    rotary_dim: int | None = None,
) -> Tensor:
    """As `reference.rotary_write` for dimensions in `head_order`, in place in `qkv`; the result is a view of it.

    Raises ValueError where not the whole of each head is rotated.
    """
    num_rotated = num_heads + cache.shape[2]
    if qkv.shape[2] != (cos.shape[1] if rotary_dim is None else rotary_dim):
        raise ValueError("only whole heads are rotated")
    q, k = qkv[:, :num_heads], qkv[:, num_heads:num_rotated]
    for part, weight in ((q, q_norm), (k, k_norm)):
        if weight is not None:
            part.copy_(rms_norm(part, weight, eps, offset=offset))
    pairs = torch.view_as_complex(qkv[:, :num_rotated].unflatten(2, (-1, 2)))
    pairs.mul_(_rotation(cos, sin, qkv.shape[2] // 2, meta))
    write_kv(qkv[:, num_heads:].unflatten(1, (2, -1)), cache, meta)
    return q


def _rotation(cos: Tensor, sin: Tensor, half: int, meta: AttnMeta) -> Tensor:
    """cos + i sin, complex [n, 1, head_dim / 2]; worked out once per step for all layers that get the same tensors."""
    key = "rotation", cos.data_ptr()  # no other tensor's while this one is kept
    known = meta.memo.get(key)
    if known is None:
        known = meta.memo[key] = cos, torch.complex(cos[:, None, :half], sin[:, None, :half])
    rotation: Tensor = known[1]
    return rotation
