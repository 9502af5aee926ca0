"""`KVCache`: the keys and values of all layers, and how much memory they get."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from batchjob.cgroup import memory_groups
from batchjob.errors import EngineError

_SHARE_OF_FREE_MEMORY = 0.25  # of a CPU, which other programs use as well
# Files of a control group, by the version of its hierarchy.
_LIMIT_AND_USED = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}


class LayerShape(NamedTuple):
    num_kv_heads: int
    head_dim: int


class KVCache:
    """`layers[i]` is [num_blocks + 1, 2, num_kv_heads, block_size, head_dim], keys first
    (see batchjob_kernels.attention.meta).

    Zeroed once: what is masked is still read, and a NaN left in fresh memory would survive a multiplication by zero.
    The last block, `null_block`, belongs to no sequence: block tables are padded with it, and rows that only fill up a
    step write to it.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.null_block = num_blocks
        self.layers: list[Tensor] = [
            torch.zeros(num_blocks + 1, 2, shape.num_kv_heads, block_size, shape.head_dim, dtype=dtype, device=device)
            for shape in shapes
        ]

    @property
    def num_bytes(self) -> int:
        return sum(layer.numel() * layer.element_size() for layer in self.layers)


def bytes_per_block(shapes: Sequence[LayerShape], *, block_size: int, dtype: torch.dtype) -> int:
    return sum(2 * block_size * shape.num_kv_heads * shape.head_dim * dtype.itemsize for shape in shapes)


def choose_num_blocks(
    block_bytes: int,
    *,
    kv_cache_bytes: int | None,
    available: int | None = None,
    max_useful_blocks: int,
    num_processes: int = 1,
) -> int:
    """The number of blocks to allocate: what the user gave, else `available` bytes, else a share of the host's free
    memory; never more than is useful. The host's memory is for `num_processes` that do the same.

    Raises EngineError when not even one block fits.
    """
    budget = kv_cache_bytes
    if budget is None:
        budget = int(available_memory() * _SHARE_OF_FREE_MEMORY / num_processes) if available is None else available
    num_blocks = min(budget // block_bytes - 1, max_useful_blocks)  # one more is the null block
    if num_blocks < 1:
        raise EngineError(
            f"{budget:,} bytes hold no KV cache: two blocks need {2 * block_bytes:,}; "
            "give more with --kv-cache-memory, or use a smaller --block-size"
        )
    return num_blocks


def available_memory() -> int:
    """Bytes that can still be allocated on the host: what the kernel calls available, within our cgroups' limits."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return min([available, *_cgroup_headroom()])


def _cgroup_headroom() -> list[int]:
    """Returns the bytes that the memory limits of this process's control groups, and of those above them, leave."""
    headroom = []
    for group in memory_groups():
        limit, used = _LIMIT_AND_USED[group.version]
        for directory in [group.directory, *group.directory.parents]:
            try:
                numbers = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
                # File pages that were not used lately count as used, and can be had back.
                reclaimable = int(numbers.get("inactive_file", 0))
                most = int((directory / limit).read_text())  # "max" is no number: no limit here
                headroom.append(max(0, most - int((directory / used).read_text()) + reclaimable))
            except (OSError, ValueError):
                pass
            if directory == group.root:
                break
    return headroom
