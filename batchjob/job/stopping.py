"""What may end a run early, and what follows: the scheduler's time limit, signals, and a place in the queue again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from batchjob.job.stop_signals import StopSignals
from batchjob.job.time_limit import TimeLimit, parse_duration
from batchjob.slurm import Requeue, SlurmTask, after_stop
from batchjob.slurm.tools import SlurmToolError
from batchjob.spec import JobSpec


def time_limit(spec: JobSpec, task: SlurmTask | None, echo: Callable[[str], None]) -> TimeLimit:
    """The limit that the spec asks for, counted from now. `auto` asks SLURM where there is one; an answer that does
    not come is a warning, and the job then relies on signals.
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
    """The handlers of a run, not yet in force."""
    given = spec.drain_timeout
    return StopSignals(limit.drain_seconds if given is None else lambda: given, drain_signal=spec.drain_signal)


def requeue(spec: JobSpec, task: SlurmTask | None, stop: StopSignals, *, made_progress: bool) -> Requeue:
    """Once everything is written: puts this task back into the queue if the stop was announced and the spec wants it.

    Signals must still be handled by `stop`, because SLURM sends SIGTERM as soon as it is asked.
    """
    if not stop.warned:
        return Requeue()
    notes = Path(spec.output or "") / ".batchjob" / "requeues"
    return after_stop(spec.requeue, task, notes=notes, made_progress=made_progress, before_call=stop.ignore_term)
