"""Writes finished rows to the store, and keeps them in memory while the disk is full.

A full disk is often caused by another program and soon over. Finished rows then wait in memory, no new rows start, and
writing is tried again for a bounded time; only after that is it an error (exit 74, not to be requeued).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from batchjob.errors import DiskFullError
from batchjob.records import Completion
from batchjob.report.progress import duration

if TYPE_CHECKING:
    from batchjob.store.chunk import OpenChunk
    from batchjob.store.store import Store

MAX_BYTES = 256 * 2**20  # of rows that wait; above it the engine waits too
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0  # seconds between two tries
_ROW_BYTES = 400  # about what a completion takes besides its text


class RowWriter:
    """`add` and `flush` never raise DiskFullError: they note it, and `full` is true until a `retry` has written all.

    `commit` publishes a complete chunk. `echo` tells a person. Raises every other StorageError at once.
    """

    def __init__(
        self,
        store: Store,
        commit: Callable[[OpenChunk], None],
        *,
        timeout: float,
        echo: Callable[[str], None],
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._store = store
        self._commit = commit
        self._timeout = timeout
        self._echo = echo
        self._max_bytes = max_bytes
        self._rows: deque[tuple[OpenChunk, Completion]] = deque()
        self._complete: deque[OpenChunk] = deque()  # chunks to commit
        self._num_bytes = 0  # about, of the rows that wait
        self._must_flush = False
        self._error: DiskFullError | None = None
        self._deadline = self._next_try = 0.0
        self._pause = FIRST_PAUSE

    @property
    def full(self) -> bool:
        """True while rows wait for room on the disk."""
        return self._error is not None

    @property
    def has_memory(self) -> bool:
        """True while more finished rows may wait."""
        return self._num_bytes < self._max_bytes

    def add(self, chunk: OpenChunk, completion: Completion) -> None:
        """Writes a finished row, and commits its chunk if it was the last."""
        self._rows.append((chunk, completion))
        if self._error is not None:
            self._num_bytes += _num_bytes(completion)
        else:
            self._write_rows()

    def complete(self, chunk: OpenChunk) -> None:
        """Commits a chunk that has all its rows already."""
        self._complete.append(chunk)
        if self._error is None:
            self._write_rows()

    def flush(self) -> None:
        """Makes every written row durable."""
        self._must_flush = True
        if self._error is None:
            self._write_rows()

    def retry(self) -> None:
        """Tries again, if it is time to. Raises DiskFullError once the disk has been full for `timeout` seconds."""
        now = time.monotonic()
        if self._error is None or now < min(self._next_try, self._deadline):
            return
        self._retry_now()
        if self._error is not None and now >= self._deadline:
            raise self._error

    def close(self) -> None:
        """The last try and flush of a run. Raises DiskFullError if something could not be written."""
        self._must_flush = True
        self._retry_now()
        if self._error is not None:
            raise self._error

    def _retry_now(self) -> None:
        was_full, self._error = self._error, None
        self._write_rows(again=was_full is not None)
        if was_full is not None and self._error is None:
            self._num_bytes = 0
            self._pause = FIRST_PAUSE
            self._echo("the disk has room again: going on")

    def _write_rows(self, *, again: bool = False) -> None:
        try:
            while self._rows:
                chunk, completion = self._rows[0]
                if not chunk.closed:  # else its rows are not those of the plan
                    chunk.add(completion)
                self._rows.popleft()
                if not chunk.closed and chunk.is_complete():
                    self._complete.append(chunk)
            while self._complete:
                if not self._complete[0].closed:  # as above
                    self._commit(self._complete[0])
                self._complete.popleft()
            if self._must_flush:
                self._store.flush()
                self._must_flush = False
        except DiskFullError as error:
            self._note_full_disk(error, again=again)

    def _note_full_disk(self, error: DiskFullError, *, again: bool) -> None:
        now = time.monotonic()
        self._error = error
        self._num_bytes = sum(_num_bytes(completion) for _, completion in self._rows)
        if not again:
            self._deadline = now + self._timeout
            self._echo(
                f"warning: {error} Until then no new rows are started; writing is tried again for "
                f"{duration(self._timeout)}."
            )
        self._next_try = now + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)


def _num_bytes(completion: Completion) -> int:
    return _ROW_BYTES + len(completion.text or "") + 8 * len(completion.token_ids)
