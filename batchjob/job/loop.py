"""The loop of a worker: prompts in, steps of the engine, finished rows to the store, chunks committed. One process.

Memory is bounded whatever the size of the job: a few chunks are open at a time, the feeder reads a few batches ahead,
and only a window of rows waits in the engine.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import closing
from typing import TYPE_CHECKING

from batchjob.core.order import arrange
from batchjob.errors import StorageError
from batchjob.inputs.reader import InputReader
from batchjob.job.chunk_source import OwnChunks
from batchjob.job.intake import FEEDER_WAIT, Intake
from batchjob.job.row_writer import RowWriter
from batchjob.job.time_limit import Pace
from batchjob.plan import Chunk
from batchjob.records import Completion, Prompt, Request
from batchjob.report.progress import Progress

if TYPE_CHECKING:
    from batchjob.engine.engine import Engine
    from batchjob.job.open import RunState
    from batchjob.prompts.feeder import PromptFeeder
    from batchjob.store.chunk import OpenChunk

FULL_DISK_WAIT = 0.1  # seconds between two tries while the disk is full and nothing runs
TIME_CHECK = 0.5  # seconds between looks at the time limit


class Loop:
    """Runs the rows of `chunks`. Raises the errors of its parts; rows that were finished are in the store by then."""

    def __init__(
        self,
        run: RunState,
        engine: Engine,
        feeder: PromptFeeder,
        chunks: OwnChunks,
        *,
        on_first_prompt: Callable[[Prompt, Chunk], None] | None = None,
    ) -> None:
        """`on_first_prompt` gets the first prompt that comes from the feeder, and its chunk."""
        self._run, spec = run, run.job.spec
        self._spec = spec
        self._engine = engine
        self._chunks = chunks
        self._reader = InputReader(run.job.store.plan, max_row_bytes=spec.max_row_bytes)  # of carried columns
        self._progress = Progress(run.counts, mode=spec.progress, echo=run.echo)
        self._writer = RowWriter(run.job.store, self._commit_chunk, timeout=spec.full_disk_timeout, echo=run.echo)
        num_seqs = engine.capacity.max_num_seqs
        self._intake = Intake(
            run, feeder, chunks, self._writer, self._progress, num_seqs, self._record, on_first_prompt
        )
        self._no_more_chunks = False
        self._pace = Pace()
        self._num_steps = 0
        self._next_time_check = 0.0
        self._last_flush = time.monotonic()
        self.first_token_at: float | None = None  # by the monotonic clock

    def run(self) -> None:
        """Runs until every chunk is committed, or until a stop's drain is over."""
        with closing(self._progress), closing(self._reader):
            try:
                self._run_suspects()
                while not self._is_over():
                    self._open_chunks()
                    self._feed_engine()
                    self._step()
                self._drain()
            finally:
                self._run.result.warnings += self._reader.warnings
                try:
                    self._writer.close()
                finally:
                    self._chunks.close()

    def _is_over(self) -> bool:
        """Says if nothing new may start: all is done, a signal came, or a row begun now would not finish in time."""
        stop, limit, now = self._run.stop, self._run.time_limit, time.monotonic()
        if now >= self._next_time_check and not stop.stopping:
            self._next_time_check = now + TIME_CHECK
            if limit.is_too_late(self._pace.row_seconds()):
                stop.request("time limit", limit.last_moment, announced=True)
        return stop.stopping or self._no_more_chunks

    # -- from the chunks to the engine

    def _open_chunks(self) -> None:
        self._no_more_chunks = not self._intake.open_chunks()

    def _feed_engine(self) -> None:
        """Tops up the engine's queue from the feeder, in the job's order."""
        room = self._intake.window - self._engine.num_waiting
        if self._writer.full or not self._intake.has_open_chunks or room < self._intake.window // 2:
            return
        requests: list[Request] = []
        while len(requests) < room:
            is_idle = not requests and not self._engine.has_unfinished()
            if not self._intake.poll(requests, FEEDER_WAIT if is_idle else 0.0):
                if is_idle:
                    self._run.tell_alive()  # the input may take long to reach its first row; no step hangs
                break
        for request in arrange(requests, self._spec.order):
            self._add_request(request)
        if self._intake.has_only_held_rows and not self._engine.has_unfinished():
            self._intake.release_held_rows()  # no other row is left that could show anything

    def _add_request(self, request: Request) -> None:
        refused = self._engine.add(request)
        if refused is not None:
            self._record(refused)

    def _run_suspects(self) -> None:
        """Runs each group with no other rows in the engine. Its rows enter one at a time, so that a crash has few new
        rows to blame."""
        for group in self._intake.suspects():
            waiting = deque([] if self._is_over() else self._intake.suspect_requests(group))
            while not self._is_over() and (waiting or self._engine.has_unfinished()):
                if waiting and not self._writer.full:
                    self._add_request(waiting.popleft())
                self._step()

    # -- from the engine to the store

    def _step(self) -> None:
        """Runs one step. While the disk is full it goes on only as long as finished rows have room in memory."""
        if self._writer.full:
            self._writer.retry()
            self._run.tell_alive()
            if self._writer.full and not (self._writer.has_memory and self._engine.has_unfinished()):
                time.sleep(FULL_DISK_WAIT)
                return
        self._step_engine()

    def _step_engine(self) -> None:
        self._keep_up()
        if not self._engine.has_unfinished():
            return
        started = time.monotonic()
        completions = self._engine.step()
        num_steps = self._engine.stats.num_steps - self._num_steps  # of the device; their tokens are here now
        if num_steps:
            self._num_steps += num_steps
            self._pace.step((time.monotonic() - started) / num_steps)
        if self.first_token_at is None and self._engine.stats.num_sampled:
            self.first_token_at = time.monotonic()
        for completion in completions:
            self._pace.finished(len(completion.token_ids))
            self._record(completion)
        if any(completion.error is None for completion in completions):
            self._intake.release_held_rows()
        self._run.tell_alive()

    def _keep_up(self) -> None:
        """Does what falls due by the clock, also while the engine has nothing to do."""
        counts = self._run.counts
        counts.num_running, counts.num_waiting = self._engine.num_running, self._engine.num_waiting
        self._progress.update()
        now = time.monotonic()
        if now - self._last_flush >= self._spec.flush_interval:
            self._writer.flush()
            self._last_flush = now

    def _record(self, completion: Completion) -> None:
        row_index, counts = completion.row_index, self._run.counts
        row = self._intake.rows[row_index]
        self._writer.add(row.chunk, completion)
        counts.output_tokens += len(completion.token_ids) - row.num_earlier.get(completion.sample_index, 0)
        counts.prompt_tokens += completion.num_prompt_tokens
        row.num_left -= 1
        if row.num_left:
            return
        del self._intake.rows[row_index]
        counts.rows_done += 1
        counts.rows_failed += completion.error is not None  # for the progress line; the store has the exact numbers
        self._run.observer.finished(row_index)

    def _commit_chunk(self, chunk: OpenChunk) -> None:
        self._run.lease.check()
        num_computed = len(chunk.finished) - chunk.num_replayed
        if not chunk.commit(self._reader.carried(chunk.chunk)).won:
            self._run.result.rows_wasted += num_computed
        self._intake.close_chunk(chunk.chunk)
        self._run.tell_alive()

    def _drain(self) -> None:
        """Lets running rows finish while there is time; nothing new starts. Keeps the long ones among the rest."""
        engine, stop = self._engine, self._run.stop
        dropped = engine.drop_waiting()
        self._writer.flush()
        while engine.num_running and not stop.out_of_time:
            self._step_engine()
        dropped += engine.drop_running()
        dropped += engine.drop_waiting()
        self._save_partials(dropped)

    def _save_partials(self, dropped: Iterable[Request]) -> None:
        min_tokens, result = self._spec.save_partial, self._run.result
        if not min_tokens or self._writer.full:
            return
        try:
            for request in dropped:
                generated = request.output_token_ids
                if len(generated) >= min_tokens:
                    chunk = self._intake.rows[request.row_index].chunk
                    chunk.save_partial(request.row_index, request.sample_index, len(request.token_ids), generated)
                    result.rows_saved += 1
        except StorageError as error:  # they save time only; no result is lost
            result.warnings.append(f"unfinished rows were not kept: {error}")
