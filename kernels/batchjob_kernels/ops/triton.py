"""The elementwise operations of a decoder layer as Triton kernels, one launch each. As `reference`, on a GPU.

Inputs may be float16, bfloat16 or float32; they are made contiguous where they are not. Nothing here waits for the
device, and no launch depends on what is in a tensor, so all of it can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from batchjob_kernels.attention.meta import AttnMeta
from batchjob_kernels.attention.store import MAX_FP8
from batchjob_kernels.ops.reference import ACTIVATIONS
from batchjob_kernels.triton_kernels import activation as activation_kernels
from batchjob_kernels.triton_kernels import norm as norm_kernels
from batchjob_kernels.triton_kernels import rotary as rotary_kernels


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """As `reference.rms_norm`."""
    return _rms_norm(x.contiguous(), None, weight, eps, offset)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """As `reference.add_rms_norm`."""
    return _rms_norm(x.contiguous(), residual.contiguous(), weight, eps, offset)


def _rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    size = x.shape[1]
    out = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    if len(x):
        norm_kernels.rms_norm_kernel[(len(x),)](
            x,
            x if residual is None else residual,
            weight,
            out,
            total,
            float(eps),
            float(offset),
            SIZE=size,
            BLOCK=triton.next_power_of_2(size),
            HAS_RESIDUAL=residual is not None,
            num_warps=norm_kernels.num_warps(size),
        )
    return out, total


def act_and_mul(gate_up: Tensor, activation: str) -> Tensor:
    """As `reference.act_and_mul`."""
    if activation not in ACTIVATIONS:
        raise KeyError(activation)
    gate_up = gate_up.contiguous()
    num_rows, size = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, size)
    block = min(activation_kernels.BLOCK, triton.next_power_of_2(size))
    if num_rows:
        activation_kernels.act_and_mul_kernel[(num_rows, triton.cdiv(size, block))](
            gate_up, out, SIZE=size, BLOCK=block, ACTIVATION=activation, num_warps=activation_kernels.NUM_WARPS
        )
    return out


def head_order(head_dim: int) -> Tensor | None:
    """As `reference.head_order`."""
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
    """As `reference.rotary_write`."""
    qkv, cos, sin = qkv.contiguous(), cos.contiguous(), sin.contiguous()
    num_tokens, all_heads, head_dim = qkv.shape
    rotary_dim = cos.shape[1] if rotary_dim is None else rotary_dim
    if rotary_dim > head_dim or rotary_dim // 2 > cos.shape[1]:
        raise ValueError(f"{rotary_dim} rotated dimensions of {head_dim}, with {cos.shape[1]} cosines")
    values = rotary_kernels.constants(
        num_heads,
        cache.shape[2],
        head_dim,
        rotary_dim,
        cos.shape[1],
        meta.block_size,
        q_norm=q_norm is not None,
        k_norm=k_norm is not None,
        fp8_max=MAX_FP8 if cache.dtype == torch.float8_e4m3fn else 0.0,
    )
    q = qkv.new_empty(num_tokens, num_heads, head_dim)
    if num_tokens:
        rotary_kernels.rotary_write_kernel[(num_tokens, triton.cdiv(all_heads, values["HEADS"]))](
            qkv,
            cos,
            sin,
            qkv if q_norm is None else q_norm,
            qkv if k_norm is None else k_norm,
            meta.slot_mapping,
            q,
            cache,
            float(eps),
            float(offset),
            **values,
            num_warps=rotary_kernels.NUM_WARPS,
        )
    return q
