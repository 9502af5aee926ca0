"""`NonfiniteBlocks`: which KV blocks hold a token whose numbers were not finite.

Such keys and values are stored as zero, because masked places are read too. The tokens after them would look right and
be wrong: a row is an error as soon as it reads such a block, whether it computed the block itself, in one part or
several, or found it in the prefix cache. Only prompts are checked; a token that decodes shows it by its own logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchjob.engine.kv_cache import KVCache


class NonfiniteBlocks:
    """Flags on the device; nothing here waits for it."""

    def __init__(self, cache: KVCache) -> None:
        self._block_size = cache.block_size
        self._flags = torch.zeros(cache.num_blocks + 1, dtype=torch.int32, device=cache.layers[0].device)

    def begin(self, slot_mapping: Tensor) -> None:
        """Tokens go to these places, int64 [n]: a block that gets its first one is a new one."""
        size = self._block_size
        self._flags.scatter_reduce_(0, slot_mapping // size, (slot_mapping % size != 0).int(), "amin")

    def note(self, slot_mapping: Tensor, nonfinite: Tensor) -> None:
        """Flags the blocks of those tokens that are not finite, bool [n]."""
        self._flags.scatter_reduce_(0, slot_mapping // self._block_size, nonfinite.int(), "amax")

    def read_by(self, block_table: Tensor, kv_lens: Tensor) -> Tensor:
        """Returns which sequences read a flagged block, bool [n], by their blocks [n, max_blocks] and lengths [n]."""
        columns = torch.arange(block_table.shape[1], device=block_table.device) * self._block_size
        return ((self._flags[block_table] > 0) & (columns < kv_lens[:, None])).any(dim=1)
