"""`PrefixGroups`: the order of slices within a step, and which leading blocks several of them hold in common.

The slices form a tree by their block tables. A branch of it becomes a `Context`, read once for all its rows, where that
saves more reading than a further piece costs. Rows of a context are neighbours; among those that share the same
contexts decode rows come before prompt parts, by the number of tokens that each reads alone.
"""

from __future__ import annotations

from itertools import groupby

from batchjob.core.sequence import Sequence
from batchjob.core.step_plan import StepPlan
from batchjob_kernels import Context

# Tokens that a context must save its rows from reading (per layer); about what the calls that it adds cost.
MIN_TOKENS_SAVED = 1024
# The same for a step on a GPU, which leaves its graph for it. Estimated, not measured: a graph saves about 4 ms of
# launches, in which an H200 reads the keys and values of so many tokens.
GPU_MIN_TOKENS_SAVED = 1 << 17


class PrefixGroups:
    """Remembers the last decode-only step: as long as the same rows go on, nothing about their prefixes changes."""

    def __init__(self, block_size: int, min_tokens_saved: int | None = None) -> None:
        """A context must save at least `min_tokens_saved` tokens from reading; None: MIN_TOKENS_SAVED."""
        self._block_size = block_size
        self._min_tokens_saved = MIN_TOKENS_SAVED if min_tokens_saved is None else min_tokens_saved
        self._known: list[tuple[Sequence, int]] = []
        self._order: list[int] = []
        self._contexts: list[Context] = []

    def arrange(self, plan: StepPlan) -> tuple[list[int], list[Context]]:
        """The places of the plan's slices in the order in which they are packed, and the contexts over that order."""
        seqs = [(slice_.seq, slice_.seq.num_preemptions) for slice_ in plan.slices]
        if not plan.decode_only or seqs != self._known:
            self._order, self._contexts = self._arrange(plan)
            self._known = seqs if plan.decode_only else []
        return self._order, self._contexts

    def _arrange(self, plan: StepPlan) -> tuple[list[int], list[Context]]:
        size, slices = self._block_size, plan.slices
        # Only blocks that lie before all of a slice's queries can be read together with another's.
        prefixes = [slice_.seq.blocks[: slice_.start // size] for slice_ in slices]
        spans: list[tuple[int, int]] = []  # of blocks, by context
        paths: list[tuple[int, ...]] = [()] * len(slices)  # by slice: the contexts it is in, from the root

        def visit(rows: list[int], depth: int, read: int) -> None:
            """`rows`, sorted by prefix, agree in `depth` blocks, of which contexts cover `read`."""
            first, last = prefixes[rows[0]], prefixes[rows[-1]]  # what these share, all of them do
            while depth < min(len(first), len(last)) and first[depth] == last[depth]:
                depth += 1
            if (len(rows) - 1) * (depth - read) * size >= self._min_tokens_saved:
                for row in rows:
                    paths[row] = (*paths[row], len(spans))
                spans.append((read, depth))
                read = depth
            deeper = [row for row in rows if len(prefixes[row]) > depth]
            for _, branch in groupby(deeper, key=lambda row: prefixes[row][depth]):
                members = list(branch)
                if len(members) > 1:
                    visit(members, depth, read)

        with_prefix = sorted((row for row in range(len(slices)) if prefixes[row]), key=prefixes.__getitem__)
        if len(with_prefix) > 1:
            visit(with_prefix, 0, 0)

        def place(row: int) -> tuple[tuple[int, ...], bool, int]:
            slice_, path = slices[row], paths[row]
            read = spans[path[-1]][1] * size if path else 0
            return path, slice_.stop - slice_.start > 1, slice_.stop - read

        order = sorted(range(len(slices)), key=place)
        contexts = []
        for index, (start, stop) in enumerate(spans):
            members = [position for position, row in enumerate(order) if index in paths[row]]
            contexts.append(Context(members[0], members[-1] + 1, start, stop))
        return order, contexts
