"""`Member`: one device of a team, with what its workers said beyond what restarts need."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from batchjob.job.devices import Device
from batchjob.job.observer import LOAD, RUN, Team
from batchjob.report.result import RunResult
from batchjob.slurm import Requeue
from batchjob.spec import JobSpec
from batchjob.supervisor.replica import Lane
from batchjob.supervisor.reporter import Voice
from batchjob.supervisor.worker_state import Listener


class State(Enum):
    WAITING = auto()  # for the job to be there
    RUNNING = auto()
    DONE = auto()  # nothing was left for it, or it was stopped
    FAILED = auto()


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a device gets no further worker. `is_device`: by itself, so another one may do better; `gave_up`: restarts
    did not help."""

    code: int
    message: str
    is_device: bool = False
    gave_up: bool = False


class Member(Listener):
    def __init__(
        self, spec: JobSpec, team: Team, num_members: int, device: Device, voice: Voice, *, debug: bool
    ) -> None:
        self._voice = voice
        own = spec.replace(
            device=device.device,
            devices="auto",
            # A part of the command's own shard: so another command on that shard finds each of them in its way.
            num_shards=spec.num_shards * num_members,
            shard_id=spec.shard_id + spec.num_shards * team.member,
            steal=True,
            progress="none",
            requeue="none",
        )
        self.lane = Lane(own, device, self._echo, debug=debug, team=team, listener=self)
        self.state = State.WAITING
        self.has_seen_job = False  # a worker got as far as loading
        self.is_dismissed = False  # there is nothing left for it to do
        self.failure: Failure | None = None
        self.result: RunResult | None = None
        self.saw_shard_in_parts = False  # all of the command's shard
        self.counts: tuple[dict[str, Any], dict[str, Any]] | None = None  # output rows in parts, and in open chunks

    def _echo(self, line: str) -> None:
        self._voice.print(f"{self.lane.name}: {line}")

    def phase(self, name: str) -> None:
        self.has_seen_job = self.has_seen_job or name == LOAD
        if name == RUN:
            self._voice.begin()

    def said(self, phase: str, line: str) -> None:
        self._voice.said(self.lane, phase, line)

    def header(self, lines: list[str]) -> None:
        self._voice.header(self.lane, lines)

    def share(self, num_rows: int, num_done: int) -> None:
        self._voice.tally.share(num_rows, num_done)

    def opened(self, index: int, row_index: int, num_rows: int, num_complete: int) -> None:
        self._voice.tally.opened(index, row_index, num_rows, num_complete)

    def finished(self, rows: list[int]) -> None:
        self._voice.tally.finished(rows)

    def came_to(self, message: dict[str, Any]) -> None:
        result = RunResult(**{**message["result"], "requeue": Requeue()})
        self.result = result
        self.saw_shard_in_parts = message["complete"]
        if message["parts"]:
            self.counts = message["parts"], message["open"]
