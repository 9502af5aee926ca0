"""`Scheduler`: which tokens of which sequences the next step computes. Knows nothing of tensors, text or files.

One rule instead of phases: each step advances `num_computed` of the running sequences towards `len(tokens)`, under
three budgets: sequences, tokens per step, KV blocks. Prefill, a part of a long prefill, a prefix hit, the return after
a preemption and decode are all that one subtraction (after vLLM's scheduler, V1).

    schedule()   decodes in order of admission, then the rest of started prefills, then new rows from the queue
    commit()     the step has run: its tokens are known now
    finish()     a sequence is over: its slot and blocks are free for the very next schedule()

Steps run in the order in which they were scheduled. So the next one may be scheduled while one is in flight: blocks
that are written by then may be shared, and blocks given back may be given out, before it has run. Only the values of
its tokens are unknown; the last step of a sequence that they end is discarded.
"""

from __future__ import annotations

from collections import deque

from batchjob.core.blocks import BlockPool
from batchjob.core.prefix_hash import PrefixHashes
from batchjob.core.sequence import Sequence, SequenceState
from batchjob.core.step_plan import Slice, StepPlan
from batchjob.records import Request, RowError

_FREE_SLOTS_SHARE = 16  # with less than one in so many slots free, they are scarce
_MAX_LOOK_AHEAD = 64  # rows that one step may pass over because their prefix is being computed: bounds its cost


