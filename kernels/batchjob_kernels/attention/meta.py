"""`AttnMeta`: what the attention of one step needs to know beside the tensors of a layer; the same for every layer.

Layout of one layer's cache: [num_blocks, 2, num_kv_heads, block_size, head_dim], keys at index 0 of the second axis and
values at index 1. The keys of one head in one block are one piece of memory, a *tile*; so are the values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Context(NamedTuple):
    """Sequences `first_seq:last_seq` of the step hold the same blocks `first_block:last_block`, full of tokens that
    come before every query of theirs. So these keys and values can be read once for all of them."""

    first_seq: int
    last_seq: int
    first_block: int
    last_block: int


@dataclass(frozen=True, slots=True, eq=False)
class DeviceLens:
    """The lengths of a step on its device, for kernels that find their work by themselves.

    With these, `AttnMeta.block_table` is a table of all slots, of which `table_rows` names the row of each sequence.
    """

    query_starts: Tensor  # int32 [num_seqs + 1]: where each sequence's new tokens begin in the packed step, and the end
    kv_lens: Tensor  # int32 [num_seqs], new tokens included; at least 1
    table_rows: Tensor  # int32 [num_seqs]

    @classmethod
    def of(cls, query_lens: list[int], kv_lens: list[int], table_rows: list[int], device: torch.device) -> DeviceLens:
        """Copies lists to the device, for which the host waits: for tests and checks."""
        lists = [0, *accumulate(query_lens)], kv_lens, table_rows
        return cls(*(torch.tensor(values, dtype=torch.int32, device=device) for values in lists))


@dataclass(frozen=True, slots=True)
class Requirements:
    """The needs of a model, a device and a job that a backend serves, or names in its `refusal`."""

    device: torch.device
    capability: tuple[int, int] | None  # compute capability of a CUDA device
    dtype: torch.dtype  # of queries and outputs
    kv_dtype: torch.dtype  # of the cache
    head_dims: frozenset[int]
    group_sizes: frozenset[int]  # query heads per KV head
    block_size: int
    windows: bool = False  # some layer has a sliding window
    softcap: bool = False
    sinks: bool = False
    deterministic: bool = False


@dataclass(eq=False)
class AttnMeta:
    """One step over sequences laid end to end. Sequence i brings `query_lens[i]` new tokens, the last of its
    `kv_lens[i]`; all lists and tensors follow that order. Lengths are in tokens."""

    query_lens: list[int]
    kv_lens: list[int]  # new tokens included
    block_table: Tensor  # int [num_seqs, max_blocks]; past a sequence's last block: any block of finite numbers
    slot_mapping: Tensor  # int64 [num_tokens]: block * block_size + offset where a new token's key and value go
    block_size: int
    contexts: list[Context] = field(default_factory=list)  # a hint: backends may ignore it; outer ones first
    memo: dict[Any, Any] = field(default_factory=dict)  # what a backend has worked out for this step
    device_lens: DeviceLens | None = None  # where given, `kv_lens` may be placeholders: in a captured graph
    deterministic: bool = False  # a row's result must not depend, in any bit, on the other rows of the step

    def first_blocks(self) -> list[int]:
        """Per sequence, how many leading blocks the contexts cover."""
        first = [0] * len(self.query_lens)
        for context in self.contexts:
            first[context.first_seq : context.last_seq] = [context.last_block] * (context.last_seq - context.first_seq)
        return first
