"""Cuts the attention of one step into pieces, each one call of a dense attention. Host work, once per step and window.

Every query row is in exactly one *own* piece and in any number of *shared* ones, whose results are merged:

* decode: sequences with one new token, neighbours of about the same length, read together and padded to the longest;
* fresh: a prompt part attends to the keys just computed, as they are, without going through the cache;
* shared: all rows of a `Context`, or a prompt part and the tokens before it, read earlier blocks once, without a mask;
* banded: where a window bites, a prompt part reads the blocks that the window reaches, under a mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from batchjob_kernels.meta import AttnMeta

# A further decode piece costs about as much as reading this many padded tokens more (both measured per layer).
PIECE_TOKENS = 256
# Most padded tokens of one decode piece: what it gathers should still lie in a cache of the CPU when it is used.
MAX_PIECE_TOKENS = 8192


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    start: int  # query rows start:stop of the packed step
    stop: int
    batch: int  # sequences side by side with one query each (decode), or 0: one key range for all the rows
    kv_len: int  # keys per sequence, at most what the blocks hold
    # int64, flat: which tiles of the cache hold the keys, then the values: [2, batch or 1, kv_heads, blocks].
    # None: the keys are rows start:stop of the step's own.
    tiles: Tensor | None = None
    mask: Tensor | None = None  # float, added to the scores; [batch * kv_heads, 1, kv_len] or [rows, kv_len]
    causal: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    own: list[Piece]  # cover every query row once
    shared: list[Piece]  # to be merged into those


def cut(meta: AttnMeta, *, window: int | None, num_kv_heads: int, dtype: torch.dtype) -> Pieces:
    """The pieces of a step for layers with this window (None: no window) and this many KV heads. Kept in `meta`."""
    if window is not None and window >= max(meta.kv_lens, default=0):
        window = None
    pieces: Pieces | None = meta.plans.get((window, num_kv_heads))
    if pieces is None:
        pieces = meta.plans[window, num_kv_heads] = _Cutter(meta, window, num_kv_heads, dtype).cut()
    return pieces


XXX
def _cut(meta: AttnMeta, window: int | None, dtype: torch.dtype) -> Pieces:
    own: list[Piece] = []
    shared: list[Piece] = []
    starts = [0]
    for query_len in meta.query_lens:
        starts.append(starts[-1] + query_len)
    size = meta.block_size
    if window is None:
        first = meta.first_blocks()
        for context in meta.contexts:
            ids = meta.block_table[context.first_seq, context.first_block : context.last_block]
            shared.append(
                Piece(starts[context.first_seq], starts[context.last_seq], 0, ids.numel() * size, ids.contiguous())
            )
    else:
        lens = zip(meta.kv_lens, meta.query_lens, strict=True)
        first = [max(0, kv_len - query_len - window + 1) // size for kv_len, query_len in lens]
    row = 0
    while row < len(first):
        if meta.query_lens[row] == 1:
            last = _decode_run(meta, first, row)
            own.append(_decode(meta, first, row, last, starts[row], window, dtype))
            row = last
            continue
        if window is not None and meta.kv_lens[row] > window:
            own.append(_banded(meta, first[row], row, starts[row], window, dtype))
        else:
            own.append(Piece(starts[row], starts[row + 1], 0, meta.query_lens[row], causal=True))
            num_before = meta.kv_lens[row] - meta.query_lens[row] - first[row] * size
            if num_before > 0:
                ids = meta.block_table[row, first[row] : first[row] + -(-num_before // size)].contiguous()
                shared.append(Piece(starts[row], starts[row + 1], 0, num_before, ids))
        row += 1
    return Pieces(own, shared)


def _decode_run(meta: AttnMeta, first: list[int], row: int) -> int:
    """The end of the run of decode rows from `row` on that are best read together, given their lengths."""
    size = meta.block_size
    longest = total = 0
    last = row
    while last < len(first) and meta.query_lens[last] == 1:
        padded = -(-meta.kv_lens[last] // size) * size - first[last] * size
        longest_then, total_then = max(longest, padded), total + padded
        num_rows = last + 1 - row
        if last > row and (
            longest_then * num_rows > MAX_PIECE_TOKENS or longest_then * num_rows - total_then > PIECE_TOKENS
        ):
            break
        longest, total = longest_then, total_then
        last += 1
    return last


def _decode(
    meta: AttnMeta, first: list[int], row: int, last: int, start: int, window: int | None, dtype: torch.dtype
) -> Piece:
    size, batch = meta.block_size, last - row
    device = meta.block_table.device
    lens = torch.tensor([meta.kv_lens[i] - first[i] * size for i in range(row, last)])
    num_blocks = -(-int(lens.max()) // size)
    offsets = torch.tensor(first[row:last])[:, None] + torch.arange(num_blocks)
    offsets = offsets.clamp_(max=meta.block_table.shape[1] - 1).to(device)  # what is read beyond is masked
    ids = meta.block_table[row:last].gather(1, offsets).flatten()
    position = torch.arange(num_blocks * size)
    hidden = position >= lens[:, None]
    if window is not None:
        hidden |= position < lens[:, None] - window
    mask = _additive(hidden, dtype, device)[:, None, None, :]
    return Piece(start, start + batch, batch, num_blocks * size, ids, mask)


def _banded(meta: AttnMeta, first: int, row: int, start: int, window: int, dtype: torch.dtype) -> Piece:
    size, query_len, kv_len = meta.block_size, meta.query_lens[row], meta.kv_lens[row]
    device = meta.block_table.device
    ids = meta.block_table[row, first : -(-kv_len // size)].contiguous()
    key = torch.arange(first * size, kv_len)
    query = torch.arange(kv_len - query_len, kv_len)[:, None]
    hidden = (key > query) | (key <= query - window)
    return Piece(start, start + query_len, 0, len(key), ids, _additive(hidden, dtype, device)[None, None])


def _additive(hidden: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf).to(device)
