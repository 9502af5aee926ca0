"""`supervise`: one worker after the other, until the job is done, somebody wants an end, or nothing helps any more.

A restart is an ordinary resume, which is the only way in which a worker ever starts. So a worker may be killed at any
time; what it had finished is in the output directory.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from batchjob.errors import EngineError, StoppedEarlyError
from batchjob.signals import StopSignals
from batchjob.slurm import SlurmTask
from batchjob.spec import JobSpec
from batchjob.stopping import requeue, stop_signals, time_limit
from batchjob.supervisor.attempt import Attempt
from batchjob.supervisor.policy import AttemptEnd, Policy
from batchjob.supervisor.wakeup import Wakeup
from batchjob.timelimit import parse_duration
from batchjob.watch import Assignment

Echo = Callable[[str], None]


def supervise(spec: JobSpec, *, echo: Echo, debug: bool = False) -> int:
    """Runs a job in worker processes and returns its exit code.

    The worker prints header, progress and summary itself; `echo` gets the lines about restarts and signals. Raises
    StoppedEarlyError if the worker was stopped before it could say so itself, EngineError if restarts do not help.
    """
    return Supervisor(spec, echo=echo, debug=debug).run()


class Supervisor:
    def __init__(self, spec: JobSpec, *, echo: Echo, debug: bool = False) -> None:
        self._spec = spec
        self._echo = below_bar(echo)
        self._debug = debug
        self._policy = Policy()
        self._num_restarts = 0
        self._last: AttemptEnd | None = None
        self._rows_finished = self._prompt_tokens = self._output_tokens = 0
        self._started = time.monotonic()

    def run(self) -> int:
        spec = self._spec
        limit = time_limit(spec, SlurmTask.from_environ(), lambda line: None)  # the worker says what is wrong with it
        with stop_signals(spec, limit) as stop, Wakeup() as wakeup:
            threading.Thread(target=limit.begin, name="time limit", daemon=True).start()  # SLURM may take its time
            while True:
                attempt = Attempt(self._worker_spec(), self._assignment(), stop, wakeup, self._echo, debug=self._debug)
                end = attempt.run()
                self._rows_finished += attempt.journal.num_finished
                self._prompt_tokens += attempt.journal.prompt_tokens
                self._output_tokens += attempt.journal.output_tokens
                if attempt.exit_code is not None:
                    return attempt.exit_code
                if stop.stopping:
                    raise self._stopped(stop, attempt)
                self._restart(end)

    def _worker_spec(self) -> JobSpec:
        """A time limit goes on counting through restarts."""
        spec = self._spec
        if spec.time_limit in ("auto", "none") or not self._num_restarts:
            return spec
        left = parse_duration(spec.time_limit) - (time.monotonic() - self._started)
        return spec.replace(time_limit=f"{max(1, round(left))}s")

    def _assignment(self) -> Assignment:
        return self._policy.assignment(
            restarts=self._num_restarts,
            last_end=None if self._last is None else self._last.how,
            rows_finished=self._rows_finished,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            seconds=time.monotonic() - self._started if self._num_restarts else 0.0,
        )

    def _restart(self, end: AttemptEnd) -> None:
        """Decides and says how it goes on. Raises EngineError or StoppedEarlyError where it does not."""
        self._last = end
        remedy = self._policy.note(end)
        if (reason := self._policy.gave_up) is not None:
            raise self._gave_up(reason, end)
        self._num_restarts += 1
        self._echo(f"restart {self._num_restarts}: the worker {end.how}; {remedy}")

    def _gave_up(self, reason: str, end: AttemptEnd) -> Exception:
        safe = "finished rows are safe"
        if self._policy.device_lost:
            import socket

            where = socket.gethostname()
            return StoppedEarlyError(f"stopped early (device): {reason} on {where}; {safe}, run it again elsewhere")
        return EngineError(
            f"gave up: {reason}; {safe}. The last worker {end.how}"
            + (f" ({len(end.in_flight)} rows in the engine)" if end.in_flight else " (no row in the engine)")
            + ". Run with --no-supervisor to see it come down"
        )

    def _stopped(self, stop: StopSignals, attempt: Attempt) -> StoppedEarlyError:
        """The worker is gone without a word, so what it does after a stop is done here."""
        task = SlurmTask.from_environ()
        came_of_it = requeue(self._spec, task, stop, made_progress=self._rows_finished > 0)
        if came_of_it.gave_up:
            raise EngineError(came_of_it.message)
        doing = {"start": "while the job was prepared", "load": "while the model was loaded"}
        when = doing.get(attempt.journal.phase, "in the middle of its work")
        message = f"stopped early ({stop.reason}) {when}: finished rows are safe; run the same command again to go on"
        return StoppedEarlyError(f"{message}. {came_of_it.message}" if came_of_it.message else message)


def below_bar(echo: Echo) -> Echo:
    """On a terminal the worker has a bar on the last line: what we say goes below it."""
    return (lambda line: echo(f"\n{line}")) if sys.stderr.isatty() else echo
