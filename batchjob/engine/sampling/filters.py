"""top_k, top_p and min_p as one bound per row on the weights of its tokens.

A weight is a probability up to a factor per row, in float32. Each filter keeps the tokens with at least some weight,
so ties are treated alike: top_k keeps every token as probable as the k-th, top_p every token as probable as the last
one needed to reach p, min_p every token with at least that share of the best. They apply in this order; top_p counts
what top_k has left as the whole.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from batchjob.sampling import SamplingParams

_SORTED_WIDTH = 128  # most likely tokens that are sorted for top_p before a search over the whole row


def filter_weights(weights: Tensor, params: list[SamplingParams]) -> None:
    """Zeroes the weights that the rows' filters leave out, in place.

    `weights` is [rows, groups, width] float32; the largest of each row is 1.
    """
    device = weights.device
    rows = [row for row, p in enumerate(params) if 0 < p.top_k < weights[0].numel()]
    if rows:
        part, index = _part(weights, rows)
        top_k = torch.tensor([params[row].top_k for row in rows], device=device)
        values = part.flatten(1).topk(max(params[row].top_k for row in rows), dim=1).values
        _keep(weights, part, index, values.gather(1, top_k[:, None] - 1))
    rows = [row for row, p in enumerate(params) if p.top_p < 1.0]
    if rows:
        part, index = _part(weights, rows)
        share = torch.tensor([params[row].top_p for row in rows], dtype=torch.float64, device=device)
        _keep(weights, part, index, _top_p_bound(part, share * _mass(part)))
    rows = [row for row, p in enumerate(params) if p.min_p > 0.0]
    if rows:
        part, index = _part(weights, rows)
        _keep(weights, part, index, torch.tensor([[params[row].min_p] for row in rows], device=device))


def filter_batched(weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> None:
    """What `filter_weights` does, with the settings of the rows on their device and no step that waits for it.

    `top_k` int32, `top_p` float64 and `min_p` float32 are [rows]; 0, 1 and 0 keep everything. Here both searches
    always cover the whole row.
    """
    number = top_k[:, None]
    bound = _bisect(weights, lambda kept: kept.flatten(1).sum(dim=1, keepdim=True) >= number)
    weights.mul_(weights >= torch.where(number > 0, bound, 0)[:, :, None])
    bound = _search(weights, top_p * _mass(weights))
    weights.mul_(weights >= torch.where(top_p[:, None] < 1, bound, 0)[:, :, None])
    weights.mul_(weights >= min_p[:, None, None])


def _part(weights: Tensor, rows: list[int]) -> tuple[Tensor, Tensor | None]:
    """The weights of some rows (a copy, unless it is all of them) and their index."""
    if len(rows) == len(weights):
        return weights, None
    index = torch.tensor(rows, device=weights.device)
    return weights[index], index


def _keep(weights: Tensor, part: Tensor, index: Tensor | None, bound: Tensor) -> None:
    """Zeroes what lies below `bound` [rows, 1]. By a product: masked_fill is 8 times as slow on a CPU."""
    part.mul_(torch.ge(part, bound[:, :, None], out=torch.empty_like(part)))
    if index is not None:
        weights[index] = part


def _mass(weights: Tensor) -> Tensor:
    """The sum of each row, float64 [rows].

    Group by group: a sum of one whole row is split between threads, a sum of the rows of a batch is not, and the
    result must not tell how many rows there are.
    """
    return weights.sum(dim=2).double().sum(dim=1)


def _top_p_bound(weights: Tensor, needed: Tensor) -> Tensor:
    """The weight [rows, 1] of the last token, in falling order, that is needed for a mass of `needed` [rows]."""
    values = weights.flatten(1).topk(min(_SORTED_WIDTH, weights[0].numel()), dim=1).values
    before = (values.double().cumsum(dim=1) < needed[:, None]).sum(dim=1, keepdim=True)
    bound = values.gather(1, before.clamp(max=values.shape[1] - 1))
    flat = (before == values.shape[1]).squeeze(1).nonzero().squeeze(1)
    if len(flat):
        bound[flat] = _search(weights if len(flat) == len(weights) else weights[flat], needed[flat])
    return bound


def _search(weights: Tensor, needed: Tensor) -> Tensor:
    """What `_top_p_bound` returns, by bisection: 3 to 30 times as fast as a sort of the vocabulary."""
    return _bisect(weights, lambda kept: (_mass(kept.mul_(weights)) >= needed)[:, None])


def _bisect(weights: Tensor, enough: Callable[[Tensor], Tensor]) -> Tensor:
    """The largest bound [rows, 1] that keeps enough; 0 where nothing is enough.

    `enough` gets what a bound keeps, 1 or 0 as float32 [rows, groups, width], to work in, and returns bool [rows, 1].
    Bisection over the bit patterns of float32, which are in order from 0 to 1: 30 passes over memory, whatever the row.
    """
    low = torch.zeros(len(weights), 1, dtype=torch.int32, device=weights.device)
    high = torch.full_like(low, 0x3F800001)  # just above 1: nothing is left
    kept = torch.empty_like(weights)
    for _ in range(30):
        middle = (low + high) // 2
        torch.ge(weights, middle.view(torch.float32)[:, :, None], out=kept)
        is_enough = enough(kept)
        low, high = torch.where(is_enough, middle, low), torch.where(is_enough, high, middle)
    return low.view(torch.float32)
