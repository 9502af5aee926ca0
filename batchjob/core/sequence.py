"""`Sequence`: one sample of one row while it waits and runs. The scheduler owns every field; the runner only reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from batchjob.core.prefix_hash import PrefixHashes
from batchjob.records import Request


class SequenceState(Enum):
    WAITING = "waiting"  # in the queue: holds no slot and no blocks, num_computed is 0
    RUNNING = "running"  # holds a slot and the KV blocks of all its tokens but, at times, the newest
    FINISHED = "finished"  # out of the scheduler for good


@dataclass(slots=True, eq=False)
class Sequence:
    """Compared and hashed by identity.

    `tokens` is prompt + output and only grows. The KV of the first `num_computed` tokens lies in `blocks`, the block
    table: position p is in block `blocks[p // block_size]` at offset `p % block_size`. A step advances `num_computed`
    towards the number of tokens; when it gets there, one more token is sampled.

    Steps run in the order in which they were scheduled, so what a scheduled step will have done counts as done:
    `num_computed` takes it in, and its tokens, whose values are not known yet, are `num_in_flight`.
    """

    request: Request = field(repr=False)
    max_len: int  # prompt + output tokens at most; the engine ends the sequence there
    tokens: list[int] = field(init=False, repr=False)
    num_prompt_tokens: int = field(init=False)
    num_computed: int = field(init=False, default=0)  # tokens whose KV is in the cache once scheduled steps have run
    num_in_flight: int = field(init=False, default=0)  # tokens of scheduled steps, to come after `tokens`
    blocks: list[int] = field(init=False, repr=False, default_factory=list)
    slot: int = field(init=False, default=-1)  # the same index < max_num_seqs as long as it runs, else -1
    state: SequenceState = field(init=False, default=SequenceState.WAITING)
    prefill_len: int = field(init=False, default=0)  # tokens it had when last admitted; from there on it decodes
    num_preemptions: int = field(init=False, default=0)
    num_lost: int = field(init=False, default=0)  # what num_computed was when last preempted
    hashes: PrefixHashes | None = field(init=False, repr=False, default=None)  # only where blocks may be found again

    def __post_init__(self) -> None:
        self.tokens = [*self.request.token_ids, *self.request.output_token_ids]
        self.num_prompt_tokens = len(self.request.token_ids)

    @property
    def needs_host(self) -> bool:
        """True if the host must look at each token before the next is worth computing: stop strings are text."""
        return bool(self.request.params.stop)

    @property
    def num_output_tokens(self) -> int:
        """Counts the output tokens whose values are known."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]
