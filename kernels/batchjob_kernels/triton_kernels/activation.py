# mypy: ignore-errors
"""Gated activation: act(gate) * up, of the two halves of a merged product."""

from __future__ import annotations

import triton
import triton.language as tl

from batchjob_kernels.triton_kernels.aot_case import AotCase

BLOCK = 1024  # with 4 warps, one 16-byte load of float16 from each half per thread
NUM_WARPS = 4


@triton.jit
def act_and_mul_kernel(
    gate_up_ptr,
    out_ptr,
    SIZE: tl.constexpr,  # of one half; a constant, so that the compiler knows how rows are aligned
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    gate = tl.load(gate_up_ptr + row * (2 * SIZE) + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * (2 * SIZE) + SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        gate = gate * tl.sigmoid(gate)
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(y)) / 2 = sigmoid(2 y), with y = sqrt(2 / pi) * (x + 0.044715 x^3)
        gate = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    tl.store(out_ptr + row * SIZE + columns, (gate * up).to(out_ptr.dtype.element_ty), mask=inside)


def _case(size: int, dtype: str, activation: str) -> AotCase:
    constants = {"SIZE": size, "BLOCK": BLOCK, "ACTIVATION": activation}
    signature = {"gate_up_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", **dict.fromkeys(constants, "constexpr")}
    name = f"act_and_mul {activation} {dtype} {size}"
    quick = (size, dtype) == (12288, "bf16")
    return AotCase(name, act_and_mul_kernel, signature, constants, num_warps=NUM_WARPS, quick=quick)


AOT = [
    _case(3072, "bf16", "silu"),
    _case(12288, "bf16", "silu"),
    _case(14336, "fp16", "silu"),
    _case(9216, "bf16", "gelu_tanh"),
    _case(9216, "bf16", "gelu"),
]
