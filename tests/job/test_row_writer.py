"""Rows that wait for a full disk: none lost, none doubled, in bounded memory and time."""

from __future__ import annotations

from typing import Any

import pytest

from batchjob.errors import DiskFullError, StorageError
from batchjob.job import row_writer as module
from batchjob.job.row_writer import RowWriter
from batchjob.records import Completion


class Chunk:
    """Takes rows into a store that may be full."""

    def __init__(self, store: Store, num_rows: int) -> None:
        self.store, self.num_rows = store, num_rows
        self.rows: list[int] = []
        self.closed = False

    def add(self, completion: Completion) -> None:
        self.store.use()
        self.rows.append(completion.row_index)

    def is_complete(self) -> bool:
        return len(self.rows) == self.num_rows


class Store:
    def __init__(self) -> None:
        self.full = False
        self.error: StorageError = DiskFullError("the disk is full.")
        self.flushes = 0

    def use(self) -> None:
        if self.full:
            raise self.error

    def flush(self) -> None:
        self.use()
        self.flushes += 1


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


class Bench:
    def __init__(self, **options: Any) -> None:
        self.store = Store()
        self.said: list[str] = []
        self.committed: list[Chunk] = []
        self.writer = RowWriter(self.store, self._commit, timeout=60, echo=self.said.append, **options)  # type: ignore[arg-type]

    def _commit(self, chunk: Any) -> None:
        self.store.use()
        self.committed.append(chunk)

    def add(self, chunk: Chunk, row: int, text: str = "x") -> None:
        self.writer.add(chunk, Completion(row, 0, 1, [1], text, "stop"))  # type: ignore[arg-type]


def test_rows_wait_in_order_and_are_written_once_there_is_room(clock: Clock) -> None:
    bench = Bench()
    chunk = Chunk(bench.store, 4)
    bench.add(chunk, 0)
    bench.store.full = True
    for row in (1, 2, 3):
        bench.add(chunk, row)
    assert bench.writer.full
    assert (chunk.rows, bench.committed) == ([0], [])
    clock.now += 30
    bench.writer.retry()
    assert bench.writer.full
    bench.store.full = False
    clock.now += 30
    bench.writer.retry()
    assert not bench.writer.full
    assert (chunk.rows, bench.committed) == ([0, 1, 2, 3], [chunk])
    assert [line.split(":")[0] for line in bench.said] == ["warning", "the disk has room again"]


def test_a_commit_that_found_no_room_is_made_later_and_its_row_not_written_again(clock: Clock) -> None:
    bench = Bench()
    chunk = Chunk(bench.store, 1)
    add = chunk.add

    def add_and_fill(completion: Completion) -> None:
        add(completion)
        bench.store.full = True

    chunk.add = add_and_fill  # type: ignore[method-assign]
    bench.add(chunk, 0)
    assert (chunk.rows, bench.committed) == ([0], [])
    bench.store.full = False
    clock.now += 1
    bench.writer.retry()
    assert (chunk.rows, bench.committed) == ([0], [chunk])


def test_a_flush_that_found_no_room_is_made_later(clock: Clock) -> None:
    bench = Bench()
    bench.store.full = True
    bench.writer.flush()
    assert bench.writer.full
    bench.store.full = False
    clock.now += 1
    bench.writer.retry()
    assert bench.store.flushes == 1


def test_the_time_to_wait_is_bounded_and_tries_grow_rare(clock: Clock) -> None:
    bench = Bench()
    bench.store.full = True
    tries = 0

    def use() -> None:
        nonlocal tries
        tries += 1
        raise bench.store.error

    bench.store.use = use  # type: ignore[method-assign]
    bench.add(Chunk(bench.store, 9), 0)

    def wait() -> None:
        for _ in range(1000):
            clock.now += 0.1
            bench.writer.retry()

    with pytest.raises(DiskFullError):
        wait()
    assert 160 <= clock.now < 161
    assert 5 <= tries <= 15
    with pytest.raises(DiskFullError):
        bench.writer.close()


def test_memory_is_bounded(clock: Clock) -> None:
    bench = Bench(max_bytes=10_000)
    chunk = Chunk(bench.store, 99)
    bench.store.full = True
    row = 0
    while bench.writer.has_memory:
        bench.add(chunk, row, "y" * 500)
        row += 1
    assert 5 < row < 25
    bench.store.full = False
    clock.now += 1
    bench.writer.retry()
    assert bench.writer.has_memory
    assert chunk.rows == list(range(row))


def test_other_errors_are_not_waited_for(clock: Clock) -> None:
    bench = Bench()
    bench.store.full, bench.store.error = True, StorageError("I/O error")
    with pytest.raises(StorageError):
        bench.add(Chunk(bench.store, 2), 0)


def test_rows_of_a_disowned_chunk_are_dropped() -> None:
    bench = Bench()
    chunk = Chunk(bench.store, 1)
    chunk.closed = True
    bench.add(chunk, 0)
    bench.writer.close()
    assert (chunk.rows, bench.committed) == ([], [])
