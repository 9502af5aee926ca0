# mypy: ignore-errors
"""Second level of the draw: the group of each row, then the token within it. One program per row.

A race of exponential draws: the winner is the argmax of weight / draw. The draws are those of
`batchjob.engine.sampling.philox`: Philox4x32-10 words, to float64 (a
float32 would round the numbers near 1, where the draws are small, and win races).

No argmax sees a NaN: which index it gives is another one on every backend. A row with a NaN has an infinite `best`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from batchjob_kernels.sampling import settings_table as layout
from batchjob_kernels.triton_kernels.aot_case import AotCase

_GROUP = tl.constexpr(layout.GROUP)
_TOKEN_LEVEL = tl.constexpr(layout.TOKEN_LEVEL)
_GROUP_LEVEL = tl.constexpr(layout.GROUP_LEVEL)
_KEY_LOW = tl.constexpr(layout.KEY_LOW)
_KEY_HIGH = tl.constexpr(layout.KEY_HIGH)
_TEMPERATURE = tl.constexpr(layout.TEMPERATURE)
_SETTINGS = tl.constexpr(layout.WIDTH)

NUM_WARPS = 8  # with 4, ptxas spills at 9.0 for vocabularies of 262,144


@triton.jit
def philox_word(key_low, key_high, index, position, level):
    """Word `index % 4` of counter (index // 4, position, level, 0); all arguments int32 bit patterns."""
    c0 = (index // 4).to(tl.uint32)
    c3 = c0 * 0
    c1, c2 = c3 + position.to(tl.uint32), c3 + level
    k0, k1 = key_low.to(tl.uint32, bitcast=True), key_high.to(tl.uint32, bitcast=True)
    a, b = tl.full([], 0xD2511F53, tl.uint32), tl.full([], 0xCD9E8D57, tl.uint32)
    step0, step1 = tl.full([], 0x9E3779B9, tl.uint32), tl.full([], 0xBB67AE85, tl.uint32)
    for _ in tl.static_range(10):
        high0, high1 = tl.umulhi(c0, a), tl.umulhi(c2, b)
        low0, low1 = c0 * a, c2 * b
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0, k1 = k0 + step0, k1 + step1
    word = index % 4
    return tl.where(word == 0, c0, tl.where(word == 1, c1, tl.where(word == 2, c2, c3)))


@triton.jit
def exponential(word):
    """Random words as draws from the exponential distribution of rate 1, float64."""
    return -tl.log((word.to(tl.float64) + 0.5) * 2.3283064365386963e-10)


@triton.jit(do_not_specialize_on_alignment=["slots", "positions", "maxima", "sums", "bounds", "tokens"])
def draw_kernel(
    logits,  # [n, vocab]
    logits_stride,
    settings,  # [slots, _SETTINGS] int32
    settings_float,  # the same memory as float32
    slots,
    positions,  # output tokens so far
    maxima,  # [n, num_groups], as `groups_kernel` leaves them
    sums,
    bounds,
    tokens,  # out: int64 [n]
    vocab,
    num_groups,
    RANDOM: tl.constexpr,
    FILTERED: tl.constexpr,
    NUM_GROUPS_PAD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, NUM_GROUPS_PAD)
    is_group = groups < num_groups
    maximum = tl.load(maxima + row * num_groups + groups, mask=is_group, other=-float("inf"))
    best = tl.max(maximum, axis=0)
    group = tl.argmax(maximum, axis=0, tie_break_left=True)
    if RANDOM:
        slot = tl.load(slots + row).to(tl.int64) * _SETTINGS
        key_low, key_high = tl.load(settings + slot + _KEY_LOW), tl.load(settings + slot + _KEY_HIGH)
        given = tl.load(settings_float + slot + _TEMPERATURE)
        temperature = tl.where(given > 0.0, given, 1.0)
        position = tl.load(positions + row).to(tl.int32)
        mass = tl.load(sums + row * num_groups + groups, mask=is_group, other=0.0)
        mass = mass * tl.exp((maximum - best) / temperature)
        noise = exponential(philox_word(key_low, key_high, groups, position, _GROUP_LEVEL))
        race = tl.where(is_group & (mass == mass), mass.to(tl.float64) / noise, -1.0)
        group = tl.where(given > 0.0, tl.argmax(race, axis=0, tie_break_left=True), group)
    token = group * _GROUP + tl.arange(0, _GROUP)
    inside = token < vocab
    logit = tl.load(logits + row * logits_stride + token, mask=inside).to(tl.float32)
    logit = tl.where(inside & (logit == logit), logit, -float("inf"))
    winner = tl.argmax(logit, axis=0, tie_break_left=True)
    if RANDOM:
        weight = tl.exp((logit - best) / temperature)
        if FILTERED:
            weight = tl.where(weight >= tl.load(bounds + row), weight, 0.0)
        noise = exponential(philox_word(key_low, key_high, token, position, _TOKEN_LEVEL))
        race = tl.where(inside & (weight == weight), weight.to(tl.float64) / noise, -1.0)
        winner = tl.where(given > 0.0, tl.argmax(race, axis=0, tie_break_left=True), winner)
    is_finite = (best < float("inf")) & (best > -float("inf"))
    tl.store(tokens + row, tl.where(is_finite, group * _GROUP + winner, -1).to(tl.int64))


def _case(name: str, dtype: str, vocab: int, **constexprs: bool) -> AotCase:
    signature = {
        "logits": f"*{dtype}",
        "logits_stride": "i64",
        "settings": "*i32",
        "settings_float": "*fp32",
        "slots": "*i32",
        "positions": "*i32",
        "maxima": "*fp32",
        "sums": "*fp32",
        "bounds": "*fp32",
        "tokens": "*i64",
        "vocab": "i32",
        "num_groups": "i32",
    }
    pad = triton.next_power_of_2(-(-vocab // layout.GROUP))
    constexprs = {**constexprs, "NUM_GROUPS_PAD": pad}
    return AotCase(f"draw {name}", draw_kernel, signature, constexprs, num_warps=NUM_WARPS, wide_loads=False)


AOT = [
    _case("greedy bf16, 152k", "bf16", 151_936, RANDOM=False, FILTERED=False),
    _case("random bf16, 152k", "bf16", 151_936, RANDOM=True, FILTERED=False),
    _case("filtered bf16, 262k", "bf16", 262_144, RANDOM=True, FILTERED=True),
    _case("filtered fp32, 32k", "fp32", 32_000, RANDOM=True, FILTERED=True),
]
