"""`Suspects`: the rows that may have brought the engine down, in the order in which they are tried.

When an engine dies, the rows in it are suspects. They run again apart from the rest, group by group, and a group in
which the engine dies again is cut in two. A group that gets through costs no restart, so only guilty rows cost any: at
most the logarithm of the number of rows in the engine, and two for the proof that a row kills it alone.

Each attempt with suspects begins with one row that is none, and groups that have just failed go behind the others. So
rows get through between two deaths of one row, if the engine is all right; if none does, it may not be the row.

Most poison works at once, in the step that admits the row. So those that came last are the first group, and groups
are admitted one row at a time: then the last one is a single row, and a typical case takes four restarts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

NUM_PROOFS = 2  # times that a row must kill the engine alone


class Suspects:
    """`groups` in the order in which they are to run, each a list of rows; `poisoned` are rows that killed it alone
    often enough and are not yet written as errors, with how they did."""

    def __init__(self) -> None:
        self.groups: list[list[int]] = []
        self.poisoned: dict[int, str] = {}
        self._alone: dict[int, int] = {}  # row -> times it killed the engine alone
        self._compared: set[int] = set()  # suspects since whose first accusation other rows got through

    @property
    def rows(self) -> set[int]:
        return {row for group in self.groups for row in group} | set(self.poisoned)

    @property
    def num_doubtful(self) -> int:
        """Number of poisoned rows since whose first accusation no other row got through: it may be the engine."""
        return len(self.poisoned.keys() - self._compared)

    def others_got_through(self) -> None:
        """Other rows were finished since the last `accuse`."""
        self._compared |= self.rows

    def are_compared(self, rows: Collection[int]) -> bool:
        return self._compared.issuperset(rows)

    def clear(self, rows: Collection[int]) -> None:
        """These rows are finished."""
        self.groups = [left for group in self.groups if (left := [row for row in group if row not in rows])]
        for row in rows:
            self.poisoned.pop(row, None)
            self._alone.pop(row, None)
        self._compared.difference_update(rows)

    def accuse(self, in_flight: Sequence[int], newest: Collection[int], how: str) -> bool:
        """The engine died with these rows in it, oldest first. Returns whether more is known by that: a group is now
        smaller, or a row has died alone once more."""
        accused = list(in_flight)
        if not accused:
            return False
        group = next((group for group in self.groups if set(accused) <= set(group)), None)
        if group is None:  # among the rest of the rows
            self.groups = self._split(accused, newest, how) + self.groups
            return False
        self.groups.remove(group)
        others = [row for row in group if row not in set(accused)]
        # They go behind all other groups: those that get through show meanwhile that the engine works.
        self.groups += ([others] if others else []) + self._split(accused, newest, how)
        return True

    def _split(self, accused: list[int], newest: Collection[int], how: str) -> list[list[int]]:
        """Returns parts with at most half of the rows each, the likeliest part first."""
        if len(accused) == 1:
            return self._try_alone(accused[0], how)
        last = [row for row in accused if row in newest]
        rest = [row for row in accused if row not in newest]
        if not last or len(last) > len(rest):
            last, rest = [], accused
        half = (len(rest) + 1) // 2
        return [part for part in (last, rest[half:], rest[:half]) if part]

    def _try_alone(self, row: int, how: str) -> list[list[int]]:
        count = self._alone[row] = self._alone.get(row, 0) + 1
        if count < NUM_PROOFS:
            return [[row]]
        self.poisoned[row] = how
        return []
