"""`TeamSupervisor`: several devices, one worker each, as one command.

The shard of the command is parted among the workers, who take chunks of each other when they are done with their own
(`batchjob.job.chunk_source`). The first one makes or finds the job; the others start when it is there. Each device has
its own restarts, and when it is given up, the others take what it leaves. A worker leaves only when
nothing is left for any.

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
from batchjob.job.devices import Device
from batchjob.job.observer import LOAD, START, Team
from batchjob.job.stop_signals import StopSignals
from batchjob.job.stopping import requeue, stop_signals, time_limit
from batchjob.report.result import RunResult
from batchjob.slurm import Requeue, SlurmTask
from batchjob.spec import JobSpec
from batchjob.supervisor.attempt import StopNotice
from batchjob.supervisor.ending import result_of
from batchjob.supervisor.member import Failure, Member, State
from batchjob.supervisor.replica import gave_up_message
from batchjob.supervisor.reporter import Voice
from batchjob.supervisor.restart_policy import AttemptEnd
from batchjob.supervisor.wakeup import Wakeup

_TICK = 1.0  # seconds at most between two looks at a team of which nobody runs
TIME_LIMIT = "time limit"  # what a worker gives as its reason


class TeamSupervisor:
    def __init__(
        self, spec: JobSpec, devices: Sequence[Device], *, echo: Callable[[str], None], debug: bool = False
    ) -> None:
        self._spec = spec
        self._lost: set[int] = set()
        team = Team(secrets.token_hex(8), 0, spec, self._lost)
        self._voice = Voice(spec, [device.name for device in devices], team.has, echo)
        self._members = [
            Member(spec, Team(team.name, number, spec, self._lost), len(devices), device, self._voice, debug=debug)
            for number, device in enumerate(devices)
        ]
        self._error: Failure | None = None  # that ends the command
        self._nothing_is_left = False

    def run(self) -> int:
        spec = self._spec
        limit = time_limit(spec, SlurmTask.from_environ(), lambda line: None)  # the workers say what is wrong with it
        notice = StopNotice(self._voice.print)
        try:
            with stop_signals(spec, limit) as stop, Wakeup() as wakeup:
                threading.Thread(target=limit.begin, name="time limit", daemon=True).start()
                self._start_due(stop, notice)
                while running := [member for member in self._members if member.state is State.RUNNING]:
                    for member in running:
                        if (end := member.lane.poll()) is not None:
                            self._take(member, end, stop, notice)
                    self._start_due(stop, notice)
                    self._voice.show([member.lane for member in self._members])
                    self._wait(wakeup)
                return self._close(stop)
        finally:
            for member in self._members:
                member.lane.close()
            self._voice.close()

    def _wait(self, wakeup: Wakeup) -> None:
        attempts = [member.lane.attempt for member in self._members if member.lane.attempt is not None]
        fds = [fd for attempt in attempts if (fd := attempt.fileno()) is not None]
        if attempts:
            wakeup.wait(fds, min(_TICK, *(attempt.patience() for attempt in attempts)))

    # -- starts and ends of workers

    def _start_due(self, stop: StopSignals, notice: StopNotice) -> None:
        waiting = [member for member in self._members if member.state is State.WAITING]
        if stop.stopping or self._nothing_is_left or self._error is not None:
            for member in waiting:
                member.state = State.DONE
            return
        is_prepared = any(member.has_seen_job for member in self._members)
        is_preparing = any(member.state is State.RUNNING for member in self._members)
        for member in waiting if is_prepared else [] if is_preparing else waiting[:1]:
            member.state = State.RUNNING
            member.lane.start(stop, notice)

    def _take(self, member: Member, end: AttemptEnd, stop: StopSignals, notice: StopNotice) -> None:
        """A worker is gone."""
        lane = member.lane
        if lane.exit_code is not None:
            self._take_exit(member, lane.exit_code, lane.exit_message, stop)
        elif stop.stopping or member.is_dismissed:
            member.state = State.DONE
        elif (line := lane.note(end)) is not None:
            self._voice.print(f"{lane.name}: {line}")
            lane.start(stop, notice)
        else:
            assert lane.policy.gave_up is not None
            if lane.policy.device_lost:
                failure = Failure(StoppedEarlyError.exit_code, lane.policy.gave_up, is_device=True)
            else:
                failure = Failure(EngineError.exit_code, gave_up_message(lane.policy.gave_up, end), gave_up=True)
            self._fail(member, failure)

    def _take_exit(self, member: Member, code: int, message: str, stop: StopSignals) -> None:
        if member.result is not None:
            member.state = State.DONE
            if member.result.stopped_by is None:
                self._dismiss_the_rest()
            return
        failure = Failure(code, message)
        is_busy = code == OutputBusyError.exit_code
        if is_busy or not any(other.has_seen_job for other in self._members):
            self._error = self._error or failure
            member.state = State.FAILED
            if is_busy:
                stop.request("superseded", time.monotonic())
        else:
            self._fail(member, failure)

    def _dismiss_the_rest(self) -> None:
        """A worker has left, so nothing is left to begin: who still loads would find nothing to do."""
        self._nothing_is_left = True
        for member in self._members:
            attempt = member.lane.attempt
            if attempt is not None and attempt.journal.phase in (START, LOAD):
                member.is_dismissed = True
                attempt.kill()

    def _fail(self, member: Member, failure: Failure) -> None:
        member.state, member.failure = State.FAILED, failure
        self._lost.add(self._members.index(member))
        self._voice.print(f"{member.lane.name}: {failure.message}")
        others = [other for other in self._members if other.state in (State.RUNNING, State.WAITING)]
        for other in others:
            if other.lane.attempt is not None:
                other.lane.attempt.tell_lost(self._members.index(member))
        if others:
            self._voice.print(f"{member.lane.name}: {len(others)} of {len(self._members)} devices go on without it")

    # -- the end of the command

    def _close(self, stop: StopSignals) -> int:
        voice, members = self._voice, self._members
        voice.close()
        if self._error is not None:
            voice.print(f"batchjob: {self._error.message}")
            return self._error.code
        results = [member.result for member in members if member.result is not None]
        is_complete = self._is_complete(results)
        reason = stop.reason or next((result.stopped_by for result in results if result.stopped_by), None)
        failures = [member.failure for member in members if member.failure is not None]
        came_of_it = Requeue()
        if not is_complete and reason is not None:
            came_of_it = self._requeue(stop, reason)
            if not results:
                if came_of_it.gave_up:
                    raise EngineError(came_of_it.message)
                more = f". {came_of_it.message}" if came_of_it.message else ""
                message = f"stopped early ({reason}): finished rows are safe; run the same command again to go on{more}"
                raise StoppedEarlyError(message)
        elif not is_complete and failures and (not results or not self._spec.steal):
            return self._failed(failures)
        if not is_complete and reason is None:
            voice.tally.close()
        result = result_of(self._spec, members, voice)
        result.stopped_by, result.requeue = (None, Requeue()) if is_complete else (reason, came_of_it)
        voice.print(result.render())
        return result.exit_code

    def _is_complete(self, results: Sequence[RunResult]) -> bool:
        """By the parts that a worker saw. Rows that count as done may still wait for the commit of their chunk."""
        if any(result.job_complete for result in results):
            return True
        in_parts = any(member.saw_shard_in_parts for member in self._members)
        return in_parts and (not self._spec.steal or self._voice.tally.is_complete)

    def _requeue(self, stop: StopSignals, reason: str) -> Requeue:
        """Once for all workers, none of which does it."""
        if reason == TIME_LIMIT:
            stop.request(reason, time.monotonic(), announced=True)
        made_progress = any(member.lane.rows_finished for member in self._members)
        return requeue(self._spec, SlurmTask.from_environ(), stop, made_progress=made_progress)

    def _failed(self, failures: Sequence[Failure]) -> int:
        if all(failure.is_device for failure in failures):
            raise StoppedEarlyError(
                f"stopped early (device): all {len(failures)} devices failed on {socket.gethostname()}; finished rows "
                "are safe, run it again elsewhere"
            )
        if any(failure.gave_up for failure in failures):
            raise EngineError(f"gave up: none of {len(failures)} devices goes on; finished rows are safe")
        return next(failure.code for failure in failures if not failure.is_device)
