"""Paged attention in PyTorch at speed: blocks are gathered into dense keys and values, which PyTorch's own attention
reads. Decode rows go in groups of about one length; blocks that many rows share are read once (`gather_pieces`).

Two results over disjoint keys, each with the log-sum-exp of its scores, merge exactly (Milakov and Gimelshein, 2018,
"Online normalizer calculation for softmax"; as cascade inference in FlashInfer). A sink is one more such result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchjob_kernels.attention.gather_dense import attend, attend_all, attend_decode
from batchjob_kernels.attention.gather_pieces import Piece, cut
from batchjob_kernels.attention.meta import AttnMeta, Requirements
from batchjob_kernels.attention.store import kv_rows, store_kv

USES_DEVICE_LENS = False
COMPILED_FOR_BLOCK_SIZE = False


def write_kv(kv: Tensor, cache: Tensor, meta: AttnMeta) -> None:
    """As `reference.write_kv`."""
    store_kv(kv, cache, _rows(meta, cache.shape[2]))


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
    """As `reference.paged_attention`."""
    num_kv_heads = cache.shape[2]
    grouped = q.unflatten(1, (num_kv_heads, -1))  # [num_tokens, kv_heads, heads per KV head, head_dim]
    pieces = cut(meta, window=window, num_kv_heads=num_kv_heads, dtype=q.dtype)
    if kv is None and any(piece.tiles is None for piece in pieces.own):
        flat = cache.view(-1, cache.shape[4])
        kv = flat.index_select(0, _rows(meta, num_kv_heads)).view(len(q), 2, num_kv_heads, cache.shape[4])
    needs_lse = bool(pieces.shared) or sinks is not None
    if len(pieces.own) == 1 and not needs_lse:
        return _run(pieces.own[0], grouped, kv, cache, scale, softcap, needs_lse)[0].flatten(1, 2)
    out = torch.empty_like(grouped, memory_format=torch.contiguous_format)
    lse = torch.empty(grouped.shape[:3], dtype=torch.float32, device=q.device)
    for piece in pieces.own:
        part, part_lse = _run(piece, grouped, kv, cache, scale, softcap, needs_lse)
        out[piece.start : piece.stop] = part
        if part_lse is not None:
            lse[piece.start : piece.stop] = part_lse
    for piece in pieces.shared:
        part, part_lse = _run(piece, grouped, kv, cache, scale, softcap, needs_lse)
        assert part_lse is not None
        rows, rows_lse = out[piece.start : piece.stop], lse[piece.start : piece.stop]
        rows.lerp_(part, torch.sigmoid(part_lse - rows_lse)[..., None].to(out.dtype))
        torch.logaddexp(rows_lse, part_lse, out=rows_lse)
    if sinks is not None:
        out *= torch.sigmoid(lse - sinks.float().view(num_kv_heads, -1))[..., None].to(out.dtype)
    return out.flatten(1, 2)


def refusal(need: Requirements) -> str | None:
    """The reason why it cannot serve this need, or None."""
    if need.kv_dtype != need.dtype:
        return f"it reads keys and values of the queries' type only, not {need.kv_dtype}"
    if need.deterministic:
        return "its products have other shapes with other rows in the step"
    return None


def _rows(meta: AttnMeta, num_kv_heads: int) -> Tensor:
    """The rows of the cache that the step's own keys and values go to; the same for all layers of so many heads."""
    rows: Tensor | None = meta.memo.get(num_kv_heads)
    if rows is None:
        rows = meta.memo[num_kv_heads] = kv_rows(meta.slot_mapping, num_kv_heads, meta.block_size)
    return rows


def _run(
    piece: Piece, q: Tensor, kv: Tensor | None, cache: Tensor, scale: float, softcap: float | None, needs_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Output [rows, kv_heads, group, head_dim] and log-sum-exp [rows, kv_heads, group] of one piece."""
    queries = q[piece.start : piece.stop]
    num_kv_heads, head_dim = cache.shape[2], cache.shape[4]
    if piece.tiles is None:
        assert kv is not None
        keys, values = kv[piece.start : piece.stop].permute(1, 2, 0, 3)  # [kv_heads, kv_len, head_dim] each
    else:
        gathered = cache.flatten(0, 2).flatten(1).index_select(0, piece.tiles)
        keys, values = gathered.view(2, max(piece.batch, 1) * num_kv_heads, -1, head_dim)[:, :, : piece.kv_len]
    if piece.batch:
        assert piece.mask is not None
        return attend_decode(queries, keys, values, piece.mask, scale=scale, softcap=softcap, needs_lse=needs_lse)
    queries = queries.permute(1, 2, 0, 3)  # [kv_heads, group, rows, head_dim]
    if piece.mask is None and not piece.causal:
        out, lse = attend_all(queries, keys, values, scale=scale, softcap=softcap)
    else:
        mask = None if piece.mask is None else piece.mask[None, None]
        keys, values = keys.unsqueeze(1), values.unsqueeze(1)
        out, lse = attend(queries, keys, values, scale=scale, softcap=softcap, mask=mask, causal=piece.causal)
    return out.permute(2, 0, 1, 3), lse.permute(2, 0, 1)
