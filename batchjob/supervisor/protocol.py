"""The messages between supervisor and worker.

Down the worker's standard input go pickles: one `Orders`, then a `StopOrder` whenever the supervisor's view of the end
changes, and a `Lost` whenever a device of its team is given up. Its end of file means that the supervisor is gone. Up a
pipe come lines of text, each one write, so that a worker's last lines can be read after its death:

    phase NAME              see batchjob.job.observer
    attempt JSON            name and directory of the attempt
    + ROW ROW ...           these rows enter the engine with the step that begins now
    - ROW ROW ...           these rows are finished, and in the store
    . PROMPT OUTPUT ...     a sign of progress; tokens of this attempt so far; then, once they are known, failed rows of
                            this attempt, and sequences that run and that wait
    say JSON                a line for a person
    header JSON             the lines that a person sees before the first step
    share ROWS DONE         rows of the command's shard, and those in parts
    chunk INDEX ROW ROWS COMPLETE   this chunk is opened: its first row, its rows, and those complete already
    result JSON             RunResult, output rows in parts, those in open chunks (see store.counts), and whether every
                            chunk of the command's shard has its part
    end JSON                why the worker ends: kind, exit code, message
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from batchjob.job.observer import RestartHints, Team
from batchjob.spec import JobSpec


class Kind(StrEnum):
    """How an attempt ended. Only the first is an end; after the others comes another attempt."""

    EXIT = "exit"  # the worker ended itself; its exit code is the job's
    CRASH = "crash"
    HANG = "hang"
    MEMORY = "memory"  # of the host or the device
    DEVICE = "device"  # the device, or its driver, is unusable for this process


@dataclass(frozen=True, slots=True)
class Orders:
    """Everything that a worker is started with."""

    spec: JobSpec
    hints: RestartHints
    team: Team
    parent_pid: int
    report_fd: int  # where its lines go
    stacks_fd: int  # where the stacks of its threads go, when asked for or in a crash
    debug: bool = False


@dataclass(frozen=True, slots=True)
class StopOrder:
    """`deadline` is on the monotonic clock, which the processes of one machine share."""

    reason: str
    deadline: float
    now: bool
    warned: bool


@dataclass(frozen=True, slots=True)
class Lost:
    """A member of the team that gets no further worker."""

    member: int


def rows_line(sign: str, rows: Iterable[int]) -> str:
    return f"{sign} {' '.join(map(str, rows))}\n"


def end_line(kind: Kind, code: int, message: str = "") -> str:
    return f"end {json.dumps([kind, code, message])}\n"
