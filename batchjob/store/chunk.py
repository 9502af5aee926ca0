"""`OpenChunk`: one chunk in work, its finished rows, its log, and the commit that turns them into a part."""

from __future__ import annotations

import errno
import os
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchjob.errors import InputMissingError
from batchjob.plan import Chunk
from batchjob.records import Completion
from batchjob.store.commit import Committed, commit_chunk, settle, winner_of
from batchjob.store.context import StoreContext
from batchjob.store.counts import RowCounts
from batchjob.store.disk_errors import storage_error, storage_errors
from batchjob.store.reread import reread
from batchjob.store.rows import MAX_SAMPLES, FinishedRows
from batchjob.store.wal import (
    ChunkLog,
    LogScan,
    encode_partial,
    frame,
    is_foreign,
    log_name,
    parse_payloads,
)

_PARSE_ROWS = 2_000


class OpenChunk:
    """A chunk that this process works on. `Store.open_chunk` makes it; `commit` or `close` ends it.

    `finished` are the keys of finished rows, those of earlier attempts included; `counts` counts them; `num_replayed`
    of them were read from logs. `num_bad` damaged records, `num_torn` records that a kill cut off and `num_foreign`
    logs of other jobs were skipped.
    """

    def __init__(
        self, context: StoreContext, chunk: Chunk, *, on_commit: Callable[[Committed], None] | None = None
    ) -> None:
        self.chunk = chunk
        self.counts = RowCounts()
        self.num_replayed = 0
        self.num_bad = 0
        self.num_torn = 0
        self.num_foreign = 0
        self.closed = False
        self._context = context
        self._fs = context.fs
        self._on_commit = on_commit
        self._columns = context.columns
        self._wal = context.layout.chunk_wal(chunk.index)
        name = log_name(context.attempt, context.manifest.job_id)
        self._log = ChunkLog(self._fs, self._wal, name, before_open=context.check_place)
        self._log_number = -1  # of that log in `finished.logs`
        self.finished = FinishedRows(self._fs, chunk, context.manifest.num_samples, context.memory)
        self._partials: dict[tuple[int, int], tuple[int, array[int]]] = {}  # sample -> prompt tokens, output tokens
        self._replay()

    # -- what is finished

    def expect(self, row_index: int, num_samples: int) -> None:
        """Sets the number of samples of a row whose own params ask for other than the job's `n`. Before its `add`."""
        known = self.finished.bound_to(row_index)
        if known is not None and known != num_samples:
            raise InputMissingError(
                f"row {row_index} asks for {num_samples} samples, an earlier run for {known}: its input has changed"
            )
        self.finished.expect(row_index, num_samples)

    def complete_rows(self) -> set[int]:
        """The rows of which every sample is finished: those that need not be read again."""
        return self.finished.complete_rows()

    def is_complete(self) -> bool:
        """True if every sample of every row is finished, so that the chunk can be committed."""
        return len(self.finished) == self.finished.num_expected

    def add(self, completion: Completion) -> bool:
        """Writes a finished sample to the log at once, so that it survives a kill. False if it is there already.

        Raises StorageError when two files in a row could not be written; nothing is noted then, so the caller may try
        again with the same completion.
        """
        row_index, sample_index, error = completion.row_index, completion.sample_index, completion.error
        num_samples = self.finished.num_samples(row_index)
        if not 0 <= sample_index < num_samples:
            raise ValueError(f"sample {sample_index} of row {row_index} is not one of chunk {self.chunk.index}")
        if (row_index, sample_index) in self.finished:
            return False
        payload = self._columns.encode(completion, num_samples)
        offset = self._append(frame(payload))
        self.finished.put(row_index, sample_index, payload, self._log_number, offset)
        self.counts.add_row(
            None if error is None else error.type, completion.num_prompt_tokens, completion.num_output_tokens
        )
        return True

    def save_partial(self, row_index: int, sample_index: int, num_prompt_tokens: int, token_ids: Sequence[int]) -> None:
        """Keeps the output tokens of a sample that was stopped, for a later attempt. Raises StorageError."""
        if (row_index, sample_index) not in self.finished:
            self._append(frame(encode_partial(row_index, sample_index, num_prompt_tokens, token_ids)))

    def partial(self, row_index: int, sample_index: int, num_prompt_tokens: int) -> tuple[int, ...]:
        """The output tokens that a sample had when it was stopped; none for a prompt of another length."""
        known = self._partials.get((row_index, sample_index))
        return tuple(known[1]) if known is not None and known[0] == num_prompt_tokens else ()

    def _append(self, record: bytes) -> int:
        log = self._log
        try:
            offset = log.append(record)
        except OSError:
            log.abandon()  # its tail is unknown now: a new file
            try:
                offset = log.append(record)
            except OSError as error:
                path = log.path or self._wal
                log.abandon()
                raise storage_error(error, "writing", path) from error
        if offset == 0 and log.path is not None:
            self._log_number = len(self.finished.logs)
            self.finished.logs.append(log.path)
        return offset

    def sync(self) -> None:
        """Syncs the log with fdatasync, if anything was written since the last call. Raises StorageError."""
        log = self._log
        if not log.lost:
            try:
                log.sync()
                return
            except OSError:
                log.abandon()
        # What a file holds after a failed write or fsync is unknown, and asking again proves nothing: a new file.
        written = False
        try:
            log.lost = False
            self._rewrite()
            log.sync()
            written = not log.lost
        except OSError as error:
            raise storage_error(error, "writing", log.path or self._wal) from error
        finally:
            if not written:
                log.abandon()
                log.lost = True
        if not written:
            raise storage_error(OSError(errno.EIO, os.strerror(errno.EIO)), "writing", log.path or self._wal)

    def _rewrite(self) -> None:
        for group in self.finished.groups():
            for key, payload in group:
                offset = self._append(frame(payload))  # which may start a new log
                self.finished.moved(key, payload, self._log_number, offset)

    # -- the log of earlier attempts

    def _replay(self) -> None:
        try:
            names = sorted(reread(lambda: self._fs.listdir(self._wal)))
        except FileNotFoundError:
            return
        for name in names:
            if is_foreign(name, self._context.manifest.job_id):
                self.num_foreign += 1
                continue
            number = len(self.finished.logs)
            self.finished.logs.append(self._wal / name)
            try:
                reread(partial(self._replay_log, self._wal / name, number))
            except FileNotFoundError:
                continue  # committed by another process just now
        self.num_replayed = len(self.finished)

    def _replay_log(self, path: Path, number: int) -> None:
        num_bad = self.num_bad
        with self._fs.open_read(path) as file:
            scan = LogScan(file)
            batch: list[tuple[int, bytes]] = []
            try:
                for item in scan:
                    batch.append(item)
                    if len(batch) == _PARSE_ROWS:
                        self._keep_records(batch, number)
                        batch = []
                self._keep_records(batch, number)
            except OSError:
                self.num_bad = num_bad  # it is read again, or not at all
                raise
        self.num_bad += scan.num_bad
        self.num_torn += scan.num_torn

    def _keep_records(self, batch: list[tuple[int, bytes]], number: int) -> None:
        """Keeps the records of a log; the first valid one of a sample wins."""
        for (offset, payload), record in zip(batch, parse_payloads([payload for _, payload in batch]), strict=True):
            if record is not None and "partial" in record and self._keep_partial(record):
                continue
            if record is None or not self._is_valid(record):
                self.num_bad += 1
                continue
            row_index, sample_index, error = record["row"], record["sample"], record.get("error")
            if (row_index, sample_index) in self.finished:
                continue
            self.finished.expect(row_index, record["of"])
            self.finished.put(row_index, sample_index, payload, number, offset)
            self.counts.add_row(error[0] if error else None, record["prompt_tokens"], record["output_tokens"])

    def _keep_partial(self, record: dict[str, Any]) -> bool:
        """Keeps the longest output of a sample that was stopped. False if the record is not one of this chunk."""
        try:
            row, sample, num_prompt = values = record["row"], record["sample"], record["prompt_tokens"]
        except KeyError:
            return False
        tokens = record["partial"]
        if any(type(value) is not int or value < 0 for value in values) or not isinstance(tokens, list):
            return False
        if not self.finished.num_samples(row) or any(type(t) is not int or not 0 <= t < 1 << 31 for t in tokens):
            return False
        known = self._partials.get((row, sample))
        if known is None or len(known[1]) < len(tokens):
            self._partials[row, sample] = num_prompt, array("i", tokens)
        return True

    def _is_valid(self, record: dict[str, Any]) -> bool:
        """True for a record of this chunk that has everything that a part needs."""
        n = record.get("of")
        if type(n) is not int or not self._columns.is_valid(record):
            return False
        row, sample = record["row"], record["sample"]
        in_chunk = self.finished.num_samples(row) > 0 and 0 <= sample < n < MAX_SAMPLES
        return in_chunk and self.finished.bound_to(row) in (None, n)

    # -- the end

    def commit(self, carried: pa.Table | None) -> Committed:
        """Publishes the chunk as a part: afterwards it is durable and its logs are gone.

        `carried` are the carried columns of the chunk's input rows, in order. If another process has committed the
        chunk first, its part stands, ours is dropped, and `won` is False. Raises StorageError; the rows are still in
        the logs then and commit may be called again.
        """
        if not self.is_complete():
            raise ValueError(f"chunk {self.chunk.index} has {len(self.finished)} of {self.finished.num_expected} rows")
        try:
            self._context.check_place()
            if self._has_part():
                return self._close_with(self._lost_to_winner())
            self.sync()
            self._log.close()  # a file that is open cannot be removed from some network file systems
            return self._close_with(commit_chunk(self._context, self.chunk, self.finished.batches, carried))
        except OSError as error:
            # A log that we read from is gone: another process committed the chunk, unless the output was moved away.
            if isinstance(error, FileNotFoundError) and self._has_part():
                return self._close_with(self._lost_to_winner())
            raise storage_error(error, "committing from", self._wal) from error

    def _has_part(self) -> bool:
        path = self._context.layout.part(self.chunk.index)
        with storage_errors("looking for", path):
            return self._fs.exists(path)

    def _lost_to_winner(self) -> Committed:
        info = winner_of(self._context, self.chunk)
        settle(self._context, self.chunk, None)
        return Committed(self.chunk.index, self.chunk.num_rows, info.counts, won=False)

    def _close_with(self, committed: Committed) -> Committed:
        self.close()
        if self._on_commit is not None:
            self._on_commit(committed)
        return committed

    def disown(self) -> None:
        """Closes the chunk and removes what this process logged of it: its rows were not those of the plan."""
        own = [path for path in self.finished.logs if path.name.startswith(self._context.attempt)]
        self.close()
        for path in own:
            with storage_errors("removing", path):
                self._fs.unlink_if_there(path)

    def close(self) -> None:
        """Closes the chunk without committing it; its logs stay for the process that opens it next."""
        self._log.close()
        self.finished.release()
        self.closed = True
