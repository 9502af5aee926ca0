# mypy: ignore-errors
"""Makes queries and a step's part of the KV cache from its merged product, in one pass over the product:
RMS norm per head of queries and keys, rotation, and the write of keys and values.

A program takes a few heads of one token, whatever they are: queries, keys and values lie side by side in the product.
Each head is held as three pieces, the two halves of the rotated dimensions and the rest, so that every piece is read
and written in order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from batchjob_kernels.attention.store import MAX_FP8
from batchjob_kernels.triton_kernels.aot_case import AotCase

NUM_WARPS = 4
_TILE = 2048  # numbers of a program, about: 16 per thread


@triton.jit
def _store_head(x, column, inside, q_at, cache_at, q_ptr, cache_ptr, is_q, is_kv, FP8_MAX: tl.constexpr):
    """A piece of some heads, in the dtype of the product already, to where each of them belongs."""
    tl.store(q_ptr + q_at + column, x.to(q_ptr.dtype.element_ty), mask=is_q & inside)
    stored = x.to(q_ptr.dtype.element_ty).to(tl.float32)
    stored = tl.where(tl.abs(stored) < float("inf"), stored, 0.0)
    if FP8_MAX > 0.0:
        stored = tl.minimum(tl.maximum(stored, -FP8_MAX), FP8_MAX)
    tl.store(cache_ptr + cache_at + column, stored.to(cache_ptr.dtype.element_ty), mask=is_kv & inside)


@triton.jit
def _head_weight(
    q_norm_ptr, k_norm_ptr, column, inside, is_q, is_k, offset, Q_NORM: tl.constexpr, K_NORM: tl.constexpr
):
    weight = tl.full(is_q.shape, 1.0, tl.float32)
    if Q_NORM:
        weight = tl.where(is_q, tl.load(q_norm_ptr + column, mask=inside, other=0.0).to(tl.float32) + offset, weight)
    if K_NORM:
        weight = tl.where(is_k, tl.load(k_norm_ptr + column, mask=inside, other=0.0).to(tl.float32) + offset, weight)
    return weight


@triton.jit(do_not_specialize_on_alignment=["slot_mapping_ptr"])
def rotary_write_kernel(
    qkv_ptr,  # [n, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM]
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    slot_mapping_ptr,
    q_ptr,  # out: [n, NUM_HEADS, HEAD_DIM]
    cache_ptr,  # [blocks, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM]
    eps,
    offset,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,  # of the rotated dimensions
    COS_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,  # of one program
    HALF_BLOCK: tl.constexpr,  # powers of two that hold HALF, and the dimensions that are not rotated
    REST_BLOCK: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    FP8_MAX: tl.constexpr,  # 0 where the cache is not FP8
):
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    is_q = head < NUM_HEADS
    is_k = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    is_kv = (head >= NUM_HEADS) & (head < NUM_HEADS + 2 * NUM_KV_HEADS)
    rotates = head < NUM_HEADS + NUM_KV_HEADS

    slot = tl.load(slot_mapping_ptr + token)
    block, position = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    source = qkv_ptr + token * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM) + head * HEAD_DIM
    q_at = token * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM
    # Key and value heads follow each other in the cache as they do in the product.
    cache_at = (block * (2 * NUM_KV_HEADS) + (head - NUM_HEADS)) * (BLOCK_SIZE * HEAD_DIM) + position * HEAD_DIM

    column = tl.arange(0, HALF_BLOCK)[None, :]
    in_half = column < HALF
    wanted = (is_q | is_kv) & in_half
    first = tl.load(source + column, mask=wanted, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + column, mask=wanted, other=0.0).to(tl.float32)
    if HEAD_DIM > 2 * HALF:
        rest_column = tl.arange(0, REST_BLOCK)[None, :]
        in_rest = rest_column < HEAD_DIM - 2 * HALF
        rest = tl.load(source + 2 * HALF + rest_column, mask=(is_q | is_kv) & in_rest, other=0.0).to(tl.float32)
    if Q_NORM or K_NORM:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        if HEAD_DIM > 2 * HALF:
            squares += tl.sum(rest * rest, axis=1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        normed = is_q & False
        if Q_NORM:
            normed = normed | is_q
        if K_NORM:
            normed = normed | is_k
        scale = tl.where(normed, scale, 1.0)
        at_q, at_k = is_q & in_half, is_k & in_half
        first *= scale * _head_weight(q_norm_ptr, k_norm_ptr, column, in_half, at_q, at_k, offset, Q_NORM, K_NORM)
        second *= scale * _head_weight(
            q_norm_ptr + HALF, k_norm_ptr + HALF, column, in_half, at_q, at_k, offset, Q_NORM, K_NORM
        )
        if HEAD_DIM > 2 * HALF:
            rest *= scale * _head_weight(
                q_norm_ptr + 2 * HALF,
                k_norm_ptr + 2 * HALF,
                rest_column,
                in_rest,
                is_q & in_rest,
                is_k & in_rest,
                offset,
                Q_NORM,
                K_NORM,
            )
    cos = tl.load(cos_ptr + token * COS_STRIDE + column, mask=in_half, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * COS_STRIDE + column, mask=in_half, other=0.0).to(tl.float32)
    cos, sin = tl.where(rotates, cos, 1.0), tl.where(rotates, sin, 0.0)
    # Values keep even what is not finite until it is stored: sin is 0 there, and 0 * inf would spoil the other half.
    low = tl.where(rotates, first * cos - second * sin, first)
    high = tl.where(rotates, second * cos + first * sin, second)
    _store_head(low, column, in_half, q_at, cache_at, q_ptr, cache_ptr, is_q, is_kv, FP8_MAX)
    _store_head(high, HALF + column, in_half, q_at, cache_at, q_ptr, cache_ptr, is_q, is_kv, FP8_MAX)
    if HEAD_DIM > 2 * HALF:
        _store_head(rest, 2 * HALF + rest_column, in_rest, q_at, cache_at, q_ptr, cache_ptr, is_q, is_kv, FP8_MAX)


def constants(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    cos_stride: int,
    block_size: int,
    *,
    q_norm: bool,
    k_norm: bool,
    fp8_max: float,
) -> dict[str, object]:
    heads = triton.next_power_of_2(num_heads + 2 * num_kv_heads)
    return {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "HALF": rotary_dim // 2,
        "COS_STRIDE": cos_stride,
        "BLOCK_SIZE": block_size,
        "HEADS": min(heads, max(_TILE // triton.next_power_of_2(head_dim), 1)),
        "HALF_BLOCK": triton.next_power_of_2(rotary_dim // 2),
        "REST_BLOCK": triton.next_power_of_2(max(head_dim - rotary_dim, 1)),
        "Q_NORM": q_norm,
        "K_NORM": k_norm,
        "FP8_MAX": fp8_max,
    }


def _case(name: str, heads: tuple[int, int, int], rotary_dim: int, dtype: str, cache: str, norms: bool) -> AotCase:
    num_heads, num_kv_heads, head_dim = heads
    fp8_max = MAX_FP8 if cache == "fp8e4nv" else 0.0
    values = constants(
        num_heads, num_kv_heads, head_dim, rotary_dim, rotary_dim, 16, q_norm=norms, k_norm=norms, fp8_max=fp8_max
    )
    pointers = ("qkv_ptr", "cos_ptr", "sin_ptr", "q_norm_ptr", "k_norm_ptr")
    signature = {
        **dict.fromkeys(pointers, f"*{dtype}"),
        "slot_mapping_ptr": "*i64",
        "q_ptr": f"*{dtype}",
        "cache_ptr": f"*{cache}",
        "eps": "fp32",
        "offset": "fp32",
        **dict.fromkeys(values, "constexpr"),
    }
    return AotCase(
        f"rotary_write {name} {dtype}, {cache} cache",
        rotary_write_kernel,
        signature,
        values,
        num_warps=NUM_WARPS,
        min_capability=89 if cache == "fp8e4nv" else 80,
        quick=(name, dtype, cache) == ("qwen3_8b", "bf16", "bf16"),
    )


# The third rotates half of its dimensions.
_SHAPES = {
    "qwen3_8b": ((32, 8, 128), 128, True),
    "llama_8b": ((32, 8, 128), 128, False),
    "d64": ((32, 8, 64), 32, True),
}
AOT = [
    _case(name, heads, rotary_dim, dtype, cache, norms)
    for name, (heads, rotary_dim, norms) in _SHAPES.items()
    for dtype, cache in (("bf16", "bf16"), ("bf16", "fp8e4nv"), ("fp16", "fp16"))
]
