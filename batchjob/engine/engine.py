"""`Engine`: requests in, completions out. Joins the scheduler (what to compute) and a runner (computes it).

Knows nothing of tensors, files or devices. One step is: schedule, execute, commit, return what is over. Where the
runner can, the next step is scheduled and started before the tokens of the last one are fetched, so that the device
does not wait for the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from batchjob.core.blocks import BlockPool
from batchjob.core.scheduler import Scheduler
from batchjob.core.sequence import Sequence, SequenceState
from batchjob.core.step_plan import StepPlan
from batchjob.engine.config import EngineConfig, Handle, Runner
from batchjob.errors import BatchJobError, EngineError
from batchjob.records import Completion, Request, RowError
from batchjob.tasks import Detokenizer, Generate, Task


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters of the work that an engine has done so far."""

    num_steps: int
    num_batched_tokens: int  # tokens run through the model, prompt and output
    num_sampled: int  # output tokens, those of failed rows included
    num_wasted: int  # sampled for rows that were over by then: the price of not waiting for each token
    num_prompt_tokens: int  # of all accepted requests; the n samples of a row count n times
    num_prompt_tokens_computed: int
    num_cached_tokens: int  # found in the prefix cache instead
    num_recomputed_tokens: int  # lost to preemption and computed again
    num_preemptions: int
    num_preempted: int  # samples that were preempted at least once
    runner_seconds: float  # spent in the runner, the wait for its tokens included


_Launched = tuple[StepPlan, Handle]


