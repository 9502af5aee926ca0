"""The order in which a process takes chunks: its own shard's from the front, and with --steal others' from the back.

Owner and thief claim what they work on, so that they meet in the middle. Claims are advice: a chunk that two processes
take all the same is committed once, and costs only time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from batchjob.plan import Chunk
from batchjob.report.progress import ProgressCounts

if TYPE_CHECKING:
    from batchjob.job.observer import Team
    from batchjob.store.store import Store

SCAN_SECONDS = 1.0  # between two looks at what others have claimed and committed
_WAIT = 0.1
_WAIT_FOR_TEAM = 0.5


class OwnChunks:
    """The chunks of one shard, which no other process is expected to work on."""

    steals = False

    def __init__(self, todo: Iterable[Chunk] = ()) -> None:
        self.todo = deque(todo)
        self.num_stolen = 0

    def next(self) -> Chunk | None:
        """Returns the chunk to open next; None if there is none now."""
        return self.todo.popleft() if self.todo else None

    def claim(self, chunk: Chunk) -> bool:
        """Returns True if a chunk of `todo` may be opened out of turn; `next` gives it later all the same."""
        return True

    def adopt(self, rows: Collection[int]) -> None:
        """Puts chunks of others with these rows into `todo`, where they are free."""

    def done(self, chunk: Chunk) -> None:
        """The chunk is committed."""

    def wait(self) -> bool:
        """Waits a moment for a chunk, after `next` gave None while nothing is open. Returns False if none will come."""
        return False

    def close(self) -> None:
        """Ends the claims: chunks that are open here are free for others."""


class SharedChunks(OwnChunks):
    """All processes of the job have all its chunks in common. `others` are those of other shards, in plan order.

    Chunks that come and go change `counts.rows_total`. In a team, chunks of the command's own shard are taken before
    those of other ones, and no worker leaves before the others are done: one of their devices may fail.
    """

    steals = True

    def __init__(
        self,
        store: Store,
        todo: Iterable[Chunk],
        others: Iterable[Chunk],
        counts: ProgressCounts,
        team: Team | None = None,
    ) -> None:
        super().__init__(todo)
        self._store = store
        self._team = team
        self._claims = store.chunk_claims() if team is None else store.chunk_claims(team.keeps)
        self._counts = counts
        self._others = deque(sorted(others, key=self._rank))
        self._taken: list[Chunk] = []  # that another process works on, or did when last seen
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
                self._note_stolen(chunk)
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
                self._note_stolen(chunk)
                self.todo.appendleft(chunk)

    def _note_stolen(self, chunk: Chunk) -> None:
        self._counts.rows_total += chunk.num_rows
        self.num_stolen += self._team is None or not self._team.has(chunk.index)

    def _rank(self, chunk: Chunk) -> tuple[bool, int]:
        """The order of `_others`, of which the last is taken first."""
        return self._team is not None and self._team.has(chunk.index), chunk.index

    def done(self, chunk: Chunk) -> None:
        self._own.add(chunk.index)
        self._settle(chunk)

    def _settle(self, chunk: Chunk) -> None:
        self._published.add(chunk.index)
        self._claims.release(chunk.index)

    def wait(self) -> bool:
        """Waits for chunks whose holders may be dead. Holders that live will finish theirs: only those of the team are
        waited for."""
        seconds = self._scan(force=True)
        if self.todo or self._others:
            return True
        time.sleep(seconds)
        return seconds > 0

    def close(self) -> None:
        if self._team is None:  # else an open chunk may be why this process ends, and stays with its device
            self._claims.close()

    def _put_aside(self, chunk: Chunk) -> None:
        if chunk.index not in self._published:
            self._taken.append(chunk)

    def _scan(self, *, force: bool) -> float:
        """Looks for chunks that others have committed or given up. Returns the seconds after which to look again: 0 if
        all holders are known to live, and none is of the team."""
        now = time.monotonic()
        if not force and now < self._next_scan:
            return 0.0
        self._next_scan = now + SCAN_SECONDS
        self._published |= self._store.published()
        self._taken = [chunk for chunk in self._taken if chunk.index not in self._published]
        if not self._taken:
            return 0.0
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
        self._others = deque(sorted(self._others, key=self._rank))
        if any(verdicts[holders[chunk.index]] is None for chunk in still):
            return _WAIT
        return _WAIT_FOR_TEAM if any(self._claims.is_kept(holders[chunk.index]) for chunk in still) else 0.0
