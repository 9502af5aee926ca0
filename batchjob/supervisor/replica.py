"""`Replica`: one device of a command and its workers, one after the other."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from batchjob.errors import BatchJobError, EngineError, StoppedEarlyError
from batchjob.job.devices import Device
from batchjob.job.observer import END, LOAD, RUN, START, Team
from batchjob.job.stop import StopSignals
from batchjob.job.time_limit import parse_duration
from batchjob.report.result import RunResult
from batchjob.slurm import Requeue
from batchjob.spec import JobSpec
from batchjob.supervisor.attempt import Attempt, StopNotice
from batchjob.supervisor.reporter import Reporter
from batchjob.supervisor.restart_policy import AttemptEnd, RestartPolicy
from batchjob.supervisor.worker_state import Listener, WorkerState


class State(Enum):
    WAITING = auto()  # until the job is there
    RUNNING = auto()
    DONE = auto()  # no chunk was left for it, or it was stopped
    FAILED = auto()


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a device gets no further worker. `is_device`: the device itself failed, so another one may do better;
    `gave_up`: restarts did not help."""

    code: int
    message: str
    is_device: bool = False
    gave_up: bool = False

    @property
    def is_bug(self) -> bool:
        """The error is none that this program raises on purpose."""
        return self.code == BatchJobError.exit_code


class Replica(Listener):
    """`start` a worker, `poll` it until it has ended, then `note` the end and start again, or give up.

    The numbers are the sums over all its workers.
    """

    def __init__(self, device: Device, team: Team, reporter: Reporter, *, debug: bool) -> None:
        self.name = device.name
        self.state = State.WAITING
        self.attempt: Attempt | None = None
        self.num_restarts = 0
        self.last_end: str | None = None  # how the worker ended that was restarted last
        self.exit_code: int | None = None  # of a worker that ended itself, for the reason in `exit_message`
        self.exit_message = ""
        self.has_seen_job = False  # a worker got as far as loading
        self.is_dismissed = False  # no chunk is left for it
        self.failure: Failure | None = None
        self.result: RunResult | None = None
        self.saw_shard_in_parts = False  # all of the command's shard
        self.counts: tuple[dict[str, Any], dict[str, Any]] | None = None  # output rows in parts, and in open chunks
        self._device = device
        self._team = team
        self._spec = _worker_spec(team, device)
        self._reporter = reporter
        self._debug = debug
        self._policy = RestartPolicy()
        self._workers: list[WorkerState] = []
        self._created = time.monotonic()

    # -- one worker after the other

    def start(self, stop: StopSignals, notice: StopNotice) -> None:
        self.state, self.result = State.RUNNING, None
        hints = self._policy.hints(restarts=self.num_restarts, last_end=self.last_end)
        self.attempt = Attempt(
            self.worker_spec(),
            hints,
            self._team,
            stop,
            notice,
            self.echo,
            debug=self._debug,
            environ=self._device.environ,
            listener=self,
        )
        self._workers.append(self.attempt.worker_state)

    def poll(self) -> AttemptEnd | None:
        """Returns how the worker has ended, or None while it runs."""
        assert self.attempt is not None
        end = self.attempt.poll()
        if end is not None:
            self.exit_code, self.exit_message = self.attempt.exit_code, self.attempt.exit_message
            self.close()
        return end

    def note(self, end: AttemptEnd) -> Failure | None:
        """Takes in the end of a worker that did not end itself, and tells a person about the restart that follows.
        Returns why there must be none, if so."""
        self.last_end = end.how
        remedy = self._policy.note(end)
        if self._policy.device_lost:
            return Failure(StoppedEarlyError.exit_code, self._policy.gave_up or "", is_device=True)
        if self._policy.gave_up is not None:
            return Failure(EngineError.exit_code, _gave_up_message(self._policy.gave_up, end), gave_up=True)
        self.num_restarts += 1
        self.echo(f"restart {self.num_restarts}: the worker {end.how}; {remedy}")
        return None

    def close(self) -> None:
        if self.attempt is not None:
            self.attempt.close()
            self.attempt = None

    def worker_spec(self) -> JobSpec:
        """The spec of the next worker. A time limit goes on counting through restarts, and while a replica waits for
        its first start."""
        spec = self._spec
        spent = time.monotonic() - self._created
        if spec.time_limit in ("auto", "none") or (not self.num_restarts and spent < 1):
            return spec
        return spec.replace(time_limit=f"{max(1, round(parse_duration(spec.time_limit) - spent))}s")

    def echo(self, line: str) -> None:
        """Prints a line about this device."""
        self._reporter.print(self._reporter.labelled(self, line))

    # -- messages of its workers

    def entered(self, phase: str) -> None:
        self.has_seen_job = self.has_seen_job or phase == LOAD
        if phase == RUN:
            self._reporter.begin()
        elif phase == END:
            self._reporter.end()

    def said(self, phase: str, line: str) -> None:
        self._reporter.said(self, phase, line)

    def header(self, lines: list[str]) -> None:
        self._reporter.header(self, lines)

    def share(self, num_rows: int, num_done: int) -> None:
        self._reporter.rows.share(num_rows, num_done)

    def opened(self, index: int, row_index: int, num_rows: int, num_complete: int) -> None:
        self._reporter.rows.opened(index, row_index, num_rows, num_complete)

    def finished(self, rows: list[int]) -> None:
        self._reporter.rows.finished(rows)

    def ended_with(self, message: dict[str, Any]) -> None:
        self.result = RunResult(**{**message["result"], "requeue": Requeue()})
        self.saw_shard_in_parts = message["complete"]
        if message["parts"]:
            self.counts = message["parts"], message["open"]

    # -- numbers

    @property
    def phase(self) -> str:
        """Phase of the last worker; START before the first."""
        return self._workers[-1].phase if self._workers else START

    @property
    def rows_finished(self) -> int:
        return sum(worker.num_finished for worker in self._workers)

    @property
    def rows_failed(self) -> int:
        return sum(worker.num_failed for worker in self._workers)

    @property
    def prompt_tokens(self) -> int:
        return sum(worker.prompt_tokens for worker in self._workers)

    @property
    def output_tokens(self) -> int:
        return sum(worker.output_tokens for worker in self._workers)


def _worker_spec(team: Team, device: Device) -> JobSpec:
    """The command's spec for one worker: a part of its shard, so another command on that shard finds each of them in
    its way. The supervisor alone prints, and asks SLURM to start the task again."""
    asked = team.asked
    return asked.replace(
        device=device.device,
        devices="auto",
        num_shards=asked.num_shards * team.size,
        shard_id=asked.shard_id + asked.num_shards * team.member,
        steal=asked.steal or team.size > 1,
        progress="none",
        requeue="none",
    )


def _gave_up_message(reason: str, end: AttemptEnd) -> str:
    return (
        f"gave up: {reason}; finished rows are safe. The last worker {end.how}"
        + (f" ({len(end.in_flight)} rows in the engine)" if end.in_flight else " (no row in the engine)")
        + ". Run with --no-supervisor to see it come down"
    )
