"""Open positions in input files: reading on from where the last chunk ended, instead of from the start."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from batchjob.plan import Segment

BUSY = 1 << 62  # the row of a position that is being read from
_MAX_POSITIONS = 4

T = TypeVar("T")


class Position(ABC, Generic[T]):
    """An open place in a file: the row to come next is `row`."""

    row: int

    @abstractmethod
    def reaches(self, segment: Segment) -> bool:
        """True if reading on to a segment that is not before `row` costs less than opening the file there."""

    @abstractmethod
    def take(self, segment: Segment) -> Iterator[T]:
        """The contents of a segment, which must not begin before `row`; `row` is BUSY until the iterator ends."""

    @abstractmethod
    def close(self) -> None: ...


class Positions:
    """The few positions that a reader keeps open; the one that was used least recently is closed for a new one."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, tuple[str, ...] | None, int], Position[Any]] = {}
        self._next_key = 0

    def take(
        self, segment: Segment, columns: tuple[str, ...] | None, open_position: Callable[[], Position[T]]
    ) -> Iterator[T]:
        """The contents of a segment through the closest open position for these columns of its file, or a new one."""
        position = self._closest(segment, columns)
        if position is None or not position.reaches(segment):
            position = self._keep(open_position(), segment.file_index, columns)
        return position.take(segment)

    def close(self) -> None:
        for position in self._open.values():
            position.close()
        self._open.clear()

    def _closest(self, segment: Segment, columns: tuple[str, ...] | None) -> Position[Any] | None:
        """The open position closest before the segment, if any."""
        best = None
        for key, position in self._open.items():
            if (
                key[:2] == (segment.file_index, columns)
                and position.row <= segment.first_row
                and (best is None or position.row > self._open[best].row)
            ):
                best = key
        if best is None:
            return None
        found = self._open.pop(best)
        self._open[best] = found  # most recently used last
        return found

    def _keep(self, position: Position[T], file_index: int, columns: tuple[str, ...] | None) -> Position[T]:
        while len(self._open) >= _MAX_POSITIONS:
            self._open.pop(next(iter(self._open))).close()
        self._next_key += 1
        self._open[file_index, columns, self._next_key] = position
        return position
