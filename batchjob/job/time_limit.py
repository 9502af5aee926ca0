"""The time limit of a process: when to stop admitting rows, so that every row that starts is also finished.

The clock is the monotonic one, which all processes of a machine share and which is never set.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable
from statistics import median

from batchjob.errors import UsageError

RESERVE = 60.0  # seconds before the end at which everything must have been written: SLURM's warnings can be this early
DEFAULT_DRAIN = 120.0  # seconds, where no end is known
_UNITS = {"d": 86_400, "h": 3600, "m": 60, "s": 1}
_UNIT_FORM = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
_CLOCK_FORM = re.compile(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)")


def parse_duration(text: str, *, name: str = "--time-limit") -> float:
    """Seconds from 90m, 3h30m, 2d, H:MM:SS or D-HH:MM:SS. A bare number is refused: SLURM takes it for minutes, most
    others for seconds. Raises UsageError.
    """
    match = _CLOCK_FORM.fullmatch(text) or _UNIT_FORM.fullmatch(text)
    seconds = 0
    if match is not None:
        for size, number in zip(_UNITS.values(), match.groups(), strict=True):
            seconds += size * int(number or 0)
    if not seconds:
        raise UsageError(f"{name} must be a time such as 90m, 3h30m or 12:00:00, not {text!r}")
    return float(seconds)


class TimeLimit:
    """An end that is known beforehand, or none.

    The reserve is a tenth of the whole time where that is less than a minute.
    """

    def __init__(
        self,
        seconds: float | None = None,
        *,
        ask: Callable[[], float | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`seconds` count from now; None if the end is not known yet. `ask` returns how many are left now (None: it
        cannot say): at `begin`, and once more before work ends, since a limit can be changed while a job runs.
        """
        self._clock = clock
        self._ask = ask
        self._end, self._reserve = float("inf"), RESERVE
        self._set(seconds)

    def begin(self) -> None:
        """Asks for the limit, if it can be asked for. Until then there is none."""
        if self._ask is not None:
            self._set(self._ask())

    def _set(self, seconds: float | None) -> None:
        if seconds is not None:
            self._end = self._clock() + seconds
            self._reserve = min(RESERVE, 0.1 * seconds)

    @property
    def last_moment(self) -> float:
        """The time on the clock by which running rows must be finished; infinite without a limit."""
        return self._end - self._reserve

    def drain_seconds(self) -> float:
        """How long running rows may go on after a warning."""
        left = self._end - self._clock()
        if left == float("inf"):
            return DEFAULT_DRAIN
        return max(left - self._reserve, 0.5 * left, 0.0)

    def is_too_late(self, row_seconds: float) -> bool:
        """Returns True if a row that takes this long would not be finished in time. Asks again before it says so."""
        if self._clock() + row_seconds < self.last_moment:
            return False
        if self._ask is not None:
            left = self._ask()
            self._end = self._end if left is None else self._clock() + left
        return self._clock() + row_seconds >= self.last_moment


class Pace:
    """How long a row takes here and now: the typical number of output tokens of late, times the time of a step."""

    def __init__(self) -> None:
        self._step_seconds = 0.0
        self._num_tokens: deque[int] = deque(maxlen=512)

    def step(self, seconds: float) -> None:
        """A moving average over some fifty steps: a single slow one (a long prompt, a commit) says little."""
        self._step_seconds += (seconds - self._step_seconds) * (0.02 if self._step_seconds else 1.0)

    def finished(self, num_tokens: int) -> None:
        self._num_tokens.append(num_tokens)

    def row_seconds(self) -> float:
        """Returns the time of the median row; 0 as long as none has finished. Half of the rows admitted at that moment
        are finished, and the others cost only slots that would have stayed empty.
        """
        return self._step_seconds * median(self._num_tokens) if self._num_tokens else 0.0
