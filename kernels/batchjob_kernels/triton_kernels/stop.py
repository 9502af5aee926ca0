# mypy: ignore-errors
"""The stop check: end and stop tokens, min_tokens, length. One launch for a step, a thread per row."""

from __future__ import annotations

import triton
import triton.language as tl

from batchjob_kernels.sampling import settings_table as layout
from batchjob_kernels.triton_kernels.aot_case import AotCase

BLOCK = 128

_MIN_TOKENS = tl.constexpr(layout.MIN_TOKENS)
_MAX_OUTPUT = tl.constexpr(layout.MAX_OUTPUT)
_SETTINGS = tl.constexpr(layout.WIDTH)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["tokens", "slots", "positions", "out"])
def ended_kernel(
    tokens,  # int64 [n]
    settings,  # int32 [slots, _SETTINGS]
    stops,  # int32 [slots, NUM_STOPS]
    slots,
    positions,  # output tokens before these
    out,  # bool [n]
    num_rows,
    NUM_STOPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    token = tl.load(tokens + row, mask=inside, other=0)
    slot = tl.load(slots + row, mask=inside, other=0).to(tl.int64)
    num_output = tl.load(positions + row, mask=inside, other=0) + 1
    is_stop = token < 0
    armed = num_output >= tl.load(settings + slot * _SETTINGS + _MIN_TOKENS, mask=inside, other=0)
    for place in range(NUM_STOPS):
        is_stop |= armed & (token == tl.load(stops + slot * NUM_STOPS + place, mask=inside, other=0))
    is_long = num_output >= tl.load(settings + slot * _SETTINGS + _MAX_OUTPUT, mask=inside, other=0)
    tl.store(out + row, is_stop | is_long, mask=inside)


def _case(num_stops: int, position: str) -> AotCase:
    signature = {
        "tokens": "*i64",
        "settings": "*i32",
        "stops": "*i32",
        "slots": "*i32",
        "positions": f"*{position}",
        "out": "*i1",
        "num_rows": "i32",
    }
    constexprs = {"NUM_STOPS": num_stops, "BLOCK": BLOCK}
    name = f"ended, {num_stops} stop tokens, {position}"
    return AotCase(name, ended_kernel, signature, constexprs, num_warps=4, wide_loads=False)


AOT = [_case(4, "i32"), _case(16, "i64")]
