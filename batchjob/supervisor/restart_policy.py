"""`RestartPolicy`: how the next attempt runs after one that did not end by itself, or why there is none."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from batchjob.job.observer import RestartHints
from batchjob.supervisor.protocol import Kind
from batchjob.supervisor.suspects import NUM_PROOFS, Suspects

MAX_FRUITLESS = 3  # attempts in a row that made no row durable and no group of suspects smaller
MAX_BACKOFF = 6  # times that the engine's limits are halved
MAX_POISONED = 100  # rows; with more it is not the rows
MAX_DEVICE_ENDS = 2  # attempts in a row that a device ended before a row was finished


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """How an attempt ended without being asked to."""

    kind: Kind
    how: str  # for a person: "was killed by SIGSEGV"
    in_flight: tuple[int, ...] = ()  # rows in the engine, in the order of their admission
    newest: tuple[int, ...] = ()  # those that entered with the last step that took any
    cleared: frozenset[int] = frozenset()  # suspects that it finished
    num_finished: int = 0  # rows that it finished
    has_computed: bool = True  # at least one step ended
    signal: int | None = None  # that killed the worker


class RestartPolicy:
    """Fed with one `AttemptEnd` after the other. `gave_up` says why there must be no further attempt."""

    def __init__(self) -> None:
        self.suspects = Suspects()
        self.memory_backoff = 0
        self.gave_up: str | None = None
        self.device_lost = False  # another machine may do better
        self._num_fruitless = 0
        self._num_device_ends = 0
        self._num_attempts = 0  # since a row was made durable
        self._max_accused = 1
        self._num_poisoned = 0
        self._was_killed = False  # by SIGKILL, and no single row was to blame

    def hints(self, *, restarts: int = 0, last_end: str | None = None) -> RestartHints:
        """Returns the hints for the next attempt."""
        return RestartHints(
            suspects=tuple(map(tuple, self.suspects.groups)),
            poisoned=dict(self.suspects.poisoned),
            memory_backoff=self.memory_backoff,
            restarts=restarts,
            last_end=last_end,
        )

    def note(self, end: AttemptEnd) -> str:
        """Takes in an end and returns the remedy, for a person."""
        self.suspects.clear(end.cleared)
        self._num_attempts += 1
        if end.num_finished:
            self._num_fruitless = self._num_attempts = self._num_device_ends = 0
            self.suspects.others_got_through()
        if self._is_memory(end):
            self.memory_backoff += 1
            self._num_fruitless = 0
            remedy = f"memory ran out: the engine's limits are halved ({self.memory_backoff} of {MAX_BACKOFF} times)"
        else:
            remedy = self._accuse(end)
        self._give_up(end)
        return remedy

    def _is_memory(self, end: AttemptEnd) -> bool:
        """Returns whether memory ran out: where it is plain, and where SIGKILL came once more although each row got
        through apart from the rest."""
        if self.memory_backoff == MAX_BACKOFF:
            return False
        if end.kind is Kind.MEMORY:
            return True
        is_innocent = not self.suspects.groups and not self.suspects.poisoned
        if end.kind is not Kind.CRASH or end.signal != signal.SIGKILL or not is_innocent:
            return False
        self._was_killed = not self._was_killed
        return not self._was_killed

    def _accuse(self, end: AttemptEnd) -> str:
        num_poisoned = len(self.suspects.poisoned)
        narrowed = self.suspects.accuse(end.in_flight, end.newest, end.how)
        is_poisoned = len(self.suspects.poisoned) > num_poisoned
        self._max_accused = max(self._max_accused, len(end.in_flight))
        if is_poisoned or (narrowed and (end.has_computed or self.suspects.are_compared(end.in_flight))):
            self._num_fruitless = 0
        elif not end.num_finished:
            self._num_fruitless += 1
        if end.kind is Kind.DEVICE:
            self._num_device_ends += not end.num_finished
        if is_poisoned:
            self._was_killed = False  # now it is explained
            self._num_poisoned += 1
            return f"row {end.in_flight[0]} did it alone, twice: it becomes an error row"
        if not end.in_flight:
            return "no row was in the engine"
        if len(end.in_flight) == 1:
            return f"row {end.in_flight[0]} was alone in the engine and runs alone once more"
        return f"the {len(end.in_flight)} rows in the engine run apart from the rest"

    def _give_up(self, end: AttemptEnd) -> None:
        # Halving finds one row among n in so many attempts; if no row at all got through meanwhile, it is not the rows.
        # At the end of a job there may be nothing left but bad rows: more patience if the engine was seen to work.
        num_doubtful = self.suspects.num_doubtful
        max_attempts = MAX_FRUITLESS + NUM_PROOFS * (1 + num_doubtful) + self._max_accused.bit_length()
        if self.suspects.are_compared(end.in_flight):
            max_attempts *= 3
        if self._num_device_ends >= MAX_DEVICE_ENDS:
            self.device_lost = True
            self.gave_up = f"the device failed {self._num_device_ends} times in a row"
        elif self._num_fruitless >= MAX_FRUITLESS or self._num_attempts >= max_attempts + self.memory_backoff:
            self.gave_up = f"{self._num_attempts} attempts in a row came down without finishing a row"
        elif num_doubtful > MAX_FRUITLESS:
            self.gave_up = f"{num_doubtful} rows brought the engine down, each alone, and none got through in between"
        elif self._num_poisoned > MAX_POISONED:
            self.gave_up = f"{self._num_poisoned} rows brought the engine down: that is more than bad rows"
