"""A sparse index of the places of rows, at most 131,072 entries however many rows there are."""

from __future__ import annotations

from array import array

from batchjob.inputs.digests import MASK

_MAX_INDEX = 1 << 17


class RowIndex:
    """Places of every `step`-th row over all files. Doubles `step` when it is full, unless that is fixed."""

    def __init__(self, step: int, *, is_fixed: bool) -> None:
        self.step, self._is_fixed = step, is_fixed
        self._offsets, self._lines = array("q"), array("q")
        self._sums: list[int] = []
        self.bounds: dict[int, int] = {}  # where files begin and end -> sum of the digests of all rows before

    def add(self, offset: int, line: int, digests: int) -> None:
        """For rows 0, step, 2 x step, ... in turn. `digests` is the sum of the digests of all rows before."""
        self._sums.append(digests)
        self._offsets.append(offset)
        self._lines.append(line)
        if len(self._offsets) >= _MAX_INDEX and not self._is_fixed:
            self._offsets, self._lines, self._sums = self._offsets[::2], self._lines[::2], self._sums[::2]
            self.step *= 2

    def place(self, row_index: int) -> tuple[int, int]:
        """The byte offset and line of a row that is a multiple of `step`."""
        return self._offsets[row_index // self.step], self._lines[row_index // self.step]

    def digest(self, first: int, stop: int) -> str:
        """The digest of the rows between two indexed rows or ends of files."""
        return f"{self._sum(stop) - self._sum(first) & MASK:032x}"

    def _sum(self, row_index: int) -> int:
        known = self.bounds.get(row_index)
        return self._sums[row_index // self.step] if known is None else known
