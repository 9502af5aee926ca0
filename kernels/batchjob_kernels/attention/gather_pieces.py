"""Cuts the attention of one step into pieces, each one call of a dense attention. Host work, once per step and window.

Every query row is in exactly one *own* piece and in any number of *shared* ones, whose results are merged:

* decode: sequences with one new token, neighbours of about the same length, read together and padded to the longest;
* fresh: a prompt part attends to the keys just computed, as they are, without going through the cache;
* shared: all rows of a `Context`, or a prompt part and the tokens before it, read earlier blocks once, without a mask;
* banded: where a window bites, a prompt part reads the blocks that the window reaches, under a mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from batchjob_kernels.attention.meta import AttnMeta

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
    pieces: Pieces | None = meta.memo.get((window, num_kv_heads))
    if pieces is None:
        pieces = meta.memo[window, num_kv_heads] = _Cutter(meta, window, num_kv_heads, dtype).cut()
    return pieces


class _Cutter:
    def __init__(self, meta: AttnMeta, window: int | None, num_kv_heads: int, dtype: torch.dtype) -> None:
        self.meta, self.window, self.num_kv_heads, self.dtype = meta, window, num_kv_heads, dtype
        self.device = meta.block_table.device
        self.starts = [0, *accumulate(meta.query_lens)]
        # Per sequence, the first block that its own pieces read.
        if window is None:
            self.first = meta.first_blocks()
        else:
            lens = zip(meta.kv_lens, meta.query_lens, strict=True)
            self.first = [max(0, kv_len - query_len - window + 1) // meta.block_size for kv_len, query_len in lens]

    def cut(self) -> Pieces:
        meta, starts, window = self.meta, self.starts, self.window
        pieces = Pieces([], [])
        if window is None:
            for first_seq, last_seq, first_block, last_block in meta.contexts:
                kv_len = (last_block - first_block) * meta.block_size
                tiles = self._tiles(meta.block_table[first_seq, first_block:last_block][None])
                pieces.shared.append(Piece(starts[first_seq], starts[last_seq], 0, kv_len, tiles))
        row = 0
        while row < len(meta.query_lens):
            if meta.query_lens[row] == 1:
                last = self._end_of_run(row)
                pieces.own.append(self._decode(row, last))
                row = last
                continue
            if window is not None and meta.kv_lens[row] > window:
                pieces.own.append(self._banded(row, window))
            else:
                pieces.own.append(Piece(starts[row], starts[row + 1], 0, meta.query_lens[row], causal=True))
                num_before = meta.kv_lens[row] - meta.query_lens[row] - self.first[row] * meta.block_size
                if num_before > 0:
                    tiles = self._tiles_of(row, meta.kv_lens[row] - meta.query_lens[row])
                    pieces.shared.append(Piece(starts[row], starts[row + 1], 0, num_before, tiles))
            row += 1
        return pieces

    def _end_of_run(self, row: int) -> int:
        """The end of the run of decode rows from `row` on that are best read together, given their lengths."""
        meta, size = self.meta, self.meta.block_size
        longest = total = 0
        last = row
        while last < len(meta.query_lens) and meta.query_lens[last] == 1:
            padded = (-(-meta.kv_lens[last] // size) - self.first[last]) * size
            longest, total = max(longest, padded), total + padded
            all_padded = longest * (last + 1 - row)
            if last > row and (all_padded > MAX_PIECE_TOKENS or all_padded - total > PIECE_TOKENS):
                break
            last += 1
        return last

    def _decode(self, row: int, last: int) -> Piece:
        meta, size, batch = self.meta, self.meta.block_size, last - row
        first = torch.tensor(self.first[row:last])[:, None]
        lens = torch.tensor(meta.kv_lens[row:last])[:, None] - first * size
        num_blocks = -(-int(lens.max()) // size)
        columns = first + torch.arange(num_blocks)
        columns = columns.clamp_(max=meta.block_table.shape[1] - 1).to(self.device)  # what is read beyond is masked
        position = torch.arange(num_blocks * size)
        hidden = position >= lens
        if self.window is not None:
            hidden |= position < lens - self.window
        mask = self._additive(hidden).repeat_interleave(self.num_kv_heads, dim=0)[:, None]
        tiles = self._tiles(meta.block_table[row:last].gather(1, columns))
        return Piece(self.starts[row], self.starts[row] + batch, batch, num_blocks * size, tiles, mask)

    def _banded(self, row: int, window: int) -> Piece:
        query_len, kv_len = self.meta.query_lens[row], self.meta.kv_lens[row]
        key = torch.arange(self.first[row] * self.meta.block_size, kv_len)
        query = torch.arange(kv_len - query_len, kv_len)[:, None]
        mask = self._additive((key > query) | (key <= query - window))
        start = self.starts[row]
        return Piece(start, start + query_len, 0, len(key), self._tiles_of(row, kv_len), mask)

    def _tiles_of(self, row: int, stop: int) -> Tensor:
        """The tiles of the sequence's own blocks up to position `stop`."""
        return self._tiles(self.meta.block_table[row, self.first[row] : -(-stop // self.meta.block_size)][None])

    def _tiles(self, blocks: Tensor) -> Tensor:
        """`blocks` [batch, num_blocks] -> flat [2, batch, num_kv_heads, num_blocks] (see AttnMeta for the layout)."""
        part = torch.arange(2 * self.num_kv_heads, device=self.device).view(2, 1, self.num_kv_heads, 1)
        return (blocks[None, :, None, :] * (2 * self.num_kv_heads) + part).flatten()

    def _additive(self, hidden: Tensor) -> Tensor:
        return torch.zeros(hidden.shape, dtype=self.dtype).masked_fill_(hidden, -torch.inf).to(self.device)
