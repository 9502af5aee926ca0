"""Sampling on a GPU by Triton kernels: greedy argmax, draw, filters, penalties and the stop check.

`settings` is the table of `settings_table`, int32 [slots, WIDTH]; `slots` [n] are the rows of it that this batch has,
`num_output_tokens` [n] how many tokens each has generated, both int32 or int64. Nothing waits for the device, and no
launch depends on what is in a tensor, so all of it can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from batchjob_kernels.sampling.settings_table import GROUP
from batchjob_kernels.triton_kernels import filter_bounds, sample_draw, sample_groups, sample_penalise, stop


def sample(
    logits: Tensor, settings: Tensor, slots: Tensor, num_output_tokens: Tensor, *, random: bool, filtered: bool
) -> Tensor:
    """The next token of each row of `logits` [n, vocab]; int64 [n], -1 where the best logit is not finite.

    With `random`, rows with a temperature are drawn; with `filtered` as well, their top_k, top_p and min_p apply.
    Float32 inside; of the logits nothing larger than two numbers per 256 is kept.
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    filtered = filtered and random
    maxima, sums = group_weights(logits, settings, slots, random=random and not filtered)
    limits = None
    if filtered:
        limits = weight_bounds(logits, settings, slots, maxima)
        maxima, sums = group_weights(logits, settings, slots, random=True, limits=limits)
    return draw(logits, settings, slots, num_output_tokens, maxima, sums, limits, random=random)


def group_weights(
    logits: Tensor, settings: Tensor, slots: Tensor, *, random: bool, limits: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Per group of 256 tokens, float32 [n, groups]: the largest logit, and if `random` the sum of the weights.

    A weight here is exp((logit - largest of the group) / temperature). `limits` is what `weight_bounds` returns.
    The sums are the same, to the last bit, with limits that keep everything and without any.
    """
    num_rows, vocab = logits.shape
    num_groups = triton.cdiv(vocab, GROUP)
    maxima, sums = torch.empty(2, num_rows, num_groups, dtype=torch.float32, device=logits.device)
    best, bounds = limits if limits is not None else (maxima, maxima)  # not read without
    if num_rows:
        sample_groups.groups_kernel[(num_rows, triton.cdiv(num_groups, sample_groups.GROUPS_AT_ONCE))](
            logits,
            logits.stride(0),
            settings.view(torch.float32),
            slots,
            maxima,
            sums,
            best,
            bounds,
            vocab,
            num_groups,
            RANDOM=random,
            FILTERED=limits is not None,
            GROUPS=sample_groups.GROUPS_AT_ONCE,
            num_warps=4,
        )
    return maxima, sums


def weight_bounds(logits: Tensor, settings: Tensor, slots: Tensor, maxima: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row, and the least weight exp((logit - largest) / temperature) that its filters keep.

    Both float32 [n]; `maxima` is of `group_weights`.
    """
    (num_rows, vocab), num_groups = logits.shape, maxima.shape[1]
    best, bounds = torch.empty(2, num_rows, dtype=torch.float32, device=logits.device)
    if num_rows:
        filter_bounds.bounds_kernel[(num_rows,)](
            logits,
            logits.stride(0),
            settings,
            settings.view(torch.float32),
            settings.view(torch.float64),
            slots,
            maxima,
            best,
            bounds,
            vocab,
            num_groups,
            NUM_GROUPS_PAD=triton.next_power_of_2(num_groups),
            num_warps=4,
        )
    return best, bounds


def draw(
    logits: Tensor,
    settings: Tensor,
    slots: Tensor,
    num_output_tokens: Tensor,
    maxima: Tensor,
    sums: Tensor,
    limits: tuple[Tensor, Tensor] | None,
    *,
    random: bool,
) -> Tensor:
    """The last part of `sample`, given what `group_weights` and, with filters, `weight_bounds` return."""
    (num_rows, vocab), num_groups = logits.shape, maxima.shape[1]
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        sample_draw.draw_kernel[(num_rows,)](
            logits,
            logits.stride(0),
            settings,
            settings.view(torch.float32),
            slots,
            num_output_tokens,
            maxima,
            sums,
            limits[1] if limits is not None else maxima,
            tokens,
            vocab,
            num_groups,
            RANDOM=random,
            FILTERED=limits is not None,
            NUM_GROUPS_PAD=triton.next_power_of_2(num_groups),
            num_warps=sample_draw.NUM_WARPS,
        )
    return tokens


def penalise(logits: Tensor, settings: Tensor, counts: Tensor, slots: Tensor) -> Tensor:
    """A float32 copy of `logits` [n, vocab] after the penalties; `counts` is int32 [slots, vocab]."""
    num_rows, vocab = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    out = torch.empty(num_rows, vocab, dtype=torch.float32, device=logits.device)
    if num_rows:
        sample_penalise.penalise_kernel[(num_rows, triton.cdiv(vocab, sample_penalise.BLOCK))](
            logits,
            logits.stride(0),
            settings.view(torch.float32),
            counts,
            slots,
            out,
            vocab,
            BLOCK=sample_penalise.BLOCK,
            num_warps=4,
        )
    return out


def ended(tokens: Tensor, settings: Tensor, stops: Tensor, slots: Tensor, num_output_tokens: Tensor) -> Tensor:
    """Checks which of `tokens` int64 [n], each after `num_output_tokens` others, end their rows; bool [n].

    By a stop token of `stops` int32 [slots, width] once min_tokens are out, by length, or as -1.
    """
    out = torch.empty(len(tokens), dtype=torch.bool, device=tokens.device)
    if len(tokens):
        stop.ended_kernel[(triton.cdiv(len(tokens), stop.BLOCK),)](
            tokens,
            settings,
            stops,
            slots,
            num_output_tokens,
            out,
            len(tokens),
            NUM_STOPS=stops.shape[1],
            BLOCK=stop.BLOCK,
            num_warps=4,
        )
    return out
