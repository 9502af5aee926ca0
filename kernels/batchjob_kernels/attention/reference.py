"""Paged attention in the plainest PyTorch: one sequence at a time, whole score matrices. The specification.

A query at position p attends to the keys at positions <= p, with a window w only to those > p - w. Scores are
scale * q.k, then softcap * tanh(scores / softcap) where a soft-cap is given (Gemma 2). A sink is one more logit per
head that takes part in the softmax and has no value (gpt-oss). Query head h reads KV head h // (heads / KV heads).
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchjob_kernels.attention.meta import AttnMeta, Requirements
from batchjob_kernels.attention.store import kv_rows, store_kv

USES_DEVICE_LENS = False
COMPILED_FOR_BLOCK_SIZE = False


def write_kv(kv: Tensor, cache: Tensor, meta: AttnMeta) -> None:
    """Stores new keys and values: `kv` [num_tokens, 2, num_kv_heads, head_dim] into `cache` at `meta.slot_mapping`, as
    `store_kv` does."""
    store_kv(kv, cache, kv_rows(meta.slot_mapping, cache.shape[2], meta.block_size))


def paged_attention(
    q: Tensor,
    kv: Tensor | None,
    cache: Tensor,
    meta: AttnMeta,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`q` [num_tokens, num_heads, head_dim] of all sequences -> output of the same shape.

    The cache must already hold the step's own keys and values; `kv` is what was written, for backends that can use it,
    or None where the caller does not have it at hand.
    `sinks` is [num_heads].
    """
    num_heads, num_kv_heads = q.shape[1], cache.shape[2]
    out = torch.empty_like(q)
    kv_lens, block_table = meta.kv_lens, meta.block_table
    if meta.device_lens is not None:
        kv_lens, block_table = meta.device_lens.kv_lens.tolist(), block_table[meta.device_lens.table_rows]
    start = 0
    for row, (query_len, kv_len) in enumerate(zip(meta.query_lens, kv_lens, strict=True)):
        num_blocks = -(-kv_len // meta.block_size)
        tiles = cache[block_table[row, :num_blocks].long()].float()
        own = tiles.permute(0, 3, 1, 2, 4).flatten(0, 1)[:kv_len]  # [kv_len, 2, kv_heads, head_dim]
        keys, values = own.repeat_interleave(num_heads // num_kv_heads, dim=2).unbind(1)
        scores = torch.einsum("qhd,khd->hqk", q[start : start + query_len].float(), keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        key_position = torch.arange(kv_len, device=q.device)
        query_position = key_position[kv_len - query_len :, None]
        hidden = key_position > query_position
        if window is not None:
            hidden |= key_position <= query_position - window
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, query_len, 1)), dim=2)
        weights = torch.softmax(scores, dim=2)[:, :, :kv_len]
        out[start : start + query_len] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
        start += query_len
    return out


def refusal(need: Requirements) -> str | None:
    """The reason why it cannot serve this need, or None."""
    return "its products have other shapes with other rows in the step" if need.deterministic else None
