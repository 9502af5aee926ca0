"""Paged attention in PyTorch at speed: blocks are gathered into dense keys and values, which PyTorch's own attention
reads. Decode rows go in groups of about one length; blocks that many rows share are read once (`pieces`).

Two results over disjoint keys, each with the log-sum-exp of its scores, merge exactly (Milakov and Gimelshein, 2018,
"Online normalizer calculation for softmax"; as cascade inference in FlashInfer). A sink is one more such result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchjob_kernels.dense import attend, attend_all
from batchjob_kernels.meta import AttnMeta
from batchjob_kernels.pieces import Piece, cut


def write_kv(kv: Tensor, cache: Tensor, slots: Tensor) -> None:
    """As `reference.write_kv`."""
    cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, torch.nan_to_num(kv, nan=0.0, posinf=0.0, neginf=0.0))


def paged_attention(
    q: Tensor,
    kv: Tensor,
    cache: Tensor,
    meta: AttnMeta,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As `reference.paged_attention`."""
    num_kv_heads = cache.shape[3]
    grouped = q.unflatten(1, (num_kv_heads, -1))  # [num_tokens, kv_heads, heads per KV head, head_dim]
    pieces = cut(meta, window, q.dtype)
    if len(pieces.own) == 1 and not pieces.shared and sinks is None:
        return _run(pieces.own[0], grouped, kv, cache, scale, softcap)[0].flatten(1, 2)
    out = torch.empty_like(grouped, memory_format=torch.contiguous_format)
    needs_lse = bool(pieces.shared) or sinks is not None
    lse = torch.empty(grouped.shape[:3], dtype=torch.float32, device=q.device)
    for piece in pieces.own:
        part, part_lse = _run(piece, grouped, kv, cache, scale, softcap)
        out[piece.start : piece.stop] = part
        if needs_lse:
            lse[piece.start : piece.stop] = part_lse
    for piece in pieces.shared:
        part, part_lse = _run(piece, grouped, kv, cache, scale, softcap)
        rows, rows_lse = out[piece.start : piece.stop], lse[piece.start : piece.stop]
        rows.lerp_(part, torch.sigmoid(part_lse - rows_lse)[..., None].to(out.dtype))
        torch.logaddexp(rows_lse, part_lse, out=rows_lse)
    if sinks is not None:
        out *= torch.sigmoid(lse - sinks.float().view(num_kv_heads, -1))[..., None].to(out.dtype)
    return out.flatten(1, 2)


def _run(
    piece: Piece, q: Tensor, kv: Tensor, cache: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Output [rows, kv_heads, group, head_dim] and log-sum-exp [rows, kv_heads, group] of one piece."""
    queries = q[piece.start : piece.stop]
    if piece.block_ids is None:
        own = kv[piece.start : piece.stop]
    else:
        own = cache.flatten(1).index_select(0, piece.block_ids).view(-1, *cache.shape[2:])
    if piece.batch:
        keys, values = own.view(piece.batch, piece.kv_len, *own.shape[1:]).permute(2, 0, 3, 1, 4)
        out, lse = attend(queries, keys, values, scale=scale, softcap=softcap, mask=piece.mask)
        return out, lse
    keys, values = own[: piece.kv_len].permute(1, 2, 0, 3)  # [kv_heads, kv_len, head_dim] each
    queries = queries.permute(1, 2, 0, 3)
    if piece.mask is None and not piece.causal:
        out, lse = attend_all(queries, keys, values, scale=scale, softcap=softcap)
    else:
        keys, values = keys.unsqueeze(1), values.unsqueeze(1)
        out, lse = attend(queries, keys, values, scale=scale, softcap=softcap, mask=piece.mask, causal=piece.causal)
    return out.permute(2, 0, 1, 3), lse.permute(2, 0, 1)
