"""`DeviceState`: what the device keeps of every sequence between steps, by slot. The host sends only what is new."""

from __future__ import annotations

import torch
from torch import Tensor

from batchjob.engine.steps.step_inputs import StepInputs


class DeviceState:
    """Tables of `max_num_seqs` + 1 rows. The last one, `dummy`, belongs to no sequence: rows that fill up a batch, and
    rows that are over before the host knows, use it. Its blocks are all the null block, and its length is 1.
    """

    def __init__(
        self, *, max_num_seqs: int, max_blocks_per_seq: int, block_size: int, null_block: int, device: torch.device
    ) -> None:
        num_rows = max_num_seqs + 1
        self.device = device
        self.dummy = max_num_seqs
        self.block_size = block_size
        self.max_kv_len = max_blocks_per_seq * block_size
        self.block_table = torch.full((num_rows, max_blocks_per_seq), null_block, dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)  # not in the cache yet
        self.kv_lens = torch.ones(num_rows, dtype=torch.int32, device=device)  # tokens, the last one included
        self.prompt_lens = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.rows = torch.zeros(0, dtype=torch.int64, device=device)  # of the last decode step, as asked for

    def receive(self, inputs: StepInputs) -> dict[str, Tensor]:
        """Sends the integers of a step in one transfer, takes in what is to be kept, and returns the parts by name."""
        data = torch.from_numpy(inputs.data)
        if self.device.type == "cuda":
            data = data.pin_memory()  # PyTorch gives this memory out again only once the copy is done
        on_device = data.to(self.device, non_blocking=True)
        parts = dict(zip(inputs.sizes, on_device.split([*inputs.sizes.values()]), strict=True))
        if inputs.sizes["table"]:
            self.block_table.view(-1).index_copy_(0, parts["table_at"].long(), parts["table"])
        if inputs.sizes.get("new_rows"):
            self.prompt_lens.index_copy_(0, parts["new_rows"].long(), parts["prompt_lens"])
        if inputs.is_decode and "rows" in parts:
            self.rows = parts["rows"].long()
        return parts

    def slot_mapping(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Where the keys and values of tokens go: `rows` and `positions` int64 [n] -> int64 [n]."""
        blocks = self.block_table[rows, positions // self.block_size]
        return blocks.long() * self.block_size + positions % self.block_size

    def num_output_tokens(self, rows: Tensor, kv_lens: Tensor) -> Tensor:
        """How many of these tokens are output, int32 [n]."""
        return kv_lens - self.prompt_lens[rows]

    def advance(self, rows: Tensor, tokens: Tensor, kv_lens: Tensor) -> None:
        """Each row has `kv_lens` tokens in the cache and got one more. A token of -1 must not reach an embedding."""
        self.last_tokens.index_copy_(0, rows, tokens.clamp_min(0))
        self.kv_lens.index_copy_(0, rows, kv_lens + 1)
        self.kv_lens[self.dummy :].fill_(1)
