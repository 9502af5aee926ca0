"""Paged attention whose every bit is a function of a query, its position and its keys: for deterministic mode.

Nothing in the arithmetic of a row follows the step that the row is in. Queries lie in tiles of `TILE` rows, that of
position p at place p % TILE, whether its neighbours are in the step or not; keys and values are read in chunks of
`CHUNK` positions, counted from position 0; a tile goes through its chunks in ascending order with an online softmax
(Milakov and Gimelshein, 2018). Every product has one shape: a fixed number of tiles times the KV heads side by side,
missing ones padded. So a prompt computed whole, in any parts, or token by token gives the same numbers.

All of it is in float32, also where queries and cache are not. Needs no more of a device than PyTorch does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from batchjob_kernels.attention.invariant_products import bmm, single_thread
from batchjob_kernels.attention.meta import AttnMeta, Requirements
from batchjob_kernels.attention.store import kv_rows, read_rows, store_kv

USES_DEVICE_LENS = False
COMPILED_FOR_BLOCK_SIZE = False

TILE = 4  # query positions; a decode row computes as many, so it stays small
CHUNK = 128  # key positions; a multiple of TILE, so that all queries of a tile end in one chunk
# Tiles of one product. Part of what fixes the bits: never to follow the step.
_TILES_PER_PRODUCT = {"cpu": 8, "cuda": 64}


def refusal(need: Requirements) -> str | None:
    """The reason why it cannot serve this need, or None."""
    if need.device.type not in _TILES_PER_PRODUCT:
        return f"the invariant backend runs on a CPU or a CUDA device, not on {need.device.type!r}"
    return None


def write_kv(kv: Tensor, cache: Tensor, meta: AttnMeta) -> None:
    """As `reference.write_kv`."""
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
    """As `reference.paged_attention`; `kv` is not used. Waits for lengths on the device, where there are any."""
    num_kv_heads = cache.shape[2]
    plan = _plan(meta, window, q.device)
    out = q.new_empty(plan.num_places, *q.shape[1:], dtype=torch.float32)
    tiles = torch.zeros_like(out).index_copy_(0, plan.places, q.float())
    with single_thread():
        for index, group in enumerate(plan.groups):
            span = slice(index * plan.places_per_group, (index + 1) * plan.places_per_group)
            out[span] = _attend(tiles[span], cache, meta, group, num_kv_heads, scale, softcap, sinks)
    return out.index_select(0, plan.places).to(q.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """The keys and values that each tile of a group reads next."""

    block: Tensor  # int64 [tiles, CHUNK]: where the keys and values lie
    offset: Tensor  # int64 [tiles, CHUNK], within the block
    hidden: Tensor  # bool [tiles, 1, TILE, 1, CHUNK]


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    places: Tensor  # int64 [num_tokens]: where a query lies among the places of all tiles
    num_places: int
    places_per_group: int
    groups: list[list[_Chunk]]


def _plan(meta: AttnMeta, window: int | None, device: torch.device) -> _Plan:
    """The same for all layers with this window. Kept in `meta`."""
    plan: _Plan | None = meta.memo.get(("invariant", window))
    if plan is None:
        plan = meta.memo["invariant", window] = _make_plan(meta, window, device)
    return plan


def _make_plan(meta: AttnMeta, window: int | None, device: torch.device) -> _Plan:
    tiles_per_group = _TILES_PER_PRODUCT[device.type]
    kv_lens = meta.kv_lens if meta.device_lens is None else meta.device_lens.kv_lens.tolist()
    tiles = [
        (row, start)
        for row, (query_len, kv_len) in enumerate(zip(meta.query_lens, kv_lens, strict=True))
        for start in range((kv_len - query_len) // TILE * TILE, kv_len, TILE)
    ]

    def first_chunk(start: int) -> int:
        return 0 if window is None else max(0, start - window + 1) // CHUNK

    # Tiles with about as many chunks go together. Which ones do is seen in no bit.
    tiles.sort(key=lambda tile: tile[1] // CHUNK - first_chunk(tile[1]))
    place_of = {tile: index * TILE for index, tile in enumerate(tiles)}
    places = [
        place_of[row, position // TILE * TILE] + position % TILE
        for row, (query_len, kv_len) in enumerate(zip(meta.query_lens, kv_lens, strict=True))
        for position in range(kv_len - query_len, kv_len)
    ]
    groups = []
    for begin in range(0, len(tiles), tiles_per_group):
        members = tiles[begin : begin + tiles_per_group]
        missing = tiles_per_group - len(members)
        rows = [row for row, _ in members] + [0] * missing
        starts = [start for _, start in members] + [0] * missing
        firsts = [first_chunk(start) for start in starts]
        counts = [start // CHUNK - first + 1 for first, (_, start) in zip(firsts, members, strict=False)]
        groups.append(_chunks(meta, rows, starts, firsts, counts + [0] * missing, window, device))
    return _Plan(
        torch.tensor(places, device=device),
        num_places=len(groups) * tiles_per_group * TILE,
        places_per_group=tiles_per_group * TILE,
        groups=groups,
    )


def _chunks(
    meta: AttnMeta,
    rows: list[int],
    starts: list[int],
    firsts: list[int],
    counts: list[int],
    window: int | None,
    device: torch.device,
) -> list[_Chunk]:
    """The chunks of one group. The lists give, by tile: the sequence, the first position, the first chunk and how many
    chunks. A tile that has no more hides all keys."""
    table = meta.block_table
    if meta.device_lens is not None:
        table = table[meta.device_lens.table_rows.long()]
    table = table[torch.tensor(rows, device=device)].long()
    query = torch.tensor(starts, device=device)[:, None, None] + torch.arange(TILE, device=device)[:, None]
    first, count = (torch.tensor(values, device=device)[:, None] for values in (firsts, counts))
    chunks = []
    for step in range(max(counts)):
        key = (first + step) * CHUNK + torch.arange(CHUNK, device=device)  # [tiles, CHUNK]
        column = (key // meta.block_size).clamp_(max=table.shape[1] - 1)  # what is read beyond is hidden
        hidden = (key[:, None] > query) | (step >= count)[:, None]
        if window is not None:
            hidden |= key[:, None] <= query - window
        chunks.append(_Chunk(table.gather(1, column), key % meta.block_size, hidden[:, None, :, None]))
    return chunks


def _attend(
    q: Tensor,
    cache: Tensor,
    meta: AttnMeta,
    chunks: list[_Chunk],
    num_kv_heads: int,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Places [tiles * TILE, heads, head_dim] of one group -> the same shape. All float32, every step of one shape."""
    num_heads, dim = q.shape[1:]
    group = num_heads // num_kv_heads
    shape = len(q) // TILE, num_kv_heads, TILE, group
    queries = q.view(-1, TILE, num_kv_heads, group, dim).transpose(1, 2).reshape(-1, TILE * group, dim)
    if sinks is None:
        top = q.new_full(shape, -torch.inf)
        total = q.new_zeros(shape)
    else:  # one more logit, before all keys
        top = sinks.float().view(1, num_kv_heads, 1, -1).expand(shape)
        total = q.new_ones(shape)
    out = torch.zeros_like(queries)
    part = torch.arange(2 * num_kv_heads, device=q.device).view(2, 1, num_kv_heads, 1) * meta.block_size
    rows_per_block = 2 * num_kv_heads * meta.block_size
    for chunk in chunks:
        rows = (chunk.block * rows_per_block + chunk.offset)[None, :, None] + part  # [2, tiles, kv_heads, CHUNK]
        keys, values = read_rows(cache, rows.flatten()).view(2, -1, CHUNK, dim)
        scores = bmm(queries, keys.transpose(1, 2)) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.view(*shape, CHUNK).masked_fill(chunk.hidden, -torch.inf)
        new_top = torch.maximum(top, scores.amax(4))
        finite_top = new_top.masked_fill(new_top == -torch.inf, 0.0)
        weights = torch.exp(scores - finite_top[..., None])
        kept = torch.exp(top - finite_top)
        total = total * kept + weights.sum(4)
        out = out * kept.view(*queries.shape[:2], 1) + bmm(weights.view(*queries.shape[:2], CHUNK), values)
        top = new_top
    total = total.masked_fill(total == 0, 1.0)  # of padding
    # Hidden keys add zeros whose sign follows what lies in the cache; adding zero makes every zero a positive one.
    out = out / total.view(*queries.shape[:2], 1) + 0.0
    return out.view(*shape, dim).transpose(1, 2).reshape(q.shape)
