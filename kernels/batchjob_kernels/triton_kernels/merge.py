# mypy: ignore-errors
"""Joins results over disjoint keys by the log-sum-exp of their scores; a sink is one more such result, without a value.

Milakov and Gimelshein, 2018, "Online normalizer calculation for softmax"; used as in FlashDecoding and in FlashInfer's
cascade. All logarithms are of base 2, as in the attention kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from batchjob_kernels.triton_kernels.aot_case import AotCase


@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def merge_kernel(
    parts,  # float32 [num_parts, num_rows, HEAD_DIM], a row being one head of one token
    lse,  # float32 [num_parts, num_rows]; -inf: this part has no keys for the row, its numbers are not to be read
    out,  # [num_rows, HEAD_DIM]
    sinks,  # [NUM_HEADS] or None
    num_rows,
    num_parts,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    ALL_PAD: tl.constexpr,  # a power of two >= num_parts
    AT_ONCE: tl.constexpr,  # parts read together, a power of two <= ALL_PAD
):
    row = tl.program_id(0).to(tl.int64)
    every = tl.arange(0, ALL_PAD)
    dim = tl.arange(0, DIM_PAD)
    sums = tl.load(lse + every.to(tl.int64) * num_rows + row, mask=every < num_parts, other=-float("inf"))
    largest = tl.max(sums, 0)
    if sinks is not None:
        sink = tl.load(sinks + row % NUM_HEADS).to(tl.float32) * 1.4426950408889634
        largest = tl.maximum(largest, sink)
    largest = tl.where(largest == -float("inf"), 0.0, largest)
    total = tl.sum(tl.exp2(sums - largest), 0)
    if sinks is not None:
        total += tl.exp2(sink - largest)
    acc = tl.zeros([DIM_PAD], dtype=tl.float32)
    for first in tl.static_range(0, ALL_PAD, AT_ONCE):
        some = first + tl.arange(0, AT_ONCE)
        at = some.to(tl.int64) * num_rows + row
        part_lse = tl.load(lse + at, mask=some < num_parts, other=-float("inf"))
        has_keys = part_lse > -float("inf")
        values = tl.load(
            parts + at[:, None] * HEAD_DIM + dim[None, :],
            mask=has_keys[:, None] & (dim < HEAD_DIM)[None, :],
            other=0.0,
        )
        acc += tl.sum(values * tl.exp2(part_lse - largest)[:, None], 0)
    acc = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * HEAD_DIM + dim, acc.to(out.dtype.element_ty), mask=dim < HEAD_DIM)


def parts_at_once(num_parts: int, head_dim: int) -> int:
    """The number of parts that a program reads together: about 2,048 numbers, 16 per thread of four warps."""
    return max(1, min(triton.next_power_of_2(num_parts), 2048 // triton.next_power_of_2(head_dim)))


def _case(name: str, out: str, head_dim: int, num_parts: int, sinks: bool, **more) -> AotCase:
    signature = {"parts": "*fp32", "lse": "*fp32", "out": f"*{out}", "num_rows": "i32", "num_parts": "i32"}
    constexprs = {
        "NUM_HEADS": 32,
        "HEAD_DIM": head_dim,
        "DIM_PAD": triton.next_power_of_2(head_dim),
        "ALL_PAD": triton.next_power_of_2(num_parts),
        "AT_ONCE": parts_at_once(num_parts, head_dim),
    }
    if sinks:
        signature["sinks"] = f"*{out}"
    else:
        constexprs["sinks"] = None
    return AotCase(f"merge {name}", merge_kernel, signature, constexprs, **more)


AOT = [
    _case("bf16 d128, 33 parts", "bf16", 128, 33, sinks=False, num_warps=4, quick=True),
    _case("bf16 d64, 2 parts, sinks", "bf16", 64, 2, sinks=True, num_warps=1),
    _case("fp32 d128, 8 parts", "fp32", 128, 8, sinks=False, num_warps=4),
]
