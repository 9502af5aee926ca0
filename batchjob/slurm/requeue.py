"""The requeue of a task after a warning: which side asks for it, and when it gives up.

    scontrol   this task asks SLURM to start it again, then exits 75
    exit       it exits 75, and the site's RequeueExit=75 does the rest
    none       it exits 75, and the user or program that started it starts it again

Only a warning counts (the drain signal, or the time limit that the job itself saw coming). SIGTERM alone does not: it
comes with `scancel`, when a user wants an end, and with a preemption, after which SLURM requeues by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from batchjob.notes import read_note, write_note
from batchjob.slurm.task import SlurmTask
from batchjob.slurm.tools import SlurmToolError

MAX_FRUITLESS = 10  # requeues in a row without a finished row in between


@dataclass(frozen=True, slots=True)
class Requeue:
    """The decision after a stop. With `gave_up` the task must not come back, and the exit code is 70, not 75."""

    message: str = ""
    gave_up: bool = False


def after_stop(
    mode: str,
    task: SlurmTask | None,
    *,
    notes: Path,
    made_progress: bool,
    before_call: Callable[[], None] = lambda: None,
) -> Requeue:
    """Called once after a warned stop, when everything finished is durable. `notes` is a directory in which the starts
    of each task without progress are counted; `before_call` comes right before SLURM is asked, which answers with
    SIGTERM.

    A failed call is no error: the exit code is 75 in any case.
    """
    if task is None or mode == "none":
        return Requeue()
    if _count_fruitless(notes / task.name, made_progress) > MAX_FRUITLESS:
        return Requeue(
            f"not requeued: {MAX_FRUITLESS} requeues of task {task.name} in a row finished no row. The time of one "
            "task must be enough for loading and for the longest row: ask for more, or set --max-tokens",
            gave_up=True,
        )
    if mode == "exit":
        return Requeue()
    before_call()
    try:
        task.requeue()
    except SlurmToolError as error:
        return Requeue(f"task {task.name} could not be requeued, submit it again: {error}")
    return Requeue(f"task {task.name} is back in the queue")


def _count_fruitless(path: Path, made_progress: bool) -> int:
    """Starts of a task in a row without progress, this one included. A lost count only begins again, so it is
    not worth an fsync, and a directory that cannot be written to is no reason to end a job.
    """
    try:
        count = int(read_note(path))
    except (OSError, ValueError):
        count = 0
    count = 0 if made_progress else count + 1
    with suppress(OSError):
        write_note(path, str(count))
    return count
