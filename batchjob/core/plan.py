"""`StepPlan`: what one forward computes. The scheduler fills it, the engine passes it on, the runner reads it."""

from __future__ import annotations

from typing import NamedTuple

from batchjob.core.sequence import Sequence


class Slice(NamedTuple):
    """The tokens `seq.tokens[start:stop]`, whose KV this step writes and whose queries it runs."""

    seq: Sequence
    start: int
    stop: int

    @property
    def samples(self) -> bool:
        """Whether a new token is sampled after the last one of these. Holds until the plan is committed."""
        return self.stop == len(self.seq.tokens)


class StepPlan:
    """Slices of different sequences, in the order in which the packed input lays them out: decodes first.

    The first `num_decodes` slices are one token long and sample, so `slices[:num_decodes]` and `slices[num_decodes:]`
    split the step into decode and prefill. Plain data after construction; nothing in it changes with `commit`.
    """

    __slots__ = ("num_decodes", "num_tokens", "sampled", "slices")

    slices: list[Slice]
    num_decodes: int
    num_tokens: int  # of all slices: rows of the packed input
    sampled: list[Slice]  # those that sample, in order: `Handle.tokens()` gives one token for each

    def __init__(self, slices: list[Slice], num_decodes: int | None = None) -> None:
        """`num_decodes` is taken on trust where the caller knows it, else counted."""
        self.slices = slices
        self.num_decodes = num_decodes = _count_decodes(slices) if num_decodes is None else num_decodes
        if num_decodes == len(slices):
            self.num_tokens = num_decodes
            self.sampled = slices
        else:
            prefills = slices[num_decodes:]
            self.num_tokens = num_decodes + sum(piece.stop - piece.start for piece in prefills)
            self.sampled = slices[:num_decodes] + [piece for piece in prefills if piece.samples]

    @property
    def decode_only(self) -> bool:
        """Every slice is one token that samples: a step of fixed shape, given the number of slices."""
        return self.num_decodes == len(self.slices)


def _count_decodes(slices: list[Slice]) -> int:
    for count, piece in enumerate(slices):
        if piece.stop - piece.start != 1 or not piece.samples:
            return count
    return len(slices)
