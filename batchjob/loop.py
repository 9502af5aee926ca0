"""The loop of a worker: prompts in, steps of the engine, finished rows to the store, chunks committed. One process.

Memory is bounded whatever the size of the job: a few chunks are open at a time, the feeder reads a few batches ahead,
and only a window of rows waits in the engine.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from batchjob.core.order import arrange
from batchjob.plan import Chunk
from batchjob.progress import Counts, Progress
from batchjob.records import Completion, Prompt, Request, RowError, stream_key
from batchjob.sampling import SamplingParams
from batchjob.signals import StopSignals

if TYPE_CHECKING:
    from batchjob.engine.engine import Engine
    from batchjob.feeder import PromptFeeder
    from batchjob.io.reader import InputReader
    from batchjob.store.chunk import OpenChunk
    from batchjob.store.store import Store

MAX_OPEN_CHUNKS = 8
WINDOW_SEQS = 4  # rows that wait in the engine, per sequence slot
FEEDER_WAIT = 0.05  # seconds to wait for the feeder when the engine has nothing to do


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
        counts: Counts,
        progress: Progress,
        stop: StopSignals,
        flush_interval: float,
        order: str,
    ) -> None:
        self._store = store
        self._engine = engine
        self._feeder = feeder
        self._reader = reader
        self._sampling = sampling
        self._job_seed = job_seed
        self._counts = counts
        self._progress = progress
        self._stop = stop
        self._flush_interval = flush_interval
        self._order = order
        max_num_seqs = engine.capacity.max_num_seqs
        self._window = WINDOW_SEQS * max_num_seqs
        self._min_open_rows = 16 * max_num_seqs
        self._todo: deque[Chunk] = deque()
        self._open: dict[int, OpenChunk] = {}  # by chunk index, in plan order
        self._samples_left: dict[int, int] = {}  # row -> samples not yet finished, for rows in the engine
        self._chunk_of: dict[int, OpenChunk] = {}  # row -> its chunk, for rows in the engine
        self._last_flush = time.monotonic()
        self.num_reused = 0  # rows found finished in the logs of earlier attempts
        self.warnings: list[str] = []

    def run(self, chunks: Sequence[Chunk]) -> None:
        """Until every chunk is committed, or a signal's drain is over."""
        self._todo.extend(chunks)
        try:
            while not self._stop.stopping:
                self._open_chunks()
                if not self._open:
                    return
                self._pull()
                self._step()
            self._drain()
        finally:
            self._store.flush()
            self.warnings += self._reader.warnings

    # -- what goes in

    def _open_chunks(self) -> None:
        while self._todo and not self._is_open_enough():
            chunk = self._todo.popleft()
            opened = self._store.open_chunk(chunk.index)
            complete = opened.complete_rows()
            self._open[chunk.index] = opened
            self.num_reused += len(complete)
            self._counts.rows_done += len(complete)
            self._progress.reused(len(complete))
            if opened.is_complete():
                self._commit(opened)
            else:
                self._feeder.feed(chunk, skip_rows=complete)

    def _is_open_enough(self) -> bool:
        """At most 8 chunks, or as many as hold 16 rows per sequence slot if that is more."""
        num_open = len(self._open)
        return num_open >= MAX_OPEN_CHUNKS and sum(c.chunk.num_rows for c in self._open.values()) >= self._min_open_rows

    def _pull(self) -> None:
        """Tops up the engine's queue from the feeder, in the job's order."""
        room = self._window - self._engine.num_waiting
        if room < self._window // 2:
            return
        requests: list[Request] = []
        while len(requests) < room:
            idle = not requests and not self._engine.has_unfinished()
            batches = self._feeder.poll(FEEDER_WAIT if idle else 0.0)
            if not batches:
                break
            for batch in batches:
                self.warnings += batch.warnings
                for prompt in batch.prompts:  # none in a last batch that comes after its chunk's commit
                    self._take(self._open[batch.chunk_index], prompt, requests)
        for request in arrange(requests, self._order):
            refused = self._engine.add(request)
            if refused is not None:
                self._record(refused)

    def _take(self, chunk: OpenChunk, prompt: Prompt, requests: list[Request]) -> None:
        """One request per sample of a row that is not finished yet; a row with an error is finished here."""
        row_index = prompt.row_index
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
            requests.append(Request(row_index, sample_index, prompt.token_ids, params, stream))

    # -- what comes out

    def _step(self) -> None:
        if not self._engine.has_unfinished():
            return
        for completion in self._engine.step():
            self._record(completion)
        self._counts.num_running = self._engine.num_running
        self._counts.num_waiting = self._engine.num_waiting
        self._progress.update()
        now = time.monotonic()
        if now - self._last_flush >= self._flush_interval:
            self._store.flush()
            self._last_flush = now

    def _record(self, completion: Completion) -> None:
        row_index = completion.row_index
        chunk = self._chunk_of[row_index]
        chunk.add(completion)
        counts = self._counts
        counts.output_tokens += len(completion.token_ids)
        counts.prompt_tokens += completion.num_prompt_tokens
        left = self._samples_left[row_index] - 1
        if left:
            self._samples_left[row_index] = left
            return
        del self._samples_left[row_index], self._chunk_of[row_index]
        counts.rows_done += 1
        counts.rows_failed += completion.error is not None  # for the progress line; the store has the exact numbers
        if chunk.is_complete():
            self._commit(chunk)

    def _commit(self, chunk: OpenChunk) -> None:
        chunk.commit(self._reader.carried(chunk.chunk))
        del self._open[chunk.chunk.index]

    def _drain(self) -> None:
        """A signal came: nothing new starts; running rows finish while there is time."""
        self._engine.drop_waiting()
        while self._engine.num_running and not self._stop.out_of_time:
            self._step()


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
