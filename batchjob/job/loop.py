"""The loop of a worker: prompts in, steps of the engine, finished rows to the store, chunks committed. One process.

Memory is bounded whatever the size of the job: a few chunks are open at a time, the feeder reads a few batches ahead,
and only a window of rows waits in the engine.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from batchjob.core.order import arrange
from batchjob.errors import InputMissingError, StorageError
from batchjob.job.chunk_source import OwnChunks
from batchjob.job.observer import RunObserver
from batchjob.job.row_writer import Backlog
from batchjob.job.stop import StopSignals
from batchjob.job.time_limit import Pace, TimeLimit
from batchjob.plan import Chunk
from batchjob.records import Completion, Prompt, Request, RowError, stream_key
from batchjob.report.progress import Progress, ProgressCounts
from batchjob.sampling import SamplingParams

if TYPE_CHECKING:
    from batchjob.engine.engine import Engine
    from batchjob.inputs.reader import InputReader
    from batchjob.prompts.feeder import FedBatch, PromptFeeder
    from batchjob.store.chunk import OpenChunk
    from batchjob.store.lease import Lease, NoLease
    from batchjob.store.store import Store

MAX_OPEN_CHUNKS = 8
WINDOW_SEQS = 4  # rows that wait in the engine, per sequence slot
FEEDER_WAIT = 0.05  # seconds to wait for the feeder when the engine has nothing to do
FULL_DISK_WAIT = 0.1  # seconds between two looks around while the disk is full and nothing runs
TIME_CHECK = 0.5  # seconds between looks at the time limit


class Loop:
    """Runs the chunks given to `run`. Raises what its rooms raise; whatever was finished is in the store by then."""

    def __init__(
        self,
        *,
        store: Store,
        engine: Engine,
        feeder: PromptFeeder,
        reader: InputReader,
        sampling: SamplingParams,
        job_seed: int,
        counts: ProgressCounts,
        progress: Progress,
        stop: StopSignals,
        observer: RunObserver,
        lease: Lease | NoLease,
        time_limit: TimeLimit,
        flush_interval: float,
        order: str,
        save_partial: int,
        full_disk_timeout: float,
        echo: Callable[[str], None],
        on_first_prompt: Callable[[Prompt, Chunk], None] | None = None,
    ) -> None:
        """`on_first_prompt` gets the first prompt that comes from the feeder, and its chunk."""
        self._store = store
        self._backlog = Backlog(store, self._commit, timeout=full_disk_timeout, echo=echo)
        self._engine = engine
        self._feeder = feeder
        self._on_first_prompt = on_first_prompt
        self._reader = reader
        self._sampling = sampling
        self._job_seed = job_seed
        self._counts = counts
        self._progress = progress
        self._stop = stop
        self._observer = observer
        self._lease = lease
        self._time_limit = time_limit
        self._pace = Pace()
        self._num_steps = 0
        self._next_time_check = 0.0
        self._flush_interval = flush_interval
        self._order = order
        self._save_partial = save_partial
        max_num_seqs = engine.capacity.max_num_seqs
        self._window = WINDOW_SEQS * max_num_seqs
        self._min_open_rows = 16 * max_num_seqs
        self._chunks = OwnChunks()
        self._open: dict[int, OpenChunk] = {}  # by chunk index, in plan order
        self._is_fed: set[int] = set()  # open chunks whose rows were all asked for, not only suspects
        self._feeding: list[int] = []  # chunks of which the feeder has more to come
        self._committed: set[int] = set()  # chunks committed here
        self._condemned = observer.hints.poisoned
        self._held: list[tuple[OpenChunk, Prompt]] = []  # condemned rows, until another row shows that the engine works
        self._engine_works = False
        self._made: dict[tuple[int, int], int] = {}  # samples that go on -> output tokens of earlier attempts
        self._samples_left: dict[int, int] = {}  # row -> samples not yet finished, for rows in the engine
        self._chunk_of: dict[int, OpenChunk] = {}  # row -> its chunk, for rows in the engine
        self._last_flush = time.monotonic()
        self.num_reused = 0  # rows found finished in the logs of earlier attempts
        self.num_saved = 0  # unfinished samples whose tokens were kept
        self.num_continued = 0  # samples that go on behind the tokens of an earlier attempt
        self.num_wasted = 0  # output rows computed here of chunks that another process committed first
        self.first_token_at: float | None = None  # by the monotonic clock
        self.warnings: list[str] = []

    def run(self, chunks: OwnChunks) -> None:
        """Until every chunk is committed, or a signal's drain is over."""
        self._chunks = chunks
        try:
            self._run_suspects()
            while not self._is_over():
                if self._backlog.full:
                    self._wait_for_room()
                    continue
                self._open_chunks()
                if not self._open:
                    if not chunks.wait():
                        return
                    self._tell_alive()
                    continue
                self._pull()
                self._step()
            self._drain()
        finally:
            self.warnings += self._reader.warnings
            try:
                self._backlog.close()
            finally:
                chunks.close()

    def _is_over(self) -> bool:
        """Whether nothing new may start: a signal came, or a row begun now would not be finished in time."""
        now = time.monotonic()
        if now >= self._next_time_check and not self._stop.stopping:
            self._next_time_check = now + TIME_CHECK
            if self._time_limit.is_too_late(self._pace.row_seconds()):
                self._stop.request("time limit", self._time_limit.last_moment, announced=True)
        return self._stop.stopping

    # -- what goes in

    def _open_chunks(self) -> None:
        while not self._backlog.full and not self._is_open_enough():
            chunk = self._chunks.next()
            if chunk is None:
                return
            opened = self._open_chunk(chunk)
            if opened is not None:
                self._is_fed.add(chunk.index)
                self._feed(chunk, skip_rows=opened.complete_rows())

    def _open_chunk(self, chunk: Chunk) -> OpenChunk | None:
        """The chunk, opened now or before; None once it is complete."""
        if chunk.index in self._open or chunk.index in self._committed:
            return self._open.get(chunk.index)
        opened = self._store.open_chunk(chunk.index)
        num_complete = len(opened.complete_rows())
        self._open[chunk.index] = opened
        self.num_reused += num_complete
        self._counts.rows_done += num_complete
        self._progress.reused(num_complete)
        self._observer.opened(chunk, num_complete)
        if not opened.is_complete():
            return opened
        self._backlog.complete(opened)
        return None

    def _feed(self, chunk: Chunk, *, skip_rows: set[int]) -> None:
        self._feeding.append(chunk.index)
        self._feeder.feed(chunk, skip_rows=skip_rows)

    def _is_open_enough(self) -> bool:
        """At most 8 chunks, or as many as hold 16 rows per sequence slot if that is more. Where others may take some
        away, no more than fill the engine and its queue."""
        fed = [self._open[index] for index in self._is_fed]
        if self._chunks.steals and sum(c.finished.num_expected - len(c.finished) for c in fed) >= self._window:
            return True
        return len(fed) >= MAX_OPEN_CHUNKS and sum(c.chunk.num_rows for c in fed) >= self._min_open_rows

    def _pull(self) -> None:
        """Tops up the engine's queue from the feeder, in the job's order."""
        room = self._window - self._engine.num_waiting
        if room < self._window // 2:
            return
        requests: list[Request] = []
        while len(requests) < room:
            idle = not requests and not self._engine.has_unfinished()
            batches = self._poll(FEEDER_WAIT if idle else 0.0)
            if not batches:
                if idle:
                    self._tell_alive()  # the input may take long to reach its first row; no step hangs
                break
            self._take_batches(batches, requests)
        for request in arrange(requests, self._order):
            self._admit(request)
        if self._held and not (self._feeding or self._engine.has_unfinished()):
            self._release_held()  # no other row is left to show anything

    def _poll(self, timeout: float) -> list[FedBatch]:
        try:
            return self._feeder.poll(timeout)
        except InputMissingError:  # rows of the chunk that was being read may be of another content than planned
            for index in self._feeding:
                if (chunk := self._open.get(index)) is not None:  # it may be committed before its last batch
                    chunk.disown()
            raise

    def _take_batches(self, batches: Iterable[FedBatch], requests: list[Request]) -> None:
        for batch in batches:
            self.warnings += batch.warnings
            if self._on_first_prompt is not None and batch.prompts:
                self._on_first_prompt(batch.prompts[0], self._open[batch.chunk_index].chunk)
                self._on_first_prompt = None
            for prompt in batch.prompts:  # none in a last batch that comes after its chunk's commit
                self._take(self._open[batch.chunk_index], prompt, requests)
            if batch.last:
                self._feeding.remove(batch.chunk_index)
            self._tell_alive()

    def _admit(self, request: Request) -> None:
        refused = self._engine.add(request)
        if refused is not None:
            self._record(refused)

    def _take(self, chunk: OpenChunk, prompt: Prompt, requests: list[Request]) -> None:
        """One request per sample of a row that is not finished yet; a row with an error is finished here."""
        row_index = prompt.row_index
        if row_index in self._condemned and prompt.error is None:
            prompt = replace(prompt, error=crash_error(self._condemned[row_index]))
            if not self._engine_works:
                self._held.append((chunk, prompt))
                return
        params = prompt.params or self._sampling
        if prompt.params is not None:
            chunk.expect(row_index, params.n)
        missing = [sample for sample in range(params.n) if (row_index, sample) not in chunk.finished]
        self._samples_left[row_index] = len(missing)
        self._chunk_of[row_index] = chunk
        for sample_index in missing:
            if prompt.error is not None:
                self._record(failed(prompt, sample_index, prompt.error))
                continue
            stream = stream_key(
                row_seed=params.seed,
                job_seed=self._job_seed,
                row_index=row_index,
                sample_index=sample_index,
            )
            made = chunk.partial(row_index, sample_index, len(prompt.token_ids))
            if made:
                self._made[row_index, sample_index] = len(made)
                self.num_continued += 1
            requests.append(Request(row_index, sample_index, prompt.token_ids, params, stream, made))

    # -- rows that may bring the engine down

    def _run_suspects(self) -> None:
        """All groups, one after the other, behind one row that is no suspect: if the engine dies of that one too, it is
        not the rows."""
        groups = self._observer.hints.suspects
        control = self._control_row({row for group in groups for row in group}) if groups else None
        for group in [*([] if control is None else [(control,)]), *groups]:
            if not self._is_over():
                self._run_apart(group)

    def _control_row(self, suspects: set[int]) -> int | None:
        """The last free row of the first chunk that has one: far from its neighbours, and read soon in any case."""
        for chunk in self._chunks.todo:
            rows = set(range(chunk.row_index, chunk.row_index + chunk.num_rows)) - suspects - self._condemned.keys()
            if not rows or not self._chunks.claim(chunk):
                continue
            opened = self._open_chunk(chunk)
            if opened is not None and (free := rows - opened.complete_rows()):
                return max(free)
        return None

    def _run_apart(self, group: Sequence[int]) -> None:
        """Rows that were in an engine when it came down, with no others in the engine. They enter one at a time, so
        that a crash has few new rows to blame."""
        waiting = deque(self._requests_of(group))
        while not self._is_over() and (waiting or self._engine.has_unfinished()):
            if self._backlog.full:
                self._wait_for_room()
                continue
            if waiting:
                self._admit(waiting.popleft())
            self._step()

    def _requests_of(self, group: Sequence[int]) -> list[Request]:
        """The requests of those rows that are still to be done, in the order of the group."""
        self._chunks.adopt(group)
        for chunk in self._chunks.todo:
            rows = range(chunk.row_index, chunk.row_index + chunk.num_rows)
            if not any(row in rows for row in group) or not self._chunks.claim(chunk):
                continue
            opened = self._open_chunk(chunk)
            if opened is not None and (wanted := set(group).intersection(rows) - opened.complete_rows()):
                self._feed(chunk, skip_rows=set(rows) - wanted)
        requests: list[Request] = []
        while self._feeding:
            self._take_batches(self._poll(FEEDER_WAIT), requests)
            self._tell_alive()  # as in `_pull`
        return sorted(requests, key=lambda request: group.index(request.row_index))

    def _release_held(self) -> None:
        held, self._held, self._engine_works = self._held, [], True
        for chunk, prompt in held:
            self._take(chunk, prompt, [])

    # -- what comes out

    def _step(self) -> None:
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
        if not self._engine_works and any(completion.error is None for completion in completions):
            self._release_held()
        self._tell_alive()

    def _keep_up(self) -> None:
        """What falls due by the clock, also while the engine has nothing to do."""
        self._counts.num_running = self._engine.num_running
        self._counts.num_waiting = self._engine.num_waiting
        self._progress.update()
        now = time.monotonic()
        if now - self._last_flush >= self._flush_interval:
            self._backlog.flush()
            self._last_flush = now

    def _record(self, completion: Completion) -> None:
        row_index = completion.row_index
        self._backlog.add(self._chunk_of[row_index], completion)
        counts = self._counts
        counts.output_tokens += len(completion.token_ids)
        if self._made:
            counts.output_tokens -= self._made.pop((row_index, completion.sample_index), 0)
        counts.prompt_tokens += completion.num_prompt_tokens
        left = self._samples_left[row_index] - 1
        if left:
            self._samples_left[row_index] = left
            return
        del self._samples_left[row_index], self._chunk_of[row_index]
        counts.rows_done += 1
        counts.rows_failed += completion.error is not None  # for the progress line; the store has the exact numbers
        self._observer.finished(row_index)

    def _tell_alive(self) -> None:
        self._observer.alive(self._counts.prompt_tokens, self._counts.output_tokens)

    def _commit(self, chunk: OpenChunk) -> None:
        self._lease.check()
        num_computed = len(chunk.finished) - chunk.num_replayed
        if not chunk.commit(self._reader.carried(chunk.chunk)).won:
            self.num_wasted += num_computed
        self._chunks.done(chunk.chunk)
        index = chunk.chunk.index
        del self._open[index]
        self._is_fed.discard(index)
        self._committed.add(index)
        self._tell_alive()

    def _wait_for_room(self) -> None:
        """The disk is full: nothing new is taken in. What runs goes on while its rows have room in memory."""
        self._backlog.retry()
        self._tell_alive()
        if self._backlog.full:
            if self._engine.has_unfinished() and self._backlog.has_memory:
                self._step()
            else:
                time.sleep(FULL_DISK_WAIT)

    def _drain(self) -> None:
        """Nothing new starts; running rows finish while there is time, and the long ones among the rest are kept."""
        engine = self._engine
        dropped = engine.drop_waiting()
        self._backlog.flush()
        while engine.num_running and not self._stop.out_of_time:
            self._step()
        dropped += engine.drop_running()
        dropped += engine.drop_waiting()
        self._save_partials(dropped)

    def _save_partials(self, dropped: Iterable[Request]) -> None:
        if not self._save_partial or self._backlog.full:
            return
        try:
            for request in dropped:
                made = request.output_token_ids
                if len(made) >= self._save_partial:
                    chunk = self._chunk_of[request.row_index]
                    chunk.save_partial(request.row_index, request.sample_index, len(request.token_ids), made)
                    self.num_saved += 1
        except StorageError as error:  # they are a saving, not a result
            self.warnings.append(f"unfinished rows were not kept: {error}")


def crash_error(how: str) -> RowError:
    return RowError("engine_crash", f"each time this row ran alone, the process with the engine {how}")


def failed(prompt: Prompt, sample_index: int, error: RowError) -> Completion:
    return Completion(
        row_index=prompt.row_index,
        sample_index=sample_index,
        num_prompt_tokens=len(prompt.token_ids),
        token_ids=[],
        text=None,
        finish_reason=None,
        error=error,
    )
