"""`Scheduler`: which tokens of which sequences the next step computes. Knows nothing of tensors, text or files.

One rule instead of phases: each step advances `num_computed` of the running sequences towards `len(tokens)`, under
three budgets: sequences, tokens per step, KV blocks. Prefill, a part of a long prefill, a prefix hit, the return after
a preemption and decode are all that one subtraction (after vLLM's scheduler, V1).

    schedule()   decodes in order of admission, then the rest of started prefills, then new rows from the queue
    commit()     the step has run: tokens are appended, full blocks enter the prefix index
    finish()     a sequence is over: its slot and blocks are free for the very next schedule()
"""

from __future__ import annotations

from collections import deque

from batchjob.core.blocks import BlockPool, extend_digests
from batchjob.core.plan import Slice, StepPlan
from batchjob.core.sequence import Sequence, SequenceState
from batchjob.records import Request, RowError

# Rows that one step may set aside because their prefix is being computed. Bounds the cost of a step when a whole queue
# waits for one prefix; rows set aside leave the queue, so the next step looks further down it.
_MAX_PARKED_PER_STEP = 64


class Scheduler:
    """Host cost: O(1) per slice of a plan, O(blocks) once per admission; nothing grows with the queue or with lengths.

    A waiting row whose next block is being computed by a running sequence is *parked*: set aside until the last block
    that both have in common is in the index, then put back at the head of the queue, where it hits. No prefix is
    computed twice at once.

    With `prefix_caching` off, rows share nothing with other rows; the samples of one row still share its prompt, and a
    preempted sequence may find its own blocks again.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        prefix_caching: bool = True,
    ) -> None:
        if min(max_num_seqs, max_num_batched_tokens, max_model_len) < 1:
            raise ValueError("max_num_seqs, max_num_batched_tokens and max_model_len must be at least 1")
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.prefix_caching = prefix_caching

        self.overgrown: list[Sequence] = []  # ended by the last schedule(): they need more blocks than there are
        self.num_preemptions = 0
        self.num_prompt_tokens_computed = 0  # run through the model, those of preempted rows again included
        self.num_cached_tokens = 0  # found in the prefix index at admission instead
        self.num_recomputed_tokens = 0  # lost to preemption, less what was found again

        self._waiting: deque[Sequence] = deque()
        self._running: dict[Sequence, None] = {}  # in order of admission
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._pending: dict[bytes, Sequence] = {}  # digest of a block -> the running sequence that will compute it
        self._parked: dict[bytes, list[Sequence]] = {}  # digest of a pending block -> rows that wait for it
        self._num_parked = 0
        self._stuck: tuple[Sequence, int] | None = None  # head of the queue and the free blocks it lacked

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + self._num_parked

    @property
    def num_running(self) -> int:
        return len(self._running)

    def add(self, request: Request) -> RowError | None:
        """Queues a request, or says why it can never run."""
        num_tokens = len(request.token_ids)
        if num_tokens == 0:
            return RowError("invalid_prompt", "the prompt has no tokens")
        if num_tokens >= self.max_model_len:
            return RowError(
                "prompt_too_long",
                f"the prompt has {num_tokens} tokens; max_model_len is {self.max_model_len}, "
                f"which leaves room for prompts of at most {self.max_model_len - 1}",
            )
        num_blocks = self._num_blocks(num_tokens)
        if num_blocks > self.pool.num_blocks:
            return RowError(
                "kv_cache_too_small",
                f"the prompt of {num_tokens} tokens needs {num_blocks} KV blocks of {self.pool.block_size} tokens; "
                f"the whole cache has {self.pool.num_blocks} ({self.pool.num_blocks * self.pool.block_size} tokens)",
            )
        max_tokens = request.params.max_tokens
        max_len = self.max_model_len if max_tokens is None else min(num_tokens + max_tokens, self.max_model_len)
        seq = Sequence(request, max_len)
        seq.prefix_id = self._root(seq)
        self._waiting.append(seq)
        return None

    def schedule(self) -> StepPlan | None:
        """The next step, or None when there is nothing to do.

        Afterwards `overgrown` holds the sequences that this call ended, because each alone fills the whole cache and
        needs one more block. A plan that was never run may be dropped: the next call makes up for it.
        """
        self.overgrown = []
        num_preemptions = self.num_preemptions
        block_size = self.pool.block_size
        slices: list[Slice] = []
        started: list[Sequence] = []
        for seq in list(self._running):
            if seq.slot < 0:
                break  # preempted just now, as all that were admitted after it
            start = seq.num_computed
            stop = len(seq.tokens)
            if stop - start > 1:
                started.append(seq)
            elif stop <= len(seq.blocks) * block_size or self._grow(seq):
                slices.append(Slice(seq, start, stop))
        num_decodes = len(slices)
        budget = self.max_num_batched_tokens - num_decodes
        for seq in started:
            budget = self._prefill(seq, slices, budget)
        if self.num_preemptions == num_preemptions:
            self._admit(slices, budget)
        return StepPlan(slices, num_decodes) if slices else None

    def commit(self, plan: StepPlan, tokens: list[int]) -> None:
        """The plan has run and gave `tokens`, one for each of `plan.sampled`."""
        for (seq, _, stop), token in zip(plan.sampled, tokens, strict=True):
            seq.num_computed = stop
            seq.tokens.append(token)
        for seq, start, stop in plan.slices[plan.num_decodes :]:
            seq.num_computed = stop
            self.num_prompt_tokens_computed += max(0, min(stop, seq.num_prompt_tokens) - start)
            num_full = min(stop // self.pool.block_size, len(seq.digests))
            if num_full > seq.num_registered:
                first = seq.num_registered
                self._register(seq, num_full)
                self._settle(seq, first, num_full)

    def finish(self, seq: Sequence) -> None:
        """Takes a running sequence out, wherever it stands. Not between `schedule` and the `commit` of its plan."""
        self._release(seq)
        seq.state = SequenceState.FINISHED

    def drop_waiting(self) -> list[Sequence]:
        """Takes out and returns everything that does not run: rows never started and preempted ones."""
        dropped = list(self._waiting)
        for parked in self._parked.values():
            dropped += parked
        for seq in dropped:
            seq.state = SequenceState.FINISHED
        self._waiting.clear()
        self._parked.clear()
        self._num_parked = 0
        return dropped

    # -- running

    def _grow(self, seq: Sequence) -> bool:
        """One more block for a decode, if need be from the latest admitted. False: `seq` itself had to go."""
        if len(seq.blocks) == self.pool.num_blocks:
            self.finish(seq)
            self.overgrown.append(seq)
            return False
        while not self.pool.num_free:
            latest = next(reversed(self._running))
            self._preempt(latest)
            if latest is seq:
                return False
        seq.blocks += self.pool.allocate(1)
        return True

    def _preempt(self, seq: Sequence) -> None:
        """Back to the head of the queue, without blocks. What it has computed is indexed first: it may well survive."""
        self.num_preemptions += 1
        self.num_recomputed_tokens += seq.num_computed
        num_full = seq.num_computed // self.pool.block_size
        self._extend_digests(seq, num_full)
        self._register(seq, num_full)
        self._release(seq)
        seq.num_preemptions += 1
        seq.num_computed = 0
        seq.num_registered = 0
        seq.prefix_id = self._root(seq)
        seq.state = SequenceState.WAITING
        self._waiting.appendleft(seq)

    def _release(self, seq: Sequence) -> None:
        del self._running[seq]
        self._settle(seq, seq.num_registered, len(seq.digests))
        self.pool.free(seq.blocks)
        seq.blocks = []
        self._free_slots.append(seq.slot)
        seq.slot = -1

    # -- admission

    def _admit(self, slices: list[Slice], budget: int) -> None:
        """New rows from the head of the queue, while there are tokens, slots and blocks for them.

        A row gets the blocks of all its tokens at once, so a started prefill never waits for blocks. The row at the
        head is never passed over for want of blocks: large rows do not starve.
        """
        waiting = self._waiting
        num_parked = 0
        while budget and waiting and self._free_slots and num_parked < _MAX_PARKED_PER_STEP:
            seq = waiting[0]
            num_reserved = self._num_reserved()
            if self._stuck and self._stuck[0] is seq and self._stuck[1] + num_reserved > self.pool.num_free:
                return
            hits = self._match(seq)
            if self._park(seq, len(hits)):
                num_parked += 1
                continue
            num_new = self._num_blocks(len(seq.tokens)) - len(hits)
            num_taken = num_new + self.pool.num_unreferenced(hits)
            if num_taken + num_reserved > self.pool.num_free:
                self._stuck = seq, num_taken
                return
            waiting.popleft()
            self._start(seq, hits, num_new)
            budget = self._prefill(seq, slices, budget)

    def _start(self, seq: Sequence, hits: list[int], num_new: int) -> None:
        self._stuck = None
        self.pool.share(hits)
        seq.blocks = hits + self.pool.allocate(num_new)
        seq.num_computed = num_cached = len(hits) * self.pool.block_size
        seq.num_registered = len(hits)
        if hits:
            seq.prefix_id = self.pool.identity(hits[-1])
        self.num_cached_tokens += num_cached
        if seq.num_preemptions:
            self.num_recomputed_tokens -= num_cached
        seq.slot = self._free_slots.pop()
        seq.state = SequenceState.RUNNING
        self._running[seq] = None
        for digest in seq.digests[len(hits) :]:
            self._pending.setdefault(digest, seq)

    def _prefill(self, seq: Sequence, slices: list[Slice], budget: int) -> int:
        """As many of its tokens as the budget allows. Returns what is left of the budget."""
        start = seq.num_computed
        stop = min(len(seq.tokens), start + budget)
        if stop > start:
            slices.append(Slice(seq, start, stop))
        return budget - (stop - start)

    def _num_reserved(self) -> int:
        """Free blocks that an admission leaves to the running sequences, so that it does not bring on a preemption."""
        return (len(self._running) + 3) // 4

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.block_size)

    # -- prefixes

    def _root(self, seq: Sequence) -> int:
        """Where its chain of digests starts: at one root for all, or without prefix caching at a root of its row."""
        return 0 if self.prefix_caching else ~seq.request.row_index

    def _extend_digests(self, seq: Sequence, num_blocks: int) -> None:
        extend_digests(
            seq.digests, seq.tokens, num_blocks, block_size=self.pool.block_size, root=self._root(seq)
        )

    def _match(self, seq: Sequence) -> list[int]:
        if not (self.prefix_caching or seq.num_preemptions or seq.request.params.n > 1):
            return []
        self._extend_digests(seq, len(seq.tokens) // self.pool.block_size)
        return self.pool.match(seq.digests, seq.tokens, root=self._root(seq))

    def _register(self, seq: Sequence, num_full: int) -> None:
        """Puts its computed blocks up to `num_full` into the index."""
        seq.prefix_id = self.pool.register(
            seq.blocks, seq.digests, seq.tokens, first=seq.num_registered, last=num_full, parent=seq.prefix_id
        )
        seq.num_registered = num_full

    def _park(self, seq: Sequence, num_hits: int) -> bool:
        """Sets the head of the queue aside if its next block is being computed by a running sequence."""
        last = None
        num_sharable = (len(seq.tokens) - 1) // self.pool.block_size  # see BlockPool.match
        for digest in seq.digests[num_hits:num_sharable]:
            if digest not in self._pending:
                break
            last = digest
        if last is None:
            return False
        self._parked.setdefault(last, []).append(self._waiting.popleft())
        self._num_parked += 1
        return True

    def _settle(self, seq: Sequence, first: int, last: int) -> None:
        """Its blocks `first:last` are no longer pending; rows parked for them go back to the head, in order."""
        woken: list[Sequence] = []
        for digest in seq.digests[first:last]:
            if self._pending.get(digest) is seq:
                del self._pending[digest]
                woken += self._parked.pop(digest, ())
        self._num_parked -= len(woken)
        self._waiting.extendleft(reversed(woken))
