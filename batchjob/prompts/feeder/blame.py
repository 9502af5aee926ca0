"""`Blame`: the rows that may crash the process that tokenises them, and when to stop starting it again.

When it dies, or hangs, the rows of the batch that it was building are suspects. The next process builds them one by
one and says each beforehand, so its death has one row to blame; a row at which it comes down alone twice, the second
time as the first thing that a fresh process builds, is poisoned. A kill from outside hits a batch once and no row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

NUM_PROOFS = 2  # times that a row must crash the process alone
MAX_FRUITLESS = 5  # deaths in a row without a row built, or one to blame
MAX_DOUBTFUL = 3  # rows poisoned in a row without another row built
MAX_POISONED = 100  # rows, after which it is not the rows


class Blame:
    """`alone` are the rows to be built one by one, `poisoned` those that become errors, with the reason. `gave_up`
    says why there must be no further process."""

    def __init__(self) -> None:
        self.alone: set[int] = set()
        self.poisoned: dict[int, str] = {}
        self.gave_up: str | None = None
        self._num_deaths: dict[int, int] = {}  # of rows alone
        self._num_fruitless = 0
        self._num_doubtful = 0

    @property
    def pause(self) -> float:
        """Seconds to wait before the next process: what kills one after the other may pass."""
        return 0.1 * (1 << self._num_fruitless) if self._num_fruitless > 1 else 0.0

    def built(self, rows: Iterable[int]) -> None:
        """These rows got through, or are known to the caller as errors."""
        for row in rows:
            self.alone.discard(row)
            self._num_deaths.pop(row, None)
            if row not in self.poisoned:
                self._num_fruitless = self._num_doubtful = 0

    def accuse(self, rows: Collection[int], how: str) -> str:
        """A process came down while it built these rows. Returns, for a person, what is done about it."""
        if not rows:
            self._num_fruitless += 1
            if self._num_fruitless >= MAX_FRUITLESS:
                self.gave_up = f"{self._num_fruitless} times in a row, with no row to blame"
            return "no row was in it"
        self._num_fruitless = 0
        self.alone.update(rows)
        if len(rows) > 1:
            return f"the {len(rows)} rows in it are tokenised one by one"
        (row,) = rows
        self._num_deaths[row] = self._num_deaths.get(row, 0) + 1
        if self._num_deaths[row] < NUM_PROOFS:
            return f"row {row} was alone in it and is tried once more"
        self.poisoned[row] = f"each time this row was tokenised alone, the process {how}"
        self._num_doubtful += 1
        if self._num_doubtful > MAX_DOUBTFUL:
            self.gave_up = f"at {self._num_doubtful} rows in a row, each alone"
        elif len(self.poisoned) > MAX_POISONED:
            self.gave_up = f"at {len(self.poisoned)} rows: that is more than bad rows"
        return f"row {row} did it alone, twice: it becomes an error row"
