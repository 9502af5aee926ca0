# mypy: ignore-errors
"""top_k, top_p and min_p as one bound per row on exp((logit - best) / temperature). One program per row.

A search over the bit patterns of float32, which are in order from 0 to 1: each pass counts (or adds up) what three
bounds would keep, and quarters the interval. Tiles whose best token lies below the interval are left out, which after
a few passes are nearly all of them in a row that is worth filtering.
"""

from __future__ import annotations

import triton
import triton.language as tl

from batchjob_kernels.sampling import settings_table as layout
from batchjob_kernels.triton_kernels.aot_case import AotCase

_GROUPS = tl.constexpr(4)  # per tile: 1,024 logits, 8 per thread of four warps
_TILE = tl.constexpr(4 * layout.GROUP)
_GROUP = tl.constexpr(layout.GROUP)
_TEMPERATURE = tl.constexpr(layout.TEMPERATURE)
_MIN_P = tl.constexpr(layout.MIN_P)
_TOP_K = tl.constexpr(layout.TOP_K)
_TOP_P = tl.constexpr(layout.TOP_P // 2)
_SETTINGS = tl.constexpr(layout.WIDTH)
_ABOVE_ONE = tl.constexpr(0x3F800001)  # the float32 after 1: as a bound it keeps nothing


@triton.jit
def keep(row, maxima, best, temperature, vocab, num_groups, low, middle, high, COUNT: tl.constexpr):
    """The number (or sum) of the weights that each of three bounds, in rising order, keeps."""
    some = tl.arange(0, _GROUPS)
    number_low = tl.full([_TILE], 0.0, tl.float32)
    number_middle = tl.full([_TILE], 0.0, tl.float32)
    number_high = tl.full([_TILE], 0.0, tl.float32)
    first = tl.full([], 0, tl.int32)
    while first < num_groups:  # a range over a number from the device is beyond Triton 3.6's interpreter
        maximum = tl.load(maxima + first + some, mask=first + some < num_groups, other=-float("inf"))
        # A little too much never leaves out a token for the last bit of an exponential.
        if tl.exp((tl.max(maximum, axis=0) - best) / temperature) * 1.001 >= low:
            token = first * _GROUP + tl.arange(0, _TILE)
            inside = token < vocab
            logit = tl.load(row + token, mask=inside).to(tl.float32)
            weight = tl.exp((tl.where(inside, logit, -float("inf")) - best) / temperature)
            value = weight
            if COUNT:
                value = tl.where(inside, 1.0, 0.0)
            number_low += tl.where(weight >= low, value, 0.0)
            number_middle += tl.where(weight >= middle, value, 0.0)
            number_high += tl.where(weight >= high, value, 0.0)
        first += _GROUPS
    return tl.sum(number_low, axis=0), tl.sum(number_middle, axis=0), tl.sum(number_high, axis=0)


@triton.jit
def search(row, maxima, best, temperature, vocab, num_groups, low, needed, COUNT: tl.constexpr):
    """The largest bound, as a bit pattern, that keeps at least `needed`; `low` does."""
    high = tl.full([], _ABOVE_ONE, tl.int32)
    while high - low > 1:
        step = (high - low + 3) // 4
        at1, at2, at3 = low + step, tl.minimum(low + 2 * step, high), tl.minimum(low + 3 * step, high)
        kept1, kept2, kept3 = keep(
            row,
            maxima,
            best,
            temperature,
            vocab,
            num_groups,
            at1.to(tl.float32, bitcast=True),
            at2.to(tl.float32, bitcast=True),
            at3.to(tl.float32, bitcast=True),
            COUNT,
        )
        new_low = tl.where(kept3 >= needed, at3, tl.where(kept2 >= needed, at2, tl.where(kept1 >= needed, at1, low)))
        high = tl.where(kept1 < needed, at1, tl.where(kept2 < needed, at2, tl.where(kept3 < needed, at3, high)))
        low = new_low
    return low


@triton.jit(do_not_specialize_on_alignment=["slots", "maxima", "best_out", "bounds"])
def bounds_kernel(
    logits,  # [n, vocab]
    logits_stride,
    settings,  # [slots, _SETTINGS] int32
    settings_float,  # the same memory as float32
    settings_double,  # and as float64
    slots,
    maxima,  # [n, num_groups], as `groups_kernel` leaves them
    best_out,  # out: the largest logit [n]
    bounds,  # out: [n]
    vocab,
    num_groups,
    NUM_GROUPS_PAD: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, NUM_GROUPS_PAD)
    maxima += index * num_groups
    best = tl.max(tl.load(maxima + groups, mask=groups < num_groups, other=-float("inf")), axis=0)
    slot = tl.load(slots + index).to(tl.int64)
    temperature = tl.load(settings_float + slot * _SETTINGS + _TEMPERATURE)
    top_k = tl.load(settings + slot * _SETTINGS + _TOP_K)
    top_p = tl.load(settings_double + slot * (_SETTINGS // 2) + _TOP_P).to(tl.float32)
    bound = tl.load(settings_float + slot * _SETTINGS + _MIN_P)
    row = logits + index * logits_stride
    if (temperature > 0.0) & (best > -float("inf")) & (best < float("inf")):
        low = tl.full([], 0, tl.int32)
        if top_k > 0:
            low = search(row, maxima, best, temperature, vocab, num_groups, low, top_k.to(tl.float32), True)
        if top_p < 1.0:
            least = low.to(tl.float32, bitcast=True)
            total, _, _ = keep(row, maxima, best, temperature, vocab, num_groups, least, least, least, False)
            low = search(row, maxima, best, temperature, vocab, num_groups, low, top_p * total, False)
        bound = tl.maximum(bound, low.to(tl.float32, bitcast=True))
    tl.store(best_out + index, best)
    tl.store(bounds + index, bound)


def _case(name: str, dtype: str, vocab: int) -> AotCase:
    signature = {
        "logits": f"*{dtype}",
        "logits_stride": "i64",
        "settings": "*i32",
        "settings_float": "*fp32",
        "settings_double": "*fp64",
        "slots": "*i32",
        "maxima": "*fp32",
        "best_out": "*fp32",
        "bounds": "*fp32",
        "vocab": "i32",
        "num_groups": "i32",
    }
    constexprs = {"NUM_GROUPS_PAD": triton.next_power_of_2(-(-vocab // layout.GROUP))}
    return AotCase(f"bounds {name}", bounds_kernel, signature, constexprs, num_warps=4)


AOT = [_case("bf16, 152k", "bf16", 151_936), _case("fp32, 262k", "fp32", 262_144)]
