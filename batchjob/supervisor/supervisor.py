"""`supervise`: one worker process for each device, started again as often as it helps, until the job is done.

A restart is an ordinary resume, which is the only way in which a worker ever starts. So a worker may be killed at any
time; its finished rows are in the output directory.

The shard of the command is parted among the workers, who take chunks of each other when they are done with their own
(`batchjob.job.chunk_source`). The first one creates or finds the job; the others start when it is there. Each device
has its own restarts, and when it is given up, the others take what it leaves. A worker leaves only when no chunk is
left for any. One device is a team of one.

How the command ends, the first line that fits:

    an error before there is a job to share         the exit code of that error (2, 66, 78, ...)
    another command works on the shard              69, and all workers stop
    every row is done                               0, or 65 by the error rate of the whole output, whatever failed
    a signal, or the time limit                     75 after one requeue; 70 if that is no longer worth it
    every device failed: all of them as devices     75: elsewhere it may work
    every device failed: one at least was given up  70
    every device failed: with errors of their own   the exit code of the first (74, ...)
    the rest of the rows is with other shards       0 or 65
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence

from batchjob.errors import EngineError, OutputBusyError, StoppedEarlyError
from batchjob.job.devices import Device, find_devices
from batchjob.job.observer import LOAD, START, Team
from batchjob.job.stop import StopSignals, requeue, stop_signals, time_limit
from batchjob.report.result import RunResult
from batchjob.slurm import Requeue, SlurmTask
from batchjob.spec import JobSpec
from batchjob.supervisor.attempt import StopNotice
from batchjob.supervisor.replica import Failure, Replica, State
from batchjob.supervisor.reporter import Reporter
from batchjob.supervisor.restart_policy import AttemptEnd
from batchjob.supervisor.team_result import result_of
from batchjob.supervisor.wakeup import Wakeup

_TICK = 1.0  # seconds at most between two looks at the workers
TIME_LIMIT = "time limit"  # the reason that a worker gives for it


def supervise(spec: JobSpec, *, echo: Callable[[str], None], debug: bool = False) -> int:
    """Runs a job in worker processes, one for each device that it asks for, and returns its exit code.

    `echo` gets the lines for a person. Raises UsageError for devices that are not there, StoppedEarlyError if no worker
    could say how far it was before it was stopped, EngineError if restarts do not help.
    """
    return Supervisor(spec, find_devices(spec), echo=echo, debug=debug).run()


class Supervisor:
    def __init__(
        self, spec: JobSpec, devices: Sequence[Device], *, echo: Callable[[str], None], debug: bool = False
    ) -> None:
        self._spec = spec
        self._debug = debug
        self._lost: set[int] = set()
        self._reporter = Reporter(spec, [device.name for device in devices], echo)
        name = secrets.token_hex(8)
        self._replicas = [
            Replica(device, Team(name, number, len(devices), spec, self._lost), self._reporter, debug=debug)
            for number, device in enumerate(devices)
        ]
        self._error: Failure | None = None  # that ends the command
        self._is_exhausted = False  # no chunk is left to begin

    def run(self) -> int:
        limit = time_limit(self._spec, SlurmTask.from_environ(), lambda line: None)  # a worker tells what is wrong
        notice = StopNotice(self._reporter.print)
        try:
            with stop_signals(self._spec, limit) as stop, Wakeup() as wakeup:
                threading.Thread(target=limit.begin, name="time limit", daemon=True).start()  # SLURM may take its time
                self._start_due(stop, notice)
                while running := [replica for replica in self._replicas if replica.state is State.RUNNING]:
                    for replica in running:
                        if (end := replica.poll()) is not None:
                            self._take_end(replica, end, stop, notice)
                    self._start_due(stop, notice)
                    self._reporter.show(self._replicas)
                    self._wait(wakeup)
                return self._close(stop)
        finally:
            for replica in self._replicas:
                replica.close()
            self._reporter.close()

    def _wait(self, wakeup: Wakeup) -> None:
        attempts = [replica.attempt for replica in self._replicas if replica.attempt is not None]
        fds = [fd for attempt in attempts if (fd := attempt.fileno()) is not None]
        if attempts:
            wakeup.wait(fds, min(_TICK, *(attempt.patience() for attempt in attempts)))

    # -- starts and ends of workers

    def _start_due(self, stop: StopSignals, notice: StopNotice) -> None:
        waiting = [replica for replica in self._replicas if replica.state is State.WAITING]
        if stop.stopping or self._is_exhausted or self._error is not None:
            for replica in waiting:
                replica.state = State.DONE
            return
        is_prepared = any(replica.has_seen_job for replica in self._replicas)
        is_preparing = any(replica.state is State.RUNNING for replica in self._replicas)
        for replica in waiting if is_prepared else [] if is_preparing else waiting[:1]:
            replica.start(stop, notice)

    def _take_end(self, replica: Replica, end: AttemptEnd, stop: StopSignals, notice: StopNotice) -> None:
        if replica.exit_code is not None:
            self._take_exit(replica, Failure(replica.exit_code, replica.exit_message), stop)
        elif stop.stopping or replica.is_dismissed:
            replica.state = State.DONE
        elif (failure := replica.note(end)) is None:
            replica.start(stop, notice)
        else:
            self._fail(replica, failure)

    def _take_exit(self, replica: Replica, failure: Failure, stop: StopSignals) -> None:
        """A worker has ended itself: with a result, or for the error in `failure`."""
        if replica.result is not None:
            replica.state = State.DONE
            if replica.result.stopped_by is None:
                self._dismiss_the_rest()
            return
        is_busy = failure.code == OutputBusyError.exit_code
        if is_busy or len(self._replicas) == 1 or not any(other.has_seen_job for other in self._replicas):
            self._error = self._error or failure
            replica.state = State.FAILED
            if is_busy:
                stop.request("superseded", time.monotonic())
        else:
            self._fail(replica, failure)

    def _dismiss_the_rest(self) -> None:
        """A worker has left, so no chunk is left to begin: one that still loads would find nothing to do."""
        self._is_exhausted = True
        for replica in self._replicas:
            if replica.attempt is not None and replica.phase in (START, LOAD):
                replica.is_dismissed = True
                replica.attempt.kill()

    def _fail(self, replica: Replica, failure: Failure) -> None:
        replica.state, replica.failure = State.FAILED, failure
        number = self._replicas.index(replica)
        self._lost.add(number)
        others = [other for other in self._replicas if other.state in (State.RUNNING, State.WAITING)]
        for other in others:
            if other.attempt is not None:
                other.attempt.tell_lost(number)
        if len(self._replicas) > 1:
            replica.echo(failure.message)
        if others:
            replica.echo(f"{len(others)} of {len(self._replicas)} devices go on without it")

    # -- the end of the command

    def _close(self, stop: StopSignals) -> int:
        reporter, replicas = self._reporter, self._replicas
        reporter.close()
        if self._error is not None:
            if not self._error.is_bug and not self._debug:  # else the worker has printed the traceback
                reporter.print(f"batchjob: {self._error.message}")
            return self._error.code
        results = [replica.result for replica in replicas if replica.result is not None]
        is_complete = self._is_complete(results)
        reason = None if is_complete else self._stop_reason(stop, results)
        failures = [replica.failure for replica in replicas if replica.failure is not None]
        if reason is None and not is_complete and failures and (not results or not self._spec.steal):
            return self._failed(failures)
        requeued = Requeue() if reason is None else self._requeue(stop, reason)
        if not results:
            raise self._stopped(reason, requeued)
        if reason is None:
            reporter.rows.close(is_complete=is_complete)
        result = result_of(self._spec, replicas, reporter)
        result.stopped_by, result.requeue = reason, requeued
        reporter.print(result.render())
        return result.exit_code

    def _is_complete(self, results: Sequence[RunResult]) -> bool:
        """By the parts that a worker saw. Rows that count as done may still wait for the commit of their chunk."""
        if any(result.job_complete for result in results):
            return True
        in_parts = any(replica.saw_shard_in_parts for replica in self._replicas)
        return in_parts and (not self._spec.steal or self._reporter.rows.is_complete)

    def _stop_reason(self, stop: StopSignals, results: Sequence[RunResult]) -> str | None:
        """None if every worker left because no chunk was left to begin, even if a signal came meanwhile."""
        reasons = [result.stopped_by for result in results]
        if len(reasons) == len(self._replicas) and not any(reasons):
            return None
        return stop.reason or next(filter(None, reasons), None)

    def _requeue(self, stop: StopSignals, reason: str) -> Requeue:
        """Once for all workers, none of which does it."""
        if reason == TIME_LIMIT:
            stop.request(reason, time.monotonic(), announced=True)
        made_progress = any(replica.rows_finished for replica in self._replicas)
        return requeue(self._spec, SlurmTask.from_environ(), stop, made_progress=made_progress)

    def _stopped(self, reason: str | None, requeued: Requeue) -> EngineError | StoppedEarlyError:
        """The error of a stop after which no worker could say how far it was."""
        if requeued.gave_up:
            return EngineError(requeued.message)
        phases = {replica.phase for replica in self._replicas}
        when = "in the middle of its work"
        if phases <= {START, LOAD}:
            when = "while the model was loaded" if LOAD in phases else "while the job was prepared"
        message = f"stopped early ({reason}) {when}: finished rows are safe; run the same command again to go on"
        return StoppedEarlyError(f"{message}. {requeued.message}" if requeued.message else message)

    def _failed(self, failures: Sequence[Failure]) -> int:
        """Every device has failed. Returns the exit code of the first error; raises where there was no error but
        restarts did not help."""
        first, number = failures[0], len(self._replicas)
        if all(failure.is_device for failure in failures):
            what = first.message if number == 1 else f"all {number} devices failed"
            raise StoppedEarlyError(
                f"stopped early (device): {what} on {socket.gethostname()}; finished rows are safe, run it again "
                "elsewhere"
            )
        if any(failure.gave_up for failure in failures):
            raise EngineError(
                first.message if number == 1 else f"gave up: none of {number} devices goes on; finished rows are safe"
            )
        return next(failure.code for failure in failures if not failure.is_device)
