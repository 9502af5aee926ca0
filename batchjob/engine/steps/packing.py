"""`Packer`: turns a plan into the tensors of one step. Host work, in numpy; nothing in it depends on the model.

Block tables are kept per slot and only added to, so a step costs its slices and not the length of their sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchjob.core.sequence import Sequence
from batchjob.core.step_plan import Slice, StepPlan
from batchjob.engine.steps.prefix_groups import SharedPrefixes
from batchjob_kernels import AttnMeta


@dataclass(slots=True, eq=False)
class PackedStep:
    input_ids: Tensor  # int64 [num_tokens]
    positions: Tensor  # int64 [num_tokens], from 0 in each sequence
    keep: Tensor  # int64 [num_sampled]: rows whose logits are needed, in the order of plan.sampled
    sequences: Tensor  # int64 [num_sampled]: the sequences of these, in the order of `meta`
    meta: AttnMeta


class Packer:
    def __init__(
        self, *, max_num_seqs: int, max_blocks_per_seq: int, block_size: int, null_block: int, device: torch.device
    ) -> None:
        self._block_size = block_size
        self._null_block = null_block
        self._device = device
        self._table = np.full((max_num_seqs, max_blocks_per_seq), null_block, dtype=np.int64)
        self._owners: list[tuple[Sequence | None, int]] = [(None, 0)] * max_num_seqs  # with its preemptions so far
        self._num_blocks = [0] * max_num_seqs  # of the table that are filled in
        self._shared = SharedPrefixes(block_size)

    def pack(self, plan: StepPlan) -> PackedStep:
        order, contexts = self._shared.arrange(plan)
        slices = [plan.slices[index] for index in order]
        query_lens = [piece.stop - piece.start for piece in slices]
        ids: list[int] = []
        for piece in slices:
            ids += piece.seq.tokens[piece.start : piece.stop]
        for piece in slices:
            self._update(piece)
        lens = np.array(query_lens)
        stops = np.array([piece.stop for piece in slices])
        ends = np.cumsum(lens)
        rows = np.repeat(np.array([piece.seq.slot for piece in slices]), lens)
        positions = np.arange(len(ids)) + np.repeat(stops - ends, lens)
        slots = self._table[rows, positions // self._block_size] * self._block_size + positions % self._block_size
        longest = -(-int(stops.max()) // self._block_size)
        table = self._table[[piece.seq.slot for piece in slices], :longest]
        meta = AttnMeta(
            query_lens=query_lens,
            kv_lens=stops.tolist(),
            block_table=self._tensor(table),
            slot_mapping=self._tensor(slots),
            block_size=self._block_size,
            contexts=contexts,
        )
        place = np.empty(len(order), dtype=np.int64)  # by index in the plan: where the slice is in packed order
        place[order] = np.arange(len(order))
        sequences = place[list(plan.sampled_at)]
        return PackedStep(
            self._tensor(np.array(ids, dtype=np.int64)),
            self._tensor(positions),
            self._tensor(ends[sequences] - 1),
            self._tensor(sequences),
            meta,
        )

    def _update(self, piece: Slice) -> None:
        """Brings the block table of the sequence's slot up to date."""
        seq = piece.seq
        slot = seq.slot
        filled = self._num_blocks[slot]
        owner = (seq, seq.num_preemptions)
        if self._owners[slot] != owner:
            self._owners[slot] = owner
            self._table[slot, :filled] = self._null_block
            filled = 0
        if len(seq.blocks) > filled:
            self._table[slot, filled : len(seq.blocks)] = seq.blocks[filled:]
            self._num_blocks[slot] = len(seq.blocks)

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)
