# mypy: ignore-errors
"""First level of the draw: the best logit of each group of 256 tokens, and the group's weight around it.

Reads the logits once, in 16-byte pieces where their width allows it; nothing is written but two numbers per group.
Greedy rows need the maxima alone, so this is also the first of the two stages of the argmax.
"""

from __future__ import annotations

import triton
import triton.language as tl

from batchjob_kernels.sampling import settings_table as layout
from batchjob_kernels.triton_kernels.aot_case import AotCase

GROUPS_AT_ONCE = 8  # groups per program: 2,048 logits, 16 per thread of four warps

_GROUP = tl.constexpr(layout.GROUP)
_TEMPERATURE = tl.constexpr(layout.TEMPERATURE)
_SETTINGS = tl.constexpr(layout.WIDTH)


@triton.jit(do_not_specialize_on_alignment=["slots", "maxima", "sums", "best", "bounds"])
def groups_kernel(
    logits,  # [n, vocab]
    logits_stride,
    settings,  # [slots, _SETTINGS] as float32
    slots,
    maxima,  # out: [n, num_groups]; +inf where a group has a NaN
    sums,  # out: [n, num_groups] of exp((logit - maximum of the group) / temperature)
    best,  # [n]: of the whole row; read where FILTERED
    bounds,  # [n]: on exp((logit - best) / temperature); lighter tokens count as 0
    vocab,
    num_groups,
    RANDOM: tl.constexpr,
    FILTERED: tl.constexpr,
    GROUPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    token = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    inside = token < vocab
    logit = tl.load(logits + row * logits_stride + token, mask=inside).to(tl.float32)
    logit = tl.where(inside, logit, -float("inf"))
    logit = tl.where(logit == logit, logit, float("inf"))
    maximum = tl.max(logit, axis=1)
    out = row * num_groups + group
    tl.store(maxima + out, maximum, mask=group < num_groups)
    if RANDOM:
        slot = tl.load(slots + row).to(tl.int64)
        temperature = tl.load(settings + slot * _SETTINGS + _TEMPERATURE)
        temperature = tl.where(temperature > 0.0, temperature, 1.0)
        around = tl.where(maximum == -float("inf"), 0.0, maximum)
        weight = tl.exp((logit - around[:, None]) / temperature)
        if FILTERED:
            share = tl.exp((logit - tl.load(best + row)) / temperature)
            weight = tl.where(share >= tl.load(bounds + row), weight, 0.0)
        tl.store(sums + out, tl.sum(weight, axis=1), mask=group < num_groups)


def _case(name: str, dtype: str, **constexprs: bool) -> AotCase:
    signature = {
        "logits": f"*{dtype}",
        "logits_stride": "i64",
        "settings": "*fp32",
        "slots": "*i32",
        "maxima": "*fp32",
        "sums": "*fp32",
        "best": "*fp32",
        "bounds": "*fp32",
        "vocab": "i32",
        "num_groups": "i32",
    }
    return AotCase(f"groups {name}", groups_kernel, signature, {**constexprs, "GROUPS": GROUPS_AT_ONCE}, num_warps=4)


AOT = [
    _case("greedy bf16", "bf16", RANDOM=False, FILTERED=False),
    _case("random bf16", "bf16", RANDOM=True, FILTERED=False),
    _case("filtered bf16", "bf16", RANDOM=True, FILTERED=True),
    _case("random fp16", "fp16", RANDOM=True, FILTERED=False),
    _case("filtered fp32", "fp32", RANDOM=True, FILTERED=True),
]
