# mypy: ignore-errors
"""RMS norm of rows, with or without a residual added first. One program per row, which is read once."""

from __future__ import annotations

import triton
import triton.language as tl

from batchjob_kernels.triton_kernels.aot_case import AotCase


@triton.jit
def rms_norm_kernel(
    x_ptr,
    residual_ptr,  # read and added where HAS_RESIDUAL
    weight_ptr,
    out_ptr,
    total_ptr,  # where x + residual goes
    eps,
    offset,
    SIZE: tl.constexpr,  # of a row; a constant, so that the compiler knows how rows are aligned
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * SIZE
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    x = tl.load(x_ptr + row + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + row + columns, mask=inside, other=0.0).to(tl.float32)
        total = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row + columns, total, mask=inside)
        x = total.to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32) + offset
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    tl.store(out_ptr + row + columns, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


def num_warps(size: int) -> int:
    """Two 16-byte loads of float16 per thread, between one warp and sixteen."""
    return min(max(triton.next_power_of_2(size) // 512, 1), 16)


def _case(size: int, dtype: str, has_residual: bool) -> AotCase:
    name = f"{'add_' if has_residual else ''}rms_norm {dtype} {size}"
    pointers = dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "out_ptr", "total_ptr"), f"*{dtype}")
    constants = {"SIZE": size, "BLOCK": triton.next_power_of_2(size), "HAS_RESIDUAL": has_residual}
    signature = {**pointers, "eps": "fp32", "offset": "fp32", **dict.fromkeys(constants, "constexpr")}
    quick = (size, dtype) == (4096, "bf16")
    return AotCase(name, rms_norm_kernel, signature, constants, num_warps=num_warps(size), quick=quick)


AOT = [
    _case(size, dtype, has_residual)
    for size, dtype in ((1024, "bf16"), (4096, "bf16"), (5120, "bf16"), (4096, "fp16"))
    for has_residual in (False, True)
]
