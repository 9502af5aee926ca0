"""`SlurmTask`: the job or array task that this process is, from the environment that SLURM gives a batch script."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchjob.slurm.tools import SlurmToolError, call

_NO_LIMIT = 364 * 86_400.0  # a job without a limit is given a year, so nearly that is none


@dataclass(frozen=True, slots=True)
class SlurmTask:
    """The identity of a task. `name` is its id for `scontrol` and `squeue`. For an array task that is ARRAY_TASK, never
    the plain job id: the task with the highest index usually has the id of the whole array, and requeuing that id
    starts all tasks again, those that are finished included.
    """

    name: str  # digits, or digits_digits
    restart_count: int = 0  # of this task; 0 on its first start

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> SlurmTask | None:
        """The task of this process. None outside SLURM, and where a value is not what SLURM writes: these ids become
        arguments of a program."""
        environ = os.environ if environ is None else environ
        job = environ.get("SLURM_JOB_ID", "")
        array, index = environ.get("SLURM_ARRAY_JOB_ID", ""), environ.get("SLURM_ARRAY_TASK_ID", "")
        parts = [array, index] if array or index else [job]
        if not all(_is_number(part) for part in parts):
            return None
        count = environ.get("SLURM_RESTART_COUNT", "0")  # unset on the first start
        return cls("_".join(parts), int(count) if _is_number(count) else 0)

    def to_json(self) -> dict[str, Any]:
        """The values that an attempt's record keeps."""
        return {"task": self.name, "restart": self.restart_count}

    def seconds_left(self) -> float:
        """The seconds until the time limit; infinite without one. Raises SlurmToolError."""
        return parse_time_left(call(["squeue", "--noheader", "--jobs", self.name, "--format", "%L"], timeout=10.0))

    def requeue(self) -> None:
        """Asks SLURM to start this task again. SIGTERM to this process follows at once. Raises SlurmToolError."""
        call(["scontrol", "requeue", self.name])


def parse_time_left(text: str) -> float:
    """Seconds from squeue's [DAYS-][HOURS:]MINUTES:SECONDS. Raises SlurmToolError for what is no time."""
    text = text.strip()
    if text == "UNLIMITED":
        return float("inf")
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text, re.ASCII)
    if match is None:
        raise SlurmToolError(f"squeue says {text[:40]!r} where the time left was expected")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    left = float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    return left if left < _NO_LIMIT else float("inf")


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 18
