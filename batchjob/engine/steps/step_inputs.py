"""`InputBuilder`: turns a plan into the integers that the device needs for it, in one piece of memory.

Host work, in numpy. What the device keeps between steps (`DeviceState`) is not sent again: a step of the same decode
rows as before costs only the blocks that they got since.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from batchjob.core.sequence import Sequence
from batchjob.core.step_plan import Slice, StepPlan
from batchjob.engine.steps.prefix_groups import SharedPrefixes
from batchjob_kernels import Context

Ints = np.ndarray[tuple[int], np.dtype[np.int32]]


@dataclass(slots=True, eq=False)
class StepInputs:
    """`data` holds the parts named in `sizes`, end to end. Lists are the host's own view; lengths are in tokens.

    Always: `table_at`, `table` (places in the flat block table and what goes there).
    A decode-only step whose rows are not those of the last one: `rows`.
    Any other step, in packed order: `rows`, `stops` and `query_starts` of the sequences; `ids`, `positions` and
    `token_rows` of the tokens; `decode_at` (tokens whose id is the device's last one of their row); `keep` and
    `sampled` (tokens and sequences to sample after, in the plan's order); `new_rows` and `prompt_lens`.
    """

    num_steps: int
    is_decode: bool
    query_lens: list[int]
    kv_lens: list[int]  # of the first step
    contexts: list[Context] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    data: Ints = field(default_factory=lambda: np.empty(0, np.int32))

    def pack(self, **parts: list[int] | Ints) -> None:
        arrays = {name: np.asarray(part, np.int32) for name, part in parts.items()}
        self.sizes = {name: len(array) for name, array in arrays.items()}
        self.data = np.concatenate(list(arrays.values())) if arrays else np.empty(0, np.int32)


class InputBuilder:
    """`new` are the sequences that came into their slot with the last plan."""

    def __init__(
        self, *, max_num_seqs: int, max_blocks_per_seq: int, block_size: int, min_tokens_saved: int | None
    ) -> None:
        """Contexts are looked for where they save at least `min_tokens_saved` tokens from reading; None: never."""
        self._width = max_blocks_per_seq
        self._owners: list[tuple[Sequence | None, int]] = [(None, 0)] * max_num_seqs  # with its preemptions so far
        self._num_blocks = [0] * max_num_seqs  # of each row of the device's table that are filled in
        self._shared = None if min_tokens_saved is None else SharedPrefixes(block_size, min_tokens_saved)
        self._rows: list[int] | None = None  # of the device's last decode step
        self.new: list[Sequence] = []

    def build(self, plan: StepPlan) -> StepInputs:
        self.new = []
        table_at: list[int] = []
        table: list[int] = []
        for seq in plan.grown:
            self._update(seq, table_at, table)
        for piece in plan.slices[plan.num_decodes :]:
            self._update(piece.seq, table_at, table)
        order, contexts = self._arrange(plan)
        slices = plan.slices if order is None else [plan.slices[index] for index in order]
        rows = [piece.seq.slot for piece in slices]
        stops = [piece.stop for piece in slices]
        if plan.decode_only and order is None:
            inputs = StepInputs(plan.num_steps, True, [1] * len(rows), stops)
            if rows == self._rows:
                inputs.pack(table_at=table_at, table=table)
            else:
                self._rows = rows
                inputs.pack(table_at=table_at, table=table, rows=rows)
            return inputs
        self._rows = None
        query_lens = [piece.stop - piece.start for piece in slices]
        inputs = StepInputs(plan.num_steps, False, query_lens, stops, contexts)
        starts = np.cumsum([0, *query_lens], dtype=np.int32)
        place = range(len(slices)) if order is None else np.argsort(order)  # in packed order, by index in the plan
        sampled = [int(place[index]) for index in plan.sampled_at]
        positions = np.arange(starts[-1], dtype=np.int32) - np.repeat(
            starts[:-1] - [p.start for p in slices], query_lens
        )
        inputs.pack(
            table_at=table_at,
            table=table,
            rows=rows,
            stops=stops,
            query_starts=starts,
            ids=_token_ids(slices),
            positions=positions.astype(np.int32),
            token_rows=np.repeat(np.array(rows, np.int32), query_lens),
            decode_at=[int(starts[place[index]]) for index in range(plan.num_decodes)],
            keep=starts[1:][sampled] - 1,
            sampled=sampled,
            new_rows=[seq.slot for seq in self.new],
            prompt_lens=[seq.num_prompt_tokens for seq in self.new],
        )
        return inputs

    def _arrange(self, plan: StepPlan) -> tuple[list[int] | None, list[Context]]:
        """None for the plan's own order. Over several steps rows may end, and would take a shared prefix with them."""
        if self._shared is None or plan.num_steps > 1:
            return None, []
        order, contexts = self._shared.arrange(plan)
        return (order, contexts) if contexts else (None, [])

    def _update(self, seq: Sequence, at: list[int], values: list[int]) -> None:
        """What has to be written into the device's table for the row of this sequence."""
        slot, blocks = seq.slot, seq.blocks
        filled = self._num_blocks[slot]
        owner = (seq, seq.num_preemptions)
        if self._owners[slot] != owner:
            self._owners[slot] = owner
            self.new.append(seq)
            filled = 0
        if len(blocks) > filled:
            first = slot * self._width
            at.extend(range(first + filled, first + len(blocks)))
            values.extend(blocks[filled:])
        self._num_blocks[slot] = len(blocks)


def _token_ids(slices: list[Slice]) -> list[int]:
    """Of all positions; 0 for a token that the host does not know yet."""
    ids: list[int] = []
    for seq, start, stop in slices:
        known = seq.tokens[start:stop]
        ids += known or [0]
    return ids
