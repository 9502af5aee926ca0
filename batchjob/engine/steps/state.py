"""`DeviceState`: the state of every sequence that the device keeps between steps, by slot."""

from __future__ import annotations

import torch
from torch import Tensor

from batchjob.engine.kv_cache import KVCache
from batchjob.engine.steps.inputs import StepInputs, StepTensors


class DeviceState:
    """Tables of `max_num_seqs` + 1 rows. The last one, `dummy`, belongs to no sequence: rows that fill up a batch, and
    rows that are over before the host knows, use it. Its blocks are all the null block, and its length is 1.
    """

    def __init__(self, cache: KVCache, *, max_num_seqs: int, max_blocks_per_seq: int) -> None:
        num_slots, device = max_num_seqs + 1, cache.layers[0].device
        self.device = device
        self.dummy = max_num_seqs
        self.block_size = cache.block_size
        self.max_kv_len = max_blocks_per_seq * cache.block_size
        self.block_table = torch.full(
            (num_slots, max_blocks_per_seq), cache.null_block, dtype=torch.int32, device=device
        )
        self.last_tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)  # not in the cache yet
        self.kv_lens = torch.ones(num_slots, dtype=torch.int32, device=device)  # tokens, the last one included
        self.prompt_lens = torch.zeros(num_slots, dtype=torch.int32, device=device)
        # Of the last decode step: its slots, and where the tokens of the plan's slices are among them. None: in order.
        self.decode_slots = torch.zeros(0, dtype=torch.int64, device=device)
        self.decode_order: Tensor | None = None

    def receive(self, inputs: StepInputs) -> StepTensors:
        """Sends the integers of a step in one transfer, and keeps those that later steps need."""
        data = torch.from_numpy(inputs.data)
        if self.device.type == "cuda":
            data = data.pin_memory()  # PyTorch gives this memory out again only once the copy is done
        sent = inputs.split(data.to(self.device, non_blocking=True))
        if len(sent.table):
            self.block_table.view(-1).index_copy_(0, sent.table_at.long(), sent.table)
        if len(sent.new_slots):
            self.prompt_lens.index_copy_(0, sent.new_slots.long(), sent.prompt_lens)
        if inputs.is_decode and len(sent.slots):
            self.decode_slots = sent.slots.long()
            self.decode_order = sent.sampled.long() if len(sent.sampled) else None
        return sent

    def blocks_of(self, slots: Tensor, num_tokens: int) -> Tensor:
        """The block tables of `slots` int64 [n] as far as `num_tokens` reach, int32 [n, blocks]."""
        return self.block_table[:, : -(-num_tokens // self.block_size)][slots]

    def slot_mapping(self, slots: Tensor, positions: Tensor) -> Tensor:
        """The places of tokens in the cache: `slots` and `positions` int64 [n] -> int64 [n]."""
        blocks = self.block_table[slots, positions // self.block_size]
        return blocks.long() * self.block_size + positions % self.block_size

    def num_output_tokens(self, slots: Tensor, kv_lens: Tensor) -> Tensor:
        """The number of output tokens among `kv_lens` tokens, int32 [n]."""
        return kv_lens - self.prompt_lens[slots]

    def advance(self, slots: Tensor, tokens: Tensor, kv_lens: Tensor) -> None:
        """Each sequence has `kv_lens` tokens in the cache and got one more; -1 must not reach an embedding."""
        self.last_tokens.index_copy_(0, slots, tokens.clamp_min(0))
        self.kv_lens.index_copy_(0, slots, kv_lens + 1)
        self.kv_lens[self.dummy :].fill_(1)
