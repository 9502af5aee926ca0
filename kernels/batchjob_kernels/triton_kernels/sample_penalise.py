# mypy: ignore-errors
"""Penalties: float32 logits out of logits and the token counts of the rows' slots, in one pass over both."""

from __future__ import annotations

import triton
import triton.language as tl

from batchjob_kernels.sampling import settings_table as layout
from batchjob_kernels.triton_kernels.aot_case import AotCase

BLOCK = 1024

_REPETITION = tl.constexpr(layout.REPETITION)
_PRESENCE = tl.constexpr(layout.PRESENCE)
_FREQUENCY = tl.constexpr(layout.FREQUENCY)
_SETTINGS = tl.constexpr(layout.WIDTH)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def penalise_kernel(
    logits,  # [n, vocab]
    logits_stride,
    settings,  # [slots, _SETTINGS] as float32
    counts,  # int32 [slots, vocab]: bit 0 is "seen", the rest the count in the output
    slots,
    out,  # float32 [n, vocab]
    vocab,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    slot = tl.load(slots + row).to(tl.int64)
    repetition = tl.load(settings + slot * _SETTINGS + _REPETITION)
    presence = tl.load(settings + slot * _SETTINGS + _PRESENCE)
    frequency = tl.load(settings + slot * _SETTINGS + _FREQUENCY)
    value = tl.load(logits + row * logits_stride + token, mask=inside).to(tl.float32)
    state = tl.load(counts + slot * vocab + token, mask=inside, other=0)
    number = (state >> 1).to(tl.float32)
    edited = tl.where(value < 0.0, value * repetition, value / repetition)
    edited -= tl.where(number > 0.0, presence, 0.0) + frequency * number
    tl.store(out + row * vocab + token, tl.where(state > 0, edited, value), mask=inside)


def _case(dtype: str) -> AotCase:
    signature = {
        "logits": f"*{dtype}",
        "logits_stride": "i64",
        "settings": "*fp32",
        "counts": "*i32",
        "slots": "*i32",
        "out": "*fp32",
        "vocab": "i32",
    }
    return AotCase(f"penalise {dtype}", penalise_kernel, signature, {"BLOCK": BLOCK}, num_warps=4)


AOT = [_case("bf16"), _case("fp32")]
