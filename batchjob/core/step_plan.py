"""`StepPlan`: what one forward computes. The scheduler fills it, the engine passes it on, the runner reads it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from batchjob.core.sequence import Sequence


class Slice(NamedTuple):
    """Positions `start:stop` of a sequence, whose KV this step writes and whose queries it runs.

    The token at `start` of a decode slice may still be in flight: then only the runner knows it.
    """

    seq: Sequence
    start: int
    stop: int


class StepPlan:
    """Slices of different sequences, in the order in which the packed input lays them out: decodes first.

    The first `num_decodes` slices are one token long and sample, so `slices[:num_decodes]` and `slices[num_decodes:]`
    split the step into decode and prefill. Plain data after construction; nothing in it changes with `commit`.

    A decode-only plan may ask for `num_steps` decode steps in a row, each on the token that the one before it sampled.
    Blocks are there for all of them, but for steps beyond a sequence's `max_len`: those must not write to its blocks.
    """

    __slots__ = ("num_decodes", "num_steps", "num_tokens", "sampled", "sampled_at", "slices", "with_new_blocks")

    slices: list[Slice]
    num_decodes: int
    num_steps: int
    num_tokens: int  # of all slices: rows of the packed input
    sampled: list[Slice]  # those after whose last position a token is sampled, in order
    sampled_at: range | list[int]  # their indices in `slices`
    with_new_blocks: list[Sequence]  # of the decodes, those that have more blocks than when they were last in a plan

    def __init__(
        self,
        decodes: list[Slice],
        prefills: list[Slice] | None = None,
        *,
        sampling: Iterable[int] = (),
        num_steps: int = 1,
        with_new_blocks: Iterable[Sequence] = (),
    ) -> None:
        """`sampling` are the indices of the prefills that reach the end of their tokens: one more is sampled there."""
        prefills = prefills or []
        self.slices = decodes + prefills if prefills else decodes
        self.num_decodes = len(decodes)
        self.num_tokens = len(decodes) + sum(slice_.stop - slice_.start for slice_ in prefills)
        if prefills:
            self.sampled_at = [*range(len(decodes)), *(len(decodes) + index for index in sampling)]
            self.sampled = [self.slices[index] for index in self.sampled_at]
        else:
            self.sampled_at, self.sampled = range(len(decodes)), decodes
        self.num_steps = num_steps
        self.with_new_blocks = list(with_new_blocks)

    @property
    def decode_only(self) -> bool:
        """Every slice is one token that samples: a step of fixed shape, given the number of slices."""
        return self.num_decodes == len(self.slices)
