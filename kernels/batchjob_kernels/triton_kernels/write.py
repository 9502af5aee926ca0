# mypy: ignore-errors
"""Stores the keys and values of a step's new tokens into the cache: one program per token, 16-byte accesses."""

from __future__ import annotations

import triton
import triton.language as tl

from batchjob_kernels.attention.store import MAX_FP8
from batchjob_kernels.triton_kernels.aot_case import AotCase

_MAX_FP8 = tl.constexpr(MAX_FP8)


@triton.jit
def finite_as(x, dtype: tl.constexpr):
    """`x` in the cache's type; what is not finite becomes zero, and what an 8-bit float cannot hold its largest."""
    x = x.to(tl.float32)
    x = tl.where(tl.abs(x) < float("inf"), x, 0.0)
    if dtype == tl.float8e4nv:
        x = tl.minimum(tl.maximum(x, -_MAX_FP8), _MAX_FP8)
    return x.to(dtype)


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def write_kv_kernel(
    kv,  # [num_tokens, 2, NUM_KV_HEADS, HEAD_DIM], each token contiguous
    cache,  # [num_blocks, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM]
    slot_mapping,  # int64 [num_tokens]
    stride_kv,
    NUM_PARTS: tl.constexpr,  # 2 * NUM_KV_HEADS
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PARTS_PAD: tl.constexpr,
    DIM_PAD: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    part = tl.arange(0, PARTS_PAD)[:, None]
    dim = tl.arange(0, DIM_PAD)[None, :]
    inside = (part < NUM_PARTS) & (dim < HEAD_DIM)
    x = tl.load(kv + token * stride_kv + part * HEAD_DIM + dim, mask=inside)
    target = cache + block * (NUM_PARTS * BLOCK_SIZE * HEAD_DIM) + offset * HEAD_DIM
    tl.store(target + part * (BLOCK_SIZE * HEAD_DIM) + dim, finite_as(x, cache.dtype.element_ty), mask=inside)


def _case(name: str, kv: str, cache: str, head_dim: int, num_kv_heads: int = 8, **more) -> AotCase:
    return AotCase(
        name=f"write_kv {name}",
        fn=write_kv_kernel,
        signature={"kv": f"*{kv}", "cache": f"*{cache}", "slot_mapping": "*i64", "stride_kv": "i32"},
        constexprs={
            "NUM_PARTS": 2 * num_kv_heads,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": 16,
            "PARTS_PAD": triton.next_power_of_2(2 * num_kv_heads),
            "DIM_PAD": triton.next_power_of_2(head_dim),
        },
        **more,
    )


AOT = [
    _case("bf16 d128", "bf16", "bf16", 128, quick=True),
    _case("fp16 d64", "fp16", "fp16", 64),
    _case("fp32 d128", "fp32", "fp32", 128),
    _case("bf16 d80", "bf16", "bf16", 80),
    _case("bf16 d128 fp8 cache", "bf16", "fp8e4nv", 128, min_capability=89),
]
