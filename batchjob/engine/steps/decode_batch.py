"""`DecodeBatch`: the tensors of a decode step of one size, at fixed places in memory."""

from __future__ import annotations

import torch

from batchjob.engine.steps.state import DeviceState
from batchjob_kernels import AttnMeta, DeviceLens


class DecodeBatch:
    """A captured graph reads and writes these tensors. `slots` is set by the caller, the rest by `fill`."""

    def __init__(self, size: int, state: DeviceState, *, deterministic: bool) -> None:
        device = state.device
        self.dummy = state.dummy
        self.slots = torch.full((size,), state.dummy, dtype=torch.int64, device=device)
        self.table_rows = torch.empty(size, dtype=torch.int32, device=device)
        self.kv_lens = torch.ones(size, dtype=torch.int32, device=device)
        self.ids = torch.zeros(size, dtype=torch.int64, device=device)
        self.positions = torch.zeros(size, dtype=torch.int64, device=device)
        self.slot_mapping = torch.zeros(size, dtype=torch.int64, device=device)
        self.logit_positions = torch.arange(size, device=device)
        self.meta = AttnMeta(
            query_lens=[1] * size,
            kv_lens=[1] * size,
            block_table=state.block_table,
            slot_mapping=self.slot_mapping,
            block_size=state.block_size,
            device_lens=DeviceLens(
                torch.arange(size + 1, dtype=torch.int32, device=device), self.kv_lens, self.table_rows
            ),
            deterministic=deterministic,
        )

    def fill(self, state: DeviceState) -> None:
        """Takes ids and lengths of the sequences in `slots` from the state."""
        slots = self.slots
        self.table_rows.copy_(slots)
        torch.index_select(state.kv_lens, 0, slots, out=self.kv_lens)
        torch.index_select(state.last_tokens, 0, slots, out=self.ids)
        self.positions.copy_(self.kv_lens)
        self.positions.sub_(1)
        self.slot_mapping.copy_(state.slot_mapping(slots, self.positions))
        self.meta.memo.clear()  # backends keep copies of the tensors above in it: a graph has to make them itself
