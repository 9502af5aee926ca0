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

from batchjob.engine.sampling.slot_params import Need
from batchjob_kernels.sampling import settings_table as layout

_SORTED_WIDTH = 128  # most likely tokens that are sorted for top_p before a search over the whole row


def filter_weights(weights: Tensor, settings: Tensor, needs: Need, *, may_wait: bool) -> None:
    """Zeroes the weights that the rows' filters leave out, in place.

    `weights` is [rows, groups, width] float32; the largest of each row is 1. With `may_wait` the most likely tokens
    are looked at before the whole row: faster, but for the device the host would wait.
    """
    if needs & Need.TOP_K:
        top_k = settings[:, layout.TOP_K, None].long()
        bound = _kth_largest(weights, top_k) if may_wait else _search_kth(weights, top_k)
        _keep(weights, torch.where(top_k > 0, bound, 0))
    if needs & Need.TOP_P:
        top_p = settings.view(torch.float64)[:, layout.TOP_P // 2]
        mass = top_p * _mass(weights)
        bound = _last_of_mass(weights, mass) if may_wait else _search_mass(weights, mass)
        _keep(weights, torch.where(top_p[:, None] < 1, bound, 0))
    if needs & Need.MIN_P:
        _keep(weights, settings.view(torch.float32)[:, layout.MIN_P, None])


def _keep(weights: Tensor, bound: Tensor) -> None:
    """Zeroes what lies below `bound` [rows, 1]. By a product: masked_fill is 8 times as slow on a CPU."""
    weights.mul_(torch.ge(weights, bound[:, :, None], out=torch.empty_like(weights)))


def _mass(weights: Tensor) -> Tensor:
    """The sum of each row, float64 [rows].

    Group by group: a sum of one whole row is split between threads, a sum of the rows of a batch is not, and the
    result must not tell how many rows there are.
    """
    return weights.sum(dim=2).double().sum(dim=1)


def _kth_largest(weights: Tensor, k: Tensor) -> Tensor:
    """The k-th largest weight of each row, [rows, 1], for `k` int64 [rows, 1]."""
    values = weights.flatten(1).topk(max(1, int(k.max())), dim=1).values
    return values.gather(1, (k - 1).clamp_(min=0))


def _search_kth(weights: Tensor, k: Tensor) -> Tensor:
    """The same by bisection."""
    return _bisect(weights, lambda kept: kept.flatten(1).sum(dim=1, keepdim=True) >= k)


def _last_of_mass(weights: Tensor, mass: Tensor) -> Tensor:
    """The weight [rows, 1] of the last token, in falling order, that is needed for a `mass` [rows]."""
    values = weights.flatten(1).topk(min(_SORTED_WIDTH, weights[0].numel()), dim=1).values
    before = (values.double().cumsum(dim=1) < mass[:, None]).sum(dim=1, keepdim=True)
    bound = values.gather(1, before.clamp(max=values.shape[1] - 1))
    flat = (before == values.shape[1]).squeeze(1).nonzero().squeeze(1)
    if len(flat):
        bound[flat] = _search_mass(weights if len(flat) == len(weights) else weights[flat], mass[flat])
    return bound


def _search_mass(weights: Tensor, mass: Tensor) -> Tensor:
    """The same by bisection: 3 to 30 times as fast as a sort of the vocabulary."""
    return _bisect(weights, lambda kept: (_mass(kept.mul_(weights)) >= mass)[:, None])


def _bisect(weights: Tensor, is_enough: Callable[[Tensor], Tensor]) -> Tensor:
    """The largest bound [rows, 1] that keeps enough; 0 where nothing is enough.

    `is_enough` gets what a bound keeps, 1 or 0 as float32 [rows, groups, width], to work in, and returns bool
    [rows, 1]. Bisection over the bit patterns of float32, which are in order from 0 to 1: 30 passes over memory,
    whatever the row.
    """
    low = torch.zeros(len(weights), 1, dtype=torch.int32, device=weights.device)
    high = torch.full_like(low, 0x3F800001)  # just above 1: nothing is left
    kept = torch.empty_like(weights)
    for _ in range(30):
        middle = (low + high) // 2
        torch.ge(weights, middle.view(torch.float32)[:, :, None], out=kept)
        enough = is_enough(kept)
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return low.view(torch.float32)
