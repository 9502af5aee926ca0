"""Everything that may end a run early, and what follows: signals, the time limit, and a place in SLURM's queue again.

A signal handler only notes what came and when; the job's loop asks between two steps. The drain signal (SIGUSR1): stop
admitting rows, finish the running ones within the drain time. SIGTERM or the first SIGINT: the same within at most
15 s. A second SIGINT: stop now. Repeats of SIGTERM and the drain signal change nothing.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from batchjob.job.time_limit import TimeLimit, parse_duration
from batchjob.slurm import Requeue, SlurmTask, after_stop
from batchjob.slurm.tools import SlurmToolError
from batchjob.spec import JobSpec

TERM_DRAIN_SECONDS = 15.0


class StopSignals:
    """A context in which the process notes signals instead of dying of them. Outside the main thread it does nothing,
    since only the main thread may set handlers: a program that calls `batchjob.run` there stops it in its own way.
    """

    def __init__(self, drain_seconds: Callable[[], float], *, drain_signal: str = "SIGUSR1") -> None:
        """`drain_seconds` tells, when the drain signal comes, how long running rows may go on."""
        self._drain_seconds = drain_seconds
        self._drain_signal = signal.Signals[drain_signal]
        self._old: dict[signal.Signals, Any] = {}
        self._num_interrupts = 0
        self.reason: str | None = None  # the first signal's name, or what else asked for the end
        self.warned = False  # the end was announced (drain signal, time limit), so coming back is wanted
        self.deadline = float("inf")  # time.monotonic() until which running rows may finish
        self.now = False  # a second SIGINT: do not even finish the step's rows

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (self._drain_signal, signal.SIGTERM, signal.SIGINT):
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
        if number == self._drain_signal:
            self.warned = True
            if self.reason is None:
                self.request(name, time.monotonic() + self._drain_seconds())
            return
        self.request(name, time.monotonic() + min(TERM_DRAIN_SECONDS, self._drain_seconds()))

    def request(self, reason: str, deadline: float, *, announced: bool = False) -> None:
        """Stops the job for `reason`; running rows may go on until `deadline`, or an earlier one that is set."""
        self.warned = self.warned or announced
        self.deadline = min(self.deadline, deadline)
        self.reason = self.reason or reason

    def ignore_term(self) -> None:
        """From here on SIGTERM changes nothing, in this process and in those it starts, until the process ends."""
        if self._old.pop(signal.SIGTERM, None) is not None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    @property
    def stopping(self) -> bool:
        return self.reason is not None

    @property
    def out_of_time(self) -> bool:
        return self.now or time.monotonic() >= self.deadline


def time_limit(spec: JobSpec, task: SlurmTask | None, echo: Callable[[str], None]) -> TimeLimit:
    """Returns the limit that the spec asks for, counted from now. `auto` asks SLURM where there is one; an answer that
    does not come is a warning, and the job then relies on signals.
    """
    if spec.time_limit == "none":
        return TimeLimit()
    if spec.time_limit != "auto":
        return TimeLimit(parse_duration(spec.time_limit))
    if task is None:
        return TimeLimit()

    def ask() -> float | None:
        try:
            return task.seconds_left()
        except SlurmToolError as error:
            echo(f"warning: the time left to task {task.name} is unknown ({error})")
            return None

    return TimeLimit(ask=ask)


def stop_signals(spec: JobSpec, limit: TimeLimit) -> StopSignals:
    """Returns the handlers of a run, not yet in force."""
    given = spec.drain_timeout
    return StopSignals(limit.drain_seconds if given is None else lambda: given, drain_signal=spec.drain_signal)


def requeue(spec: JobSpec, task: SlurmTask | None, stop: StopSignals, *, made_progress: bool) -> Requeue:
    """Puts this task back into the queue, once everything is written, if the stop was announced and the spec wants it.

    Signals must still be handled by `stop`, because SLURM sends SIGTERM as soon as it is asked.
    """
    if not stop.warned:
        return Requeue()
    notes = Path(spec.output or "") / ".batchjob" / "requeues"
    return after_stop(spec.requeue, task, notes=notes, made_progress=made_progress, before_call=stop.ignore_term)
