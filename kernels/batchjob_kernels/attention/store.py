"""Writing keys and values into the paged cache with PyTorch, and reading them by row: what the PyTorch backends share.

A row is the key or the value of one token and KV head: the cache of a layer seen as [-1, head_dim].
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_FP8 = 448.0  # the largest number of float8_e4m3fn; beyond it a cast gives NaN


def kv_rows(slot_mapping: Tensor, num_kv_heads: int, block_size: int) -> Tensor:
    """The rows of each slot: int64 [num_tokens] -> [num_tokens * 2 * num_kv_heads], keys before values."""
    num_parts = 2 * num_kv_heads
    first = slot_mapping // block_size * (num_parts * block_size) + slot_mapping % block_size
    return (first[:, None] + block_size * torch.arange(num_parts, device=slot_mapping.device)).flatten()


def store_kv(kv: Tensor, cache: Tensor, rows: Tensor) -> None:
    """Stores `kv` [num_tokens, 2, num_kv_heads, head_dim] in the rows that `kv_rows` gives for its tokens.

    Numbers that are not finite are stored as zero. Masked places of a block are read and multiplied by zero, so a NaN
    that one broken row leaves there would otherwise reach the next owner of the block. An FP8 cache stores its largest
    number where that is exceeded.
    """
    finite = torch.nan_to_num(kv, nan=0.0, posinf=0.0, neginf=0.0)
    if cache.dtype == torch.float8_e4m3fn:
        finite = finite.float().clamp(-MAX_FP8, MAX_FP8)
    flat = finite.to(cache.dtype).reshape(-1, cache.shape[4])
    _by_row(cache).index_copy_(0, rows, flat.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else flat)


def read_rows(cache: Tensor, rows: Tensor) -> Tensor:
    """Rows of the cache [len(rows), head_dim], in float32."""
    return _by_row(cache).index_select(0, rows).view(cache.dtype).float()


def _by_row(cache: Tensor) -> Tensor:
    """A view; of bytes where the cache is FP8, a type that PyTorch neither selects nor copies by index."""
    flat = cache.view(-1, cache.shape[4])
    return flat.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else flat
