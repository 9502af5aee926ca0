"""What supervisor and worker say to each other.

Down the worker's standard input go pickles: one `Orders`, then a `StopOrder` whenever the supervisor's view of the end
changes. Its end of file means that the supervisor is gone. Up a pipe come lines of text, each one write, so that what
a worker said last can be read after its death:

    phase NAME              see batchjob.watch
    attempt JSON            name and directory of the attempt
    + ROW ROW ...           these rows enter the engine with the step that begins now
    - ROW ROW ...           these rows are finished, and in the store
    . PROMPT OUTPUT         something was achieved; tokens of this attempt so far
    end JSON                why the worker ends: kind, exit code, message
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from batchjob.spec import JobSpec
from batchjob.watch import Assignment


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
    assignment: Assignment
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


def rows_line(sign: str, rows: Iterable[int]) -> str:
    return f"{sign} {' '.join(map(str, rows))}\n"


def end_line(kind: Kind, code: int, message: str = "") -> str:
    return f"end {json.dumps([kind, code, message])}\n"
