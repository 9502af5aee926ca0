"""From chunks of the plan to requests for the engine: opens chunks, has them fed, and turns prompts into requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from batchjob.errors import InputMissingError
from batchjob.job.chunk_source import OwnChunks
from batchjob.job.isolation import Isolation
from batchjob.job.row_writer import RowWriter
from batchjob.plan import Chunk
from batchjob.records import Completion, Prompt, Request, stream_key
from batchjob.report.progress import Progress

if TYPE_CHECKING:
    from batchjob.job.open import RunState
    from batchjob.prompts.feeder import FedBatch, PromptFeeder
    from batchjob.store.chunk import OpenChunk

MAX_OPEN_CHUNKS = 8
WINDOW_SEQS = 4  # rows that wait in the engine, per sequence slot
MIN_OPEN_SEQS = 16  # rows of open chunks, per sequence slot
FEEDER_WAIT = 0.05  # seconds to wait for the feeder when the engine has nothing to do


@dataclass(slots=True)
class OpenRow:
    """A row with samples in the engine."""

    chunk: OpenChunk
    num_left: int  # samples that are not finished yet
    num_earlier: dict[int, int] = field(default_factory=dict)  # sample -> output tokens of earlier attempts


class Intake:
    """The open chunks of a run, and their rows that are in the engine.

    `record` gets the completion of each row that fails before it can run. `on_first_prompt` gets the first prompt that
    comes from the feeder, and its chunk.
    """

    def __init__(
        self,
        run: RunState,
        feeder: PromptFeeder,
        chunks: OwnChunks,
        writer: RowWriter,
        progress: Progress,
        max_num_seqs: int,
        record: Callable[[Completion], None],
        on_first_prompt: Callable[[Prompt, Chunk], None] | None = None,
    ) -> None:
        self._run = run
        self._feeder = feeder
        self._chunks = chunks
        self._writer = writer
        self._progress = progress
        self._record = record
        self._on_first_prompt = on_first_prompt
        self._isolation = Isolation(run.observer.hints, chunks, self._open_chunk)
        self._sampling, self._job_seed = run.job.settings.row_sampling(), run.job.settings.job_seed
        self.window = WINDOW_SEQS * max_num_seqs
        self._min_open_rows = MIN_OPEN_SEQS * max_num_seqs
        self._open: dict[int, OpenChunk] = {}  # by chunk index, in plan order
        self._fed: set[int] = set()  # open chunks whose rows were all asked for, not only suspects
        self._feeding: list[int] = []  # chunks of which the feeder has more to come
        self._committed: set[int] = set()  # chunks committed here
        self.rows: dict[int, OpenRow] = {}  # by row index, for rows in the engine

    @property
    def has_open_chunks(self) -> bool:
        return bool(self._open)

    def open_chunks(self) -> bool:
        """Opens as many chunks as there should be, and has them fed. Returns False if no more chunks will come."""
        while not self._writer.full and not self._is_open_enough():
            chunk = self._chunks.next()
            if chunk is None:
                break
            opened = self._open_chunk(chunk)
            if opened is not None:
                self._fed.add(chunk.index)
                self._feed_chunk(chunk, skip_rows=opened.complete_rows())
        if not self._open and not self._writer.full:
            is_more_to_come = self._chunks.wait()
            self._run.tell_alive()
            return is_more_to_come
        return True

    def _open_chunk(self, chunk: Chunk) -> OpenChunk | None:
        """Returns the chunk, opened now or before; None once it is complete."""
        if chunk.index in self._open or chunk.index in self._committed:
            return self._open.get(chunk.index)
        opened = self._run.job.store.open_chunk(chunk.index)
        num_complete = len(opened.complete_rows())
        self._open[chunk.index] = opened
        self._run.result.rows_reused += num_complete
        self._run.counts.rows_done += num_complete
        self._progress.reused(num_complete)
        self._run.observer.opened(chunk, num_complete)
        if not opened.is_complete():
            return opened
        self._writer.complete(opened)
        return None

    def _feed_chunk(self, chunk: Chunk, *, skip_rows: set[int]) -> None:
        self._feeding.append(chunk.index)
        self._feeder.feed(chunk, skip_rows=skip_rows)

    def _is_open_enough(self) -> bool:
        """At most 8 chunks are open, or as many as hold 16 rows per sequence slot if that is more. Where others may
        take chunks away, no more are open than fill the engine and its queue."""
        fed = [self._open[index] for index in self._fed]
        if self._chunks.steals and sum(c.finished.num_expected - len(c.finished) for c in fed) >= self.window:
            return True
        return len(fed) >= MAX_OPEN_CHUNKS and sum(c.chunk.num_rows for c in fed) >= self._min_open_rows

    def close_chunk(self, chunk: Chunk) -> None:
        """Takes note of a commit."""
        self._chunks.done(chunk)
        del self._open[chunk.index]
        self._fed.discard(chunk.index)
        self._committed.add(chunk.index)

    def poll(self, requests: list[Request], timeout: float) -> bool:
        """Appends the requests of the prompts that are ready; waits up to `timeout` seconds for some. Returns False if
        none came."""
        batches = self._poll_feeder(timeout)
        self._take_batches(batches, requests)
        return bool(batches)

    def _poll_feeder(self, timeout: float) -> list[FedBatch]:
        try:
            return self._feeder.poll(timeout)
        except InputMissingError:  # rows of the chunk that was being read may be of another content than planned
            for index in self._feeding:
                if (chunk := self._open.get(index)) is not None:  # it may be committed before its last batch
                    chunk.disown()
            raise

    def _take_batches(self, batches: Iterable[FedBatch], requests: list[Request]) -> None:
        for batch in batches:
            self._run.result.warnings += batch.warnings
            if self._on_first_prompt is not None and batch.prompts:
                self._on_first_prompt(batch.prompts[0], self._open[batch.chunk_index].chunk)
                self._on_first_prompt = None
            for prompt in batch.prompts:  # none in a last batch that comes after its chunk's commit
                self._take_prompt(self._open[batch.chunk_index], prompt, requests)
            if batch.last:
                self._feeding.remove(batch.chunk_index)
            self._run.tell_alive()

    def _take_prompt(self, chunk: OpenChunk, prompt: Prompt, requests: list[Request]) -> None:
        """Appends one request per unfinished sample of the row, unless the row is an error or is held."""
        taken = self._isolation.take_prompt(chunk, prompt)
        if taken is not None:
            self._start_row(chunk, taken, requests)

    def _start_row(self, chunk: OpenChunk, prompt: Prompt, requests: list[Request]) -> None:
        row_index, params = prompt.row_index, prompt.params or self._sampling
        if prompt.params is not None:
            chunk.expect(row_index, params.n)
        missing = [sample for sample in range(params.n) if (row_index, sample) not in chunk.finished]
        row = self.rows[row_index] = OpenRow(chunk, len(missing))
        for sample_index in missing:
            if prompt.error is not None:
                request = Request(row_index, sample_index, prompt.token_ids, params, stream=0)
                self._record(Completion.failed(request, prompt.error))
                continue
            stream = stream_key(
                row_seed=params.seed, job_seed=self._job_seed, row_index=row_index, sample_index=sample_index
            )
            earlier = chunk.partial(row_index, sample_index, len(prompt.token_ids))
            if earlier:
                row.num_earlier[sample_index] = len(earlier)
                self._run.result.rows_continued += 1
            requests.append(Request(row_index, sample_index, prompt.token_ids, params, stream, earlier))

    # -- rows that may bring the engine down

    def suspects(self) -> Iterator[Sequence[int]]:
        """Yields the groups of rows to run apart, see `Isolation.groups`."""
        return self._isolation.groups()

    def suspect_requests(self, group: Sequence[int]) -> list[Request]:
        """Returns the requests of the rows that are unfinished, in the order of the group."""
        for chunk, skip_rows in self._isolation.chunks_of(group):
            self._feed_chunk(chunk, skip_rows=skip_rows)
        requests: list[Request] = []
        while self._feeding:
            self.poll(requests, FEEDER_WAIT)
            self._run.tell_alive()  # the input may take long to reach its first row; no step hangs
        return sorted(requests, key=lambda request: group.index(request.row_index))

    @property
    def has_only_held_rows(self) -> bool:
        """Poisoned rows are held, and the feeder has no other row to come."""
        return self._isolation.holds_rows and not self._feeding

    def release_held_rows(self) -> None:
        """Records the held poisoned rows as errors."""
        for chunk, prompt in self._isolation.release_held():
            self._start_row(chunk, prompt, [])
