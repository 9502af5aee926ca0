"""The elementwise operations of a decoder layer in plain PyTorch, for any device and dtype. The specification.

All of them compute in float32 and round once, to the dtype of their input. `triton` and `cpu` have the same functions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchjob_kernels.attention.meta import AttnMeta
from batchjob_kernels.attention.reference import write_kv

ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "gelu": torch.nn.functional.gelu,
}


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (weight + offset) over the last axis, of `x` [n, hidden_size].

    Zhang and Sennrich, 2019. `offset` is 1 where a checkpoint stores the weight less one (Gemma).
    """
    return _normed(x.float(), weight, eps, offset).to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(rms_norm(total), total) with total = x + residual, rounded to the dtype of `x` before it is normalised."""
    total = (x.float() + residual.float()).to(x.dtype)
    return rms_norm(total, weight, eps, offset=offset), total


def act_and_mul(gate_up: Tensor, activation: str) -> Tensor:
    """act(first half) * second half of `gate_up` [n, 2 * intermediate_size] -> [n, intermediate_size].

    `activation` is "silu", "gelu_tanh" or "gelu"; another one is a KeyError.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (ACTIVATIONS[activation](gate) * up).to(gate_up.dtype)


def head_order(head_dim: int) -> Tensor | None:
    """The order in which `rotary_write` takes the dimensions of each query and key head; None: the model's own."""
    return None


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
    """Rotates queries and keys of a step's merged product, stores keys and values, returns q [n, num_heads, head_dim].

    `qkv` is [n, num_heads + 2 * num_kv_heads, head_dim]: query heads, then keys, then values. Queries and keys get an
    RMS norm per head where `q_norm` or `k_norm` [head_dim] is given (Qwen3), and are then rotated (Su et al., 2021,
    "RoFormer", in the form that pairs dimension i with i + rotary_dim / 2) on their first `rotary_dim` dimensions.
    `cos` and `sin` are [n, rotary_dim] with two equal halves; with `rotary_dim` given they may be one half alone.
    Keys and values go into `cache` at `meta.slot_mapping`, as `write_kv` puts them there.
    """
    head_dim, num_kv_heads = qkv.shape[2], cache.shape[2]
    q, k, v = qkv.float().split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_norm is not None:
        q = _normed(q, q_norm, eps, offset)
    if k_norm is not None:
        k = _normed(k, k_norm, eps, offset)
    half = (cos.shape[1] if rotary_dim is None else rotary_dim) // 2
    cos, sin = (part[:, None, :half].float() for part in (cos, sin))

    def rotated(x: Tensor) -> Tensor:
        first, second, rest = x.split((half, half, head_dim - 2 * half), dim=2)
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=2).to(qkv.dtype)

    write_kv(torch.stack((rotated(k), v.to(qkv.dtype)), dim=1), cache, meta)
    return rotated(q)


def _normed(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * (weight.float() + offset)