class Engine:
    """Continuous batching: rows enter and leave at any step. The task decides when a row ends, and with what."""

    def __init__(
        self,
        runner: Runner,
        detokenizer: Detokenizer,
        config: EngineConfig,
        *,
        task: type[Task] = Generate,
        before_step: Callable[[StepPlan], None] | None = None,
    ) -> None:
        """`before_step` is called with every plan before it runs: with a crash in mind, the last moment to note it."""
        self.capacity = capacity = runner.capacity()
        self._runner = runner
        self._before_step = before_step
        self._task = task(detokenizer, config)
        self._scheduler = Scheduler(
            BlockPool(capacity.num_blocks, capacity.block_size),
            max_num_seqs=capacity.max_num_seqs,
            max_num_batched_tokens=capacity.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            prefix_caching=config.prefix_caching,
            admission_interval=capacity.admission_interval,
        )
        self._decode_steps = config.decode_steps_per_launch
        self._in_flight: _Launched | None = None
        self._num_steps = self._num_batched_tokens = self._num_sampled = self._num_prompt_tokens = self._num_wasted = 0
        self._runner_seconds = 0.0

    # -- queue

    def add(self, request: Request) -> Completion | None:
        """Queues a request. One that can never run comes back at once, as a completion with an error."""
        vocab_size = self.capacity.vocab_size
        error = _unknown_token(request, vocab_size) or self._task.add(request, vocab_size)
        error = error or self._scheduler.add(request)
        if error is not None:
            return Completion.failed(request, error)
        self._num_prompt_tokens += len(request.token_ids)
        return None

    @property
    def num_waiting(self) -> int:
        """Rows in the queue, preempted ones included."""
        return self._scheduler.num_waiting

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running

    def has_unfinished(self) -> bool:
        return self._in_flight is not None or self._scheduler.num_running > 0 or self._scheduler.num_waiting > 0

    def drop_waiting(self) -> list[Request]:
        """Takes out and returns the rows that do not run now, preempted ones included. Running rows go on.

        A request with generated tokens comes back with them, and continues after them when it is added again.
        """
        return self._dropped(self._scheduler.drop_waiting())

    def drop_running(self) -> list[Request]:
        """The same for the rows that run now."""
        return self._dropped(self._scheduler.drop_running())

    def _dropped(self, dropped: list[Sequence]) -> list[Request]:
        for seq in dropped:
            self._task.forget(seq)
        return [
            replace(seq.request, output_token_ids=tuple(seq.output_token_ids)) if seq.num_output_tokens else seq.request
            for seq in dropped
        ]

    # -- steps

    def step(self) -> list[Completion]:
        """Computes one step and returns the rows that are over. An empty list if there was nothing to do.

        With `async_scheduling` it starts one step and returns what the step before it has ended. Raises EngineError if
        the runner fails. No row is lost by that: what has not been returned is unfinished.
        """
        plan = self._scheduler.schedule(self._decode_steps)
        launched = self._execute(plan)
        arrived = self._exchange(launched)
        return self._evicted() + self._commit(arrived)

    def _execute(self, plan: StepPlan | None) -> _Launched | None:
        """Starts a plan; None where there is nothing to do now."""
        if plan is None:
            if self._in_flight is None and not self._scheduler.out_of_cache and self.has_unfinished():
                raise EngineError(f"no step can be scheduled with {self.num_waiting} waiting rows: this is a bug")
            return None
        if self._before_step is not None:
            self._before_step(plan)
        with self._in_runner(plan):
            return plan, self._runner.execute(plan)

    def _exchange(self, launched: _Launched | None) -> _Launched | None:
        """The plan whose results are waited for: with `async_scheduling` the one launched before, else this one."""
        if not self.capacity.async_scheduling:
            return launched
        arrived, self._in_flight = self._in_flight, launched
        return arrived

    def _evicted(self) -> list[Completion]:
        """The rows that the last plan has ended, because each alone needs more than the whole cache."""
        return [self._evict(seq) for seq in self._scheduler.out_of_cache]

    def _commit(self, arrived: _Launched | None) -> list[Completion]:
        """Waits for the results of a plan, appends its tokens, and returns the rows that they end."""
        if arrived is None:
            return []
        plan, handle = arrived
        with self._in_runner(plan):
            output = handle.result()
        self._num_steps += plan.num_steps
        self._num_batched_tokens += plan.num_tokens * plan.num_steps
        scheduler, finished = self._scheduler, SequenceState.FINISHED
        completions = []
        for tokens in output.tokens:
            scheduler.commit(plan, tokens)
            pairs = zip(plan.sampled, tokens, strict=True)
            unfinished = [(slice_.seq, token) for slice_, token in pairs if slice_.seq.state is not finished]
            self._num_sampled += len(tokens)
            self._num_wasted += len(tokens) - len(unfinished)
            for seq, completion in self._task.ended(unfinished):
                scheduler.finish(seq)
                completions.append(completion)
        return completions

    @contextmanager
    def _in_runner(self, plan: StepPlan) -> Iterator[None]:
        """Counts the seconds, and turns whatever is raised into an EngineError that names the rows of the plan."""
        started = time.perf_counter()
        try:
            yield
        except BatchJobError:
            raise
        except Exception as error:
            raise EngineError(self._describe_failure(plan, error)) from error
        self._runner_seconds += time.perf_counter() - started

    def _describe_failure(self, plan: StepPlan, error: Exception) -> str:
        rows = sorted({slice_.seq.request.row_index for slice_ in plan.slices})
        shown = ", ".join(map(str, rows[:8])) + (f" and {len(rows) - 8} more" if len(rows) > 8 else "")
        return (
            f"step {self._num_steps + 1} failed with {type(error).__name__}: {error} "
            f"({len(plan.slices)} sequences, {plan.num_tokens} tokens; rows {shown})"
        )

    # -- ends

    def _evict(self, seq: Sequence) -> Completion:
        """The scheduler has taken it out already."""
        self._task.forget(seq)
        num_tokens, capacity = len(seq.tokens), self.capacity
        message = (
            f"prompt and output have grown to {num_tokens} tokens, which need {capacity.num_blocks + 1} KV blocks of "
            f"{capacity.block_size} tokens; the whole cache has {capacity.num_blocks}"
        )
        return Completion.failed(seq.request, RowError("kv_cache_too_small", message), token_ids=seq.output_token_ids)

    # -- the rest

    @property
    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        return EngineStats(
            num_steps=self._num_steps,
            num_batched_tokens=self._num_batched_tokens,
            num_sampled=self._num_sampled - self._num_wasted,
            num_wasted=self._num_wasted,
            num_prompt_tokens=self._num_prompt_tokens,
            num_prompt_tokens_computed=scheduler.num_prompt_tokens_computed,
            num_cached_tokens=scheduler.num_cached_tokens,
            num_recomputed_tokens=scheduler.num_recomputed_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_preempted=scheduler.num_preempted,
            runner_seconds=self._runner_seconds,
        )

    def close(self) -> None:
        self._runner.close()


def _unknown_token(request: Request, vocab_size: int) -> RowError | None:
    """The error of a prompt with a token id that the model does not have: it would fail the step, and other rows."""
    ids = request.token_ids
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        return RowError("invalid_prompt", f"token id {wrong} is outside the model's vocabulary of {vocab_size}")
    return None
