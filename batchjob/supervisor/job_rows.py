"""The rows of a job that are done, by the messages of all workers of a command: each row counts once, whichever worker
tells of it."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Iterable


class JobRows:
    """`rows_total`, `rows_done` and `rows_reused` are of the shard that the command was given, and of the chunks that
    were taken from others."""

    def __init__(self, is_own: Callable[[int], bool]) -> None:
        """`is_own` tells by the index of a chunk whether it is of the command's shard."""
        self._is_own = is_own
        self._is_known = False  # a worker has seen the job
        self._starts: list[tuple[int, int]] = []  # first row and index of the chunks that were opened, sorted
        self._sizes: dict[int, int] = {}
        self._done: dict[int, int] = {}  # by chunk index
        self.rows_total = self.rows_done = self.rows_reused = 0

    @property
    def is_complete(self) -> bool:
        return self._is_known and self.rows_done >= self.rows_total

    def share(self, num_rows: int, num_done: int) -> None:
        """Takes in the rows of the command's shard, and those in parts. The first message counts: later ones include
        rows that were counted one by one."""
        if not self._is_known:
            self._is_known = True
            self.rows_total += num_rows
            self.rows_done += num_done
            self.rows_reused += num_done

    def opened(self, index: int, row_index: int, num_rows: int, num_complete: int) -> None:
        """A worker opens a chunk of which so many rows are finished already: by an earlier command, or, if it was
        opened before, by a worker of this one."""
        if index not in self._done:
            insort(self._starts, (row_index, index))
            self._sizes[index] = num_rows
            self._done[index] = 0
            self.rows_reused += num_complete
            self.rows_total += 0 if self._is_own(index) else num_rows
        self._set(index, max(num_complete, self._done[index]))

    def finished(self, rows: Iterable[int]) -> None:
        for row in rows:
            _, index = self._starts[bisect_right(self._starts, (row, 1 << 62)) - 1]
            self._set(index, min(self._done[index] + 1, self._sizes[index]))

    def _set(self, index: int, num_done: int) -> None:
        self.rows_done += num_done - self._done[index]
        self._done[index] = num_done

    def close(self, *, is_complete: bool) -> None:
        """No chunk is left for this command. Rows that are not known to be done are with other commands; if all are
        complete, they are done: by those, or by a worker that was killed before it could tell."""
        if is_complete:
            self.rows_done = self.rows_total
        else:
            self.rows_total = self.rows_done
