"""`InputBuilder`: turns a plan into `StepInputs`, the integers that the device needs for it, in one piece of memory.

Host work, in numpy. The host does not send again what the device keeps between steps (`DeviceState`): a decode step of
the same sequences as before costs only the blocks that they got since.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from torch import Tensor

from batchjob.core.sequence import Sequence
from batchjob.core.step_plan import Slice, StepPlan
from batchjob.engine.steps.prefix_groups import PrefixGroups
from batchjob_kernels import Context

Ints = np.ndarray[tuple[int], np.dtype[np.int32]]


class StepTensors(NamedTuple):
    """The integers of a step on its device, int32. A part that the step does not bring is empty.

    Every step may bring the first two. A decode step brings `slots` and `sampled` only when they are not those of the
    decode step before; any other step brings everything.
    """

    table_at: Tensor  # places in the flat block table of all slots ...
    table: Tensor  # ... and the blocks that go there
    slots: Tensor  # of the sequences, in packed order
    sampled: Tensor  # place in packed order of each of `plan.sampled`; empty in a decode step: in packed order
    kv_lens: Tensor  # of the sequences, new tokens included
    query_starts: Tensor  # where the tokens of each sequence begin, and the end of all
    ids: Tensor  # of the tokens
    positions: Tensor  # of the tokens, from 0 in each sequence
    token_slots: Tensor  # of the tokens: the slot of each one's sequence
    decode_at: Tensor  # the tokens that the device has sampled itself and the host may not know
    logit_positions: Tensor  # the tokens whose logits are needed, in the order of `plan.sampled`
    new_slots: Tensor  # slots that got another sequence
    prompt_lens: Tensor  # of these


@dataclass(slots=True, eq=False)
class StepInputs:
    """`data` holds the parts of `StepTensors` end to end. The lists are the host's own view; lengths are in tokens."""

    num_steps: int
    is_decode: bool
    query_lens: list[int]
    kv_lens: list[int]  # of the first step
    contexts: list[Context] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    data: Ints = field(default_factory=lambda: np.empty(0, np.int32))

    def pack(self, **parts: list[int] | Ints) -> None:
        """Fills `data`. Parts go by the names of `StepTensors`; the others are empty."""
        arrays = [np.asarray(parts.pop(name, ()), np.int32) for name in StepTensors._fields]
        assert not parts, parts
        self.sizes = [len(array) for array in arrays]
        self.data = np.concatenate(arrays)

    def split(self, data: Tensor) -> StepTensors:
        """The parts of `data`, a copy of the host's on a device."""
        return StepTensors(*data.split(self.sizes))


class InputBuilder:
    """`new_seqs` are the sequences that got their slot with the last plan, `slots` the slots of that plan."""

    def __init__(
        self, *, max_num_seqs: int, max_blocks_per_seq: int, groups: PrefixGroups | None, sorts_rows: bool
    ) -> None:
        """`groups` finds blocks that sequences share; None: it is not looked for. With `sorts_rows` the order of a
        step is always that of `groups`: for backends that read neighbours of about the same length together."""
        self._width = max_blocks_per_seq
        self._owners: list[tuple[Sequence | None, int]] = [(None, 0)] * max_num_seqs  # with its preemptions so far
        self._num_blocks = [0] * max_num_seqs  # of each row of the device's table that are filled in
        self._groups = groups
        self._sorts_rows = sorts_rows
        self._decoding: tuple[list[int], list[int] | None] | None = None  # slots and order of the last decode step
        self.new_seqs: list[Sequence] = []
        self.slots: list[int] = []

    def build(self, plan: StepPlan) -> StepInputs:
        self.new_seqs = []
        table_at: list[int] = []
        table: list[int] = []
        for seq in plan.with_new_blocks:
            self._update(seq, table_at, table)
        for slice_ in plan.slices[plan.num_decodes :]:
            self._update(slice_.seq, table_at, table)
        order, contexts = self._arrange(plan)
        slices = plan.slices if order is None else [plan.slices[index] for index in order]
        self.slots = slots = [slice_.seq.slot for slice_ in slices]
        kv_lens = [slice_.stop for slice_ in slices]
        if plan.decode_only:
            inputs = StepInputs(plan.num_steps, True, [1] * len(slots), kv_lens, contexts)
            if (slots, order) == self._decoding:
                inputs.pack(table_at=table_at, table=table)
            else:
                self._decoding = slots, order
                inputs.pack(table_at=table_at, table=table, slots=slots, sampled=_inverse(order))
            return inputs
        self._decoding = None
        query_lens = [slice_.stop - slice_.start for slice_ in slices]
        inputs = StepInputs(plan.num_steps, False, query_lens, kv_lens, contexts)
        starts = np.cumsum([0, *query_lens], dtype=np.int32)
        places = range(len(slices)) if order is None else _inverse(order)
        sampled = [int(places[index]) for index in plan.sampled_at]
        positions = np.arange(starts[-1], dtype=np.int32) - np.repeat(
            starts[:-1] - [slice_.start for slice_ in slices], query_lens
        )
        inputs.pack(
            table_at=table_at,
            table=table,
            slots=slots,
            sampled=sampled,
            kv_lens=kv_lens,
            query_starts=starts,
            ids=_token_ids(slices),
            positions=positions.astype(np.int32),
            token_slots=np.repeat(np.array(slots, np.int32), query_lens),
            decode_at=[int(starts[places[index]]) for index in range(plan.num_decodes)],
            logit_positions=starts[1:][sampled] - 1,
            new_slots=[seq.slot for seq in self.new_seqs],
            prompt_lens=[seq.num_prompt_tokens for seq in self.new_seqs],
        )
        return inputs

    def _arrange(self, plan: StepPlan) -> tuple[list[int] | None, list[Context]]:
        """The order of the plan's slices, None for the plan's own, and the contexts over it."""
        if self._groups is None or (plan.num_steps > 1 and not self._sorts_rows):
            return None, []
        order, contexts = self._groups.arrange(plan)
        if plan.num_steps > 1:
            contexts = []  # rows may end within these steps, and would take a shared prefix with them
        return (order, contexts) if contexts or self._sorts_rows else (None, [])

    def _update(self, seq: Sequence, table_at: list[int], table: list[int]) -> None:
        """Adds what has to be written into the device's block table for the slot of this sequence."""
        slot, blocks = seq.slot, seq.blocks
        filled = self._num_blocks[slot]
        owner = (seq, seq.num_preemptions)
        if self._owners[slot] != owner:
            self._owners[slot] = owner
            self.new_seqs.append(seq)
            filled = 0
        if len(blocks) > filled:
            first = slot * self._width
            table_at.extend(range(first + filled, first + len(blocks)))
            table.extend(blocks[filled:])
        self._num_blocks[slot] = len(blocks)


def _inverse(order: list[int] | None) -> Ints | list[int]:
    """The place in packed order of each slice of a plan; empty for the plan's own order."""
    if order is None:
        return []
    places = np.empty(len(order), dtype=np.int32)
    places[order] = np.arange(len(order), dtype=np.int32)
    return places


def _token_ids(slices: list[Slice]) -> list[int]:
    """The ids at all positions; 0 for a token that the host does not know yet."""
    ids: list[int] = []
    for seq, start, stop in slices:
        known = seq.tokens[start:stop]
        ids += known or [0]
    return ids
