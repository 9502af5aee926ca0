"""Signals to a flag: a handler only notes what came and when; the job's loop asks between two steps.

SIGUSR1: stop admitting rows, finish the running ones within --drain-timeout. SIGTERM or the first SIGINT: the same
within at most 15 s. A second SIGINT: stop now. Repeats of SIGTERM and SIGUSR1 change nothing.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

TERM_DRAIN_SECONDS = 15.0
_HANDLED = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """A context in which the process notes signals instead of dying of them. Outside the main thread it does nothing,
    since only the main thread may set handlers: whoever embeds `batchjob.run` there stops it in their own way.
    """

    def __init__(self, drain_timeout: float) -> None:
        self._drain_timeout = drain_timeout
        self._old: dict[signal.Signals, Any] = {}
        self._num_interrupts = 0
        self.reason: str | None = None  # the first signal's name
        self.deadline = float("inf")  # time.monotonic() until which running rows may finish
        self.now = False  # a second SIGINT: do not even finish the step's rows

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in _HANDLED:
                self._old[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGINT:
            self._num_interrupts += 1
            self.now = self._num_interrupts > 1
        seconds = self._drain_timeout if number == signal.SIGUSR1 else min(TERM_DRAIN_SECONDS, self._drain_timeout)
        if number == signal.SIGUSR1 and self.reason is not None:
            return
        self.deadline = min(self.deadline, time.monotonic() + seconds)
        self.reason = self.reason or name

    @property
    def stopping(self) -> bool:
        return self.reason is not None

    @property
    def out_of_time(self) -> bool:
        return self.now or time.monotonic() >= self.deadline
