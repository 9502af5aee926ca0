"""Which rows of a job are done, by what all workers of a command say: each row counts once, whoever says it."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Iterable


class Tally:
    """`rows_total`, `rows_done` and `rows_reused` are of the shard that the command was given, and of the chunks that
    were taken from others."""

    def __init__(self, is_own: Callable[[int], bool]) -> None:
        """`is_own` says of the index of a chunk whether it is of the command's shard."""
        self._is_own = is_own
        self._is_known = False
        self._starts: list[tuple[int, int]] = []  # first row and index of the chunks that were taken up, sorted
        self._sizes: dict[int, int] = {}
        self._done: dict[int, int] = {}  # by chunk index
        self.rows_total = self.rows_done = self.rows_reused = 0

    @property
    def is_known(self) -> bool:
        """Whether a worker has seen the job."""
        return self._is_known

    @property
    def is_complete(self) -> bool:
        return self._is_known and self.rows_done >= self.rows_total

    def share(self, num_rows: int, num_done: int) -> None:
        """The rows of the command's shard, and those in parts. The first word counts: later ones know of rows that
        were counted one by one."""
        if not self._is_known:
            self._is_known = True
            self.rows_total += num_rows
            self.rows_done += num_done
            self.rows_reused += num_done

    def opened(self, index: int, row_index: int, num_rows: int, num_complete: int) -> None:
        """A worker takes up a chunk, so many of whose rows are finished already: by an earlier command, or, if it was
        taken up before, by a worker of this one."""
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

    def close(self) -> None:
        """Nothing is left for this command: what it did not do itself is with others."""
        self.rows_total = self.rows_done
