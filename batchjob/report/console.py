"""Lines for a person: plain text on standard error, safe for a terminal, and never a reason to stop.

The reader may go away (`| head`, a closed terminal, a full disk under a log file) while the job goes on: then the lines
are dropped. Text that comes from rows, files or models cannot steer a terminal.
"""

from __future__ import annotations

import io
import os
import signal
import sys

from batchjob.report.progress import printable
from batchjob.report.redact import redact

_SCHEDULERS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")


def echo(line: str) -> None:
    """Prints one or several lines to standard error. Drops them if the other end is gone."""
    try:
        print(safe(line), file=sys.stderr, flush=True)
    except (OSError, ValueError):  # ValueError: closed
        silence()


def safe(text: str) -> str:
    """Returns the text without secrets, and with control characters escaped but for the ends of its lines."""
    return "\n".join(printable(line, limit=None) for line in redact(text).split("\n"))


def silence() -> None:
    """Sends standard error to /dev/null, where no later write fails, because its reader is gone."""
    try:
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(null, 2)
        os.close(null)
    except OSError:
        pass  # no descriptor left: the next line tries again


def prepare_standard_files() -> None:
    """Puts /dev/null in the place of closed standard files, and makes output take any text.

    Otherwise the next file opened, a log of rows perhaps, gets number 2, and what any library prints ends up in it; and
    a character that a Latin-1 terminal has not ends the program.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDONLY if number == 0 else os.O_WRONLY)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def ignore_hangup() -> None:
    """Under a batch scheduler the terminal that a job was submitted from may go; the job stays. (`nohup` has done the
    same already; at a terminal, a hangup ends the process as it ends any other, and a resume goes on.)"""
    if any(os.environ.get(name) for name in _SCHEDULERS):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