class Scheduler:
    """Host cost: O(1) per slice of a plan, O(blocks) once per admission; nothing grows with the queue or with lengths.

    No prefix is computed twice at once: a waiting row whose next block a running sequence has yet to compute is passed
    over, and shares that block one step later.

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
        admission_interval: int = 1,
    ) -> None:
        """`admission_interval`: while slots or blocks are scarce, new rows are admitted once in so many steps only.

        A device that replays steps of decodes alone faster than others gains by that: otherwise, with hundreds of
        slots, some row ends and another enters on almost every step.
        """
        if min(max_num_seqs, max_num_batched_tokens, max_model_len) < 1:
            raise ValueError("max_num_seqs, max_num_batched_tokens and max_model_len must be at least 1")
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.prefix_caching = prefix_caching
        self.admission_interval = admission_interval

        self.out_of_cache: list[Sequence] = []  # ended by the last schedule(): they need more blocks than there are
        self.num_preemptions = 0
        self.num_preempted = 0  # sequences that were preempted at least once
        self.num_prompt_tokens_computed = 0  # run through the model, those of preempted rows again included
        self.num_cached_tokens = 0  # found in the prefix index, so never run for this sequence
        self.num_recomputed_tokens = 0  # computed, lost to preemption and not found again on return

        self._waiting: deque[Sequence] = deque()
        self._running: dict[Sequence, None] = {}  # in order of admission
        self._num_growing = 0  # running sequences that may yet need another block
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._pending: set[bytes] = set()  # digests of blocks that running sequences have yet to compute
        self._num_since_admission = 0  # steps
        self._blocked_head: tuple[Sequence, int] | None = None  # head of the queue and the free blocks it lacked

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def add(self, request: Request) -> RowError | None:
        """Queues a request, or returns the reason why it can never run."""
        num_tokens, limit = len(request.token_ids), self.max_model_len
        if num_tokens == 0:
            return RowError("invalid_prompt", "the prompt has no tokens")
        if num_tokens >= limit:
            message = f"the prompt has {num_tokens} tokens; max_model_len is {limit}, output included"
            return RowError("prompt_too_long", message)
        num_generated, pool = len(request.output_token_ids), self.pool
        num_blocks = self._num_blocks(num_tokens + num_generated)
        if num_blocks > pool.num_blocks:
            what = "the prompt and output" if num_generated else "the prompt"
            message = (
                f"{what} of {num_tokens + num_generated} tokens needs {num_blocks} KV blocks of "
                f"{pool.block_size} tokens; the whole cache has {pool.num_blocks} "
                f"({pool.num_blocks * pool.block_size} tokens)"
            )
            return RowError("kv_cache_too_small", message)
        max_tokens = request.params.max_tokens
        max_len = limit if max_tokens is None else min(num_tokens + max_tokens, limit)
        self._waiting.append(Sequence(request, max_len))
        return None

    def schedule(self, num_steps: int = 1) -> StepPlan | None:
        """Returns the next step, or None when there is nothing to do now.

        A step of decodes alone may come as up to `num_steps` in a row, where blocks are free for them and no sequence
        needs the host after each token. Afterwards `out_of_cache` holds the sequences that this call ended, because
        each alone fills the whole cache and needs one more block. Every plan must be run, in order.
        """
        self.out_of_cache = []
        num_preemptions = self.num_preemptions
        block_size = self.pool.block_size
        decodes: list[Slice] = []
        prefills: list[Slice] = []
        started: list[Sequence] = []
        with_new_blocks: list[Sequence] = []
        for seq in list(self._running):
            if seq.slot < 0:
                break  # preempted just now, as all that were admitted after it
            start = seq.num_computed
            if start < seq.prefill_len:
                started.append(seq)
                continue
            stop = start + 1
            if stop > len(seq.blocks) * block_size:
                if not self._grow(seq):
                    continue
                with_new_blocks.append(seq)
            elif seq.num_in_flight and stop >= seq.max_len:
                continue  # its last token is on its way
            decodes.append(Slice(seq, start, stop))
        budget = self.max_num_batched_tokens - len(decodes)
        for seq in started:
            budget = self._prefill(seq, prefills, budget)
        if self.num_preemptions == num_preemptions and self._is_time_to_admit(bool(prefills) or not decodes):
            self._admit(prefills, budget)
        if not decodes and not prefills:
            return None
        num_steps = 1 if prefills else self._reserve(decodes, num_steps, with_new_blocks)
        sampling = self._advance(decodes, prefills, num_steps)
        return StepPlan(decodes, prefills, sampling=sampling, num_steps=num_steps, with_new_blocks=with_new_blocks)

    def commit(self, plan: StepPlan, tokens: list[int]) -> None:
        """Takes in the `tokens` of one step of the plan, one for each of `plan.sampled`.

        Called once for each of its `num_steps`, in order. Tokens of sequences that are over by now are left out.
        """
        finished = SequenceState.FINISHED
        for (seq, _, _), token in zip(plan.sampled, tokens, strict=True):
            if seq.state is not finished:
                seq.tokens.append(token)
                seq.num_in_flight -= 1

    def finish(self, seq: Sequence) -> None:
        """Takes a sequence out of the queue or of the running ones. Its tokens in flight will be discarded."""
        if seq.state is SequenceState.RUNNING:
            self._release(seq)
        else:
            self._waiting.remove(seq)
            self._blocked_head = None
        seq.state = SequenceState.FINISHED

    def drop_running(self) -> list[Sequence]:
        """Takes out and returns all running sequences."""
        dropped = list(self._running)
        for seq in dropped:
            self.finish(seq)
        return dropped

    def drop_waiting(self) -> list[Sequence]:
        """Takes out and returns all waiting sequences: those never started and those preempted."""
        dropped, self._waiting, self._blocked_head = list(self._waiting), deque(), None
        for seq in dropped:
            seq.state = SequenceState.FINISHED
        return dropped

    # -- running

    def _advance(self, decodes: list[Slice], prefills: list[Slice], num_steps: int) -> list[int]:
        """Counts the tokens of these slices as computed. Returns the indices of the prefills that sample."""
        if num_steps == 1:
            for seq, _, stop in decodes:
                seq.num_computed = stop
                seq.num_in_flight += 1
        else:
            for seq, start, _ in decodes:
                num_sampled = min(num_steps, seq.max_len - start - 1)
                seq.num_computed += num_sampled
                seq.num_in_flight += num_sampled
        sampling = []
        for index, (seq, start, stop) in enumerate(prefills):
            seq.num_computed = stop
            if stop == len(seq.tokens):
                seq.num_in_flight += 1
                sampling.append(index)
            self.num_prompt_tokens_computed += max(0, min(stop, seq.num_prompt_tokens) - start)
            if seq.hashes is not None:
                self._publish(seq, seq.hashes, stop // self.pool.block_size)
        return sampling

    def _reserve(self, decodes: list[Slice], num_steps: int, with_new_blocks: list[Sequence]) -> int:
        """Allocates blocks for up to `num_steps` decode steps; returns the number for which there are enough."""
        if num_steps > 1 and any(seq.needs_host for seq, _, _ in decodes):
            return 1
        while num_steps > 1:
            needs = [
                (seq, self._num_blocks(min(start + num_steps, seq.max_len - 1)) - len(seq.blocks))
                for seq, start, _ in decodes
            ]
            if sum(number for _, number in needs if number > 0) <= self.pool.num_free:
                for seq, number in needs:
                    if number > 0:
                        self._extend(seq, number)
                        with_new_blocks.append(seq)
                break
            num_steps //= 2
        return num_steps

    def _extend(self, seq: Sequence, num_blocks: int) -> None:
        could_grow = self._may_grow(seq)
        seq.blocks += self.pool.allocate(num_blocks)
        self._num_growing -= could_grow and not self._may_grow(seq)

    def _grow(self, seq: Sequence) -> bool:
        """Allocates one more block for a decode, if need be from the latest admitted. False: it does not decode now."""
        if seq.num_in_flight and seq.num_computed + 1 >= seq.max_len:
            return False  # its last token is on its way
        if len(seq.blocks) == self.pool.num_blocks:
            if not seq.num_in_flight:  # else that token may end it
                self.finish(seq)
                self.out_of_cache.append(seq)
            return False
        while not self.pool.num_free:
            latest = next(reversed(self._running))
            self._preempt(latest)
            if latest is seq:
                return False
        self._extend(seq, 1)
        return True

    def _preempt(self, seq: Sequence) -> None:
        """Moves a sequence to the head of the queue, without blocks. Its full blocks stay in the index."""
        self.num_preemptions += 1
        self.num_preempted += not seq.num_preemptions
        self.num_recomputed_tokens += seq.num_computed
        seq.num_lost = seq.num_computed
        num_full = min(seq.num_computed, len(seq.tokens)) // self.pool.block_size
        self.pool.register(self._hashes(seq, num_full), seq.blocks, num_full)
        self._release(seq)
        seq.num_preemptions += 1
        seq.num_computed = 0
        seq.state = SequenceState.WAITING
        self._waiting.appendleft(seq)

    def _release(self, seq: Sequence) -> None:
        del self._running[seq]
        self._num_growing -= self._may_grow(seq)
        if seq.hashes is not None:
            self._pending.difference_update(seq.hashes.digests[seq.hashes.num_registered :])
            seq.hashes.detach()
        self.pool.free(seq.blocks)
        seq.blocks = []
        self._free_slots.append(seq.slot)
        seq.slot = -1

    # -- admission

    def _is_time_to_admit(self, has_prompts_anyway: bool) -> bool:
        self._num_since_admission += 1
        if (
            has_prompts_anyway
            or self._num_since_admission >= self.admission_interval
            or (self._blocked_head is None and len(self._free_slots) * _FREE_SLOTS_SHARE >= self.max_num_seqs)
        ):
            self._num_since_admission = 0
            return True
        return False

    def _admit(self, slices: list[Slice], budget: int) -> None:
        """Admits rows from the head of the queue, while there are tokens, slots and blocks for them.

        A row gets the blocks of all its tokens at once, so a started prefill never waits for blocks. The row at the
        head is never passed over for want of blocks: large rows do not starve.

        One free block is left for each running sequence that may grow. Measured in simulation against none: 1 to 5 %
        more steps, but 1.7 to 60 times fewer tokens computed again after preemptions.
        """
        waiting = self._waiting
        passed_over: list[Sequence] = []
        while budget and waiting and self._free_slots and len(passed_over) < _MAX_LOOK_AHEAD:
            seq = waiting[0]
            if seq.num_in_flight:
                break  # preempted with its newest token unknown
            num_usable = self.pool.num_free - self._num_growing
            if self._blocked_head and self._blocked_head[0] is seq and self._blocked_head[1] > num_usable:
                break
            hits = self._match(seq)
            if self._is_pending(seq, len(hits)):
                passed_over.append(waiting.popleft())
                continue
            num_new = self._num_blocks(len(seq.tokens)) - len(hits)
            num_taken = num_new + self.pool.num_unreferenced(hits)
            if num_taken > num_usable:
                self._blocked_head = seq, num_taken
                break
            waiting.popleft()
            self._start(seq, hits, num_new)
            budget = self._prefill(seq, slices, budget)
        waiting.extendleft(reversed(passed_over))

    def _start(self, seq: Sequence, hits: list[int], num_new: int) -> None:
        self._blocked_head = None
        self.pool.share(hits)
        seq.blocks = hits + self.pool.allocate(num_new)
        seq.num_computed = num_cached = len(hits) * self.pool.block_size
        seq.prefill_len = len(seq.tokens)
        num_regained = min(num_cached, seq.num_lost)
        self.num_recomputed_tokens -= num_regained
        self.num_cached_tokens += num_cached - num_regained
        seq.slot = self._free_slots.pop()
        seq.state = SequenceState.RUNNING
        self._running[seq] = None
        self._num_growing += self._may_grow(seq)
        if seq.hashes is not None:
            self.pool.adopt(seq.hashes, hits)
            self._pending.update(seq.hashes.digests[len(hits) :])

    def _prefill(self, seq: Sequence, slices: list[Slice], budget: int) -> int:
        """Adds a slice with as many tokens as the budget allows. Returns the rest of the budget."""
        start = seq.num_computed
        stop = min(len(seq.tokens), start + budget)
        if stop > start:
            slices.append(Slice(seq, start, stop))
        return budget - (stop - start)

    def _may_grow(self, seq: Sequence) -> bool:
        return len(seq.blocks) * self.pool.block_size < seq.max_len - 1  # the last token's KV is never needed

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.block_size)

    # -- prefixes

    def _hashes(self, seq: Sequence, num_blocks: int) -> PrefixHashes:
        """Returns the sequence's hashes up to `num_blocks`. Rows share a root if prefix caching is on."""
        if seq.hashes is None:
            seq.hashes = PrefixHashes(0 if self.prefix_caching else ~seq.request.row_index)
        seq.hashes.extend(seq.tokens, num_blocks, self.pool.block_size)
        return seq.hashes

    def _match(self, seq: Sequence) -> list[int]:
        """Returns the blocks that it can share. Never the last token's: that one has to be computed for its logits, and
        a shared block is never written to, so a prompt that ends with a block computes that block again in its own.
        """
        if not (self.prefix_caching or seq.num_preemptions or seq.request.params.n > 1):
            return []
        block_size = self.pool.block_size
        hashes = self._hashes(seq, len(seq.tokens) // block_size)
        return self.pool.match(hashes, (len(seq.tokens) - 1) // block_size)

    def _is_pending(self, seq: Sequence, num_hits: int) -> bool:
        """True if a running sequence is about to compute the block after its hits, which it could then share."""
        if seq.hashes is None or num_hits == (len(seq.tokens) - 1) // self.pool.block_size:
            return False
        return seq.hashes.digests[num_hits] in self._pending

    def _publish(self, seq: Sequence, hashes: PrefixHashes, num_full: int) -> None:
        """Indexes the blocks that it was admitted with, of its first `num_full`, which are computed now."""
        first = hashes.num_registered
        last = min(num_full, len(hashes.digests))
        if last > first:
            self.pool.register(hashes, seq.blocks, last)
            self._pending.difference_update(hashes.digests[first:last])

    def check(self) -> None:
        """Asserts the invariants, between any two calls. For tests."""
        block_size = self.pool.block_size
        running = self._running
        open_blocks = [block for seq in running for block in seq.blocks[seq.num_computed // block_size :]]
        self.pool.check([seq.blocks for seq in running], writable=open_blocks)
        ahead = {digest for seq in running if seq.hashes for digest in seq.hashes.digests[seq.hashes.num_registered :]}
        assert self._pending <= ahead
        slots = [seq.slot for seq in running]
        assert sorted(slots + self._free_slots) == list(range(self.max_num_seqs))
        on_their_way_out = sum(
            len(seq.tokens) + seq.num_in_flight == seq.max_len
            or (seq.num_in_flight > 0 and len(seq.blocks) == self.pool.num_blocks)
            for seq in running
        )
        assert len(running) - on_their_way_out <= self.max_num_batched_tokens
        assert self._num_growing == sum(self._may_grow(seq) for seq in running)
        for seq in running:
            assert seq.state is SequenceState.RUNNING
            num_tokens = len(seq.tokens) + seq.num_in_flight
            assert seq.num_computed < num_tokens <= seq.max_len
            assert seq.num_computed >= seq.prefill_len or not seq.num_in_flight
            assert self._num_blocks(seq.num_computed) <= len(seq.blocks) <= self._num_blocks(num_tokens)
        for seq in self._waiting:
            assert seq.state is SequenceState.WAITING
            assert (seq.slot, seq.blocks, seq.num_computed) == (-1, [], 0)
            assert self._num_blocks(len(seq.tokens)) <= self.pool.num_blocks
