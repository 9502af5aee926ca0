"""Which chunk this process takes next: its own shard's from the front, and with --steal those of others from the back.

Owner and thief claim what they work on, so that they meet in the middle. Claims are advice: a chunk that two processes
take all the same is committed once, and costs only time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from batchjob.plan import Chunk
from batchjob.progress import Counts

if TYPE_CHECKING:
    from batchjob.store.store import Store

SCAN_SECONDS = 1.0  # between two looks at what others have claimed and committed
_WAIT = 0.1


class OwnChunks:
    """Nobody else is expected to work on this process's chunks."""

    steals = False

    def __init__(self, todo: Iterable[Chunk] = ()) -> None:
        self.todo = deque(todo)
        self.num_stolen = 0

    def next(self) -> Chunk | None:
        """The chunk to open next; None if there is none now."""
        return self.todo.popleft() if self.todo else None

    def claim(self, chunk: Chunk) -> bool:
        """Whether a chunk of `todo` may be opened out of turn; `next` gives it later all the same."""
        return True

    def adopt(self, rows: Collection[int]) -> None:
        """Puts chunks of others with these rows into `todo`, where they are free."""

    def done(self, chunk: Chunk) -> None:
        """The chunk is committed."""

    def wait(self) -> bool:
        """Called when `next` gave None and nothing is open: waits a moment. False if nothing will come."""
        return False

    def close(self) -> None:
        """No more is taken; what is open here is free for others."""


class SharedChunks(OwnChunks):
    """All processes of the job have all its chunks in common. `others` are those of other shards, in plan order.

    Chunks that come and go change `counts.rows_total`.
    """

    steals = True

    def __init__(self, store: Store, todo: Iterable[Chunk], others: Iterable[Chunk], counts: Counts) -> None:
        super().__init__(todo)
        self._store = store
        self._claims = store.chunk_claims()
        self._counts = counts
        self._others = deque(others)
        self._taken: list[Chunk] = []  # that somebody else works on, or did when last seen
        self._published: set[int] = set()
        self._own: set[int] = set()  # committed here
        self._next_scan = 0.0

    def next(self) -> Chunk | None:
        self._scan(force=False)
        while self.todo:
            chunk = self.todo.popleft()
            if chunk.index in self._own:  # out of turn; its rows are counted as done here
                continue
            if self.claim(chunk):
                return chunk
            self._counts.rows_total -= chunk.num_rows
            self._put_aside(chunk)
        while self._others:
            chunk = self._others.pop()
            if self.claim(chunk):
                self._counts.rows_total += chunk.num_rows
                self.num_stolen += 1
                return chunk
            self._put_aside(chunk)
        return None

    def claim(self, chunk: Chunk) -> bool:
        if chunk.index in self._published or not self._claims.take(chunk.index):
            return False
        if self._store.is_published(chunk.index):  # since the last scan: a claim is given back after the commit
            self._settle(chunk)
            return False
        return True

    def adopt(self, rows: Collection[int]) -> None:
        for chunk in list(self._others):
            if any(chunk.row_index <= row < chunk.row_index + chunk.num_rows for row in rows) and self.claim(chunk):
                self._others.remove(chunk)
                self._counts.rows_total += chunk.num_rows
                self.num_stolen += 1
                self.todo.appendleft(chunk)

    def done(self, chunk: Chunk) -> None:
        self._own.add(chunk.index)
        self._settle(chunk)

    def _settle(self, chunk: Chunk) -> None:
        self._published.add(chunk.index)
        self._claims.release(chunk.index)

    def wait(self) -> bool:
        """Waits for chunks whose holders may be dead. Those that live will finish theirs: not waited for."""
        unsure = self._scan(force=True)
        if self.todo or self._others:
            return True
        if unsure:
            time.sleep(_WAIT)
        return unsure

    def close(self) -> None:
        self._claims.close()

    def _put_aside(self, chunk: Chunk) -> None:
        if chunk.index not in self._published:
            self._taken.append(chunk)

    def _scan(self, *, force: bool) -> bool:
        """Sees what others have committed and given up. Returns whether it is unclear if one of the holders lives."""
        now = time.monotonic()
        if not force and now < self._next_scan:
            return False
        self._next_scan = now + SCAN_SECONDS
        self._published |= self._store.published()
        self._taken = [chunk for chunk in self._taken if chunk.index not in self._published]
        if not self._taken:
            return False
        holders = self._claims.holders()
        verdicts = self._claims.judge(holders[chunk.index] for chunk in self._taken if chunk.index in holders)
        still: list[Chunk] = []
        for chunk in self._taken:
            holder = holders.get(chunk.index)
            if holder is None or verdicts[holder] is False:
                self._others.append(chunk)
            else:
                still.append(chunk)
        self._taken = still
        self._others = deque(sorted(self._others, key=lambda chunk: chunk.index))
        return any(verdicts[holders[chunk.index]] is None for chunk in still)
