"""`supervise`: one worker after the other, until the job is done, somebody wants an end, or nothing helps any more.

A restart is an ordinary resume, which is the only way in which a worker ever starts. So a worker may be killed at any
time; what it had finished is in the output directory.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable

from batchjob.errors import EngineError, StoppedEarlyError
from batchjob.job.devices import Device, find_devices
from batchjob.job.stop_signals import StopSignals
from batchjob.job.stopping import requeue, stop_signals, time_limit
from batchjob.slurm import SlurmTask
from batchjob.spec import JobSpec
from batchjob.supervisor.attempt import StopNotice
from batchjob.supervisor.replica import Lane, gave_up_message
from batchjob.supervisor.restart_policy import AttemptEnd
from batchjob.supervisor.team import TeamSupervisor
from batchjob.supervisor.wakeup import Wakeup

Echo = Callable[[str], None]


def supervise(spec: JobSpec, *, echo: Echo, debug: bool = False) -> int:
    """Runs a job in worker processes, one for each device that it asks for, and returns its exit code.

    A single worker prints header, progress and summary itself; `echo` gets the lines about restarts and signals, and
    those of several workers. Raises UsageError for devices that are not there, StoppedEarlyError if the worker was
    stopped before it could say so itself, EngineError if restarts do not help.
    """
    devices = find_devices(spec)
    if len(devices) > 1:
        return TeamSupervisor(spec, devices, echo=echo, debug=debug).run()
    if devices[0].environ:
        spec = spec.replace(device=devices[0].device, devices="auto")
    return Supervisor(spec, devices[0], echo=echo, debug=debug).run()


class Supervisor:
    """Of one device."""

    def __init__(self, spec: JobSpec, device: Device, *, echo: Echo, debug: bool = False) -> None:
        self._spec = spec
        self._echo = below_bar(echo)
        self._lane = Lane(spec, device, self._echo, debug=debug)

    def run(self) -> int:
        spec, lane = self._spec, self._lane
        limit = time_limit(spec, SlurmTask.from_environ(), lambda line: None)  # the worker says what is wrong with it
        notice = StopNotice(self._echo)
        with stop_signals(spec, limit) as stop, Wakeup() as wakeup:
            threading.Thread(target=limit.begin, name="time limit", daemon=True).start()  # SLURM may take its time
            while True:
                lane.start(stop, notice)
                attempt = lane.attempt
                assert attempt is not None
                try:
                    while (end := lane.poll()) is None:
                        fd = attempt.fileno()
                        wakeup.wait([] if fd is None else [fd], attempt.patience())
                finally:
                    lane.close()
                if lane.exit_code is not None:
                    return lane.exit_code
                if stop.stopping:
                    raise self._stopped(stop, attempt.journal.phase)
                self._restart(end)

    def _restart(self, end: AttemptEnd) -> None:
        """Says how it goes on. Raises EngineError or StoppedEarlyError where it does not."""
        policy = self._lane.policy
        if (line := self._lane.note(end)) is not None:
            self._echo(line)
            return
        assert policy.gave_up is not None
        if policy.device_lost:
            raise StoppedEarlyError(
                f"stopped early (device): {policy.gave_up} on {socket.gethostname()}; finished rows are safe, run it "
                "again elsewhere"
            )
        raise EngineError(gave_up_message(policy.gave_up, end))

    def _stopped(self, stop: StopSignals, phase: str) -> StoppedEarlyError:
        """The worker is gone without a word, so what it does after a stop is done here."""
        task = SlurmTask.from_environ()
        came_of_it = requeue(self._spec, task, stop, made_progress=self._lane.rows_finished > 0)
        if came_of_it.gave_up:
            raise EngineError(came_of_it.message)
        doing = {"start": "while the job was prepared", "load": "while the model was loaded"}
        when = doing.get(phase, "in the middle of its work")
        message = f"stopped early ({stop.reason}) {when}: finished rows are safe; run the same command again to go on"
        return StoppedEarlyError(f"{message}. {came_of_it.message}" if came_of_it.message else message)


def below_bar(echo: Echo) -> Echo:
    """On a terminal the worker has a bar on the last line: what we say goes below it."""
    return (lambda line: echo(f"\n{line}")) if sys.stderr.isatty() else echo
