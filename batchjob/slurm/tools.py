"""Calls of SLURM's own programs: argument lists, never a shell, with a time limit."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

TIMEOUT = 30.0  # seconds; a controller that is down makes a client wait and try again for minutes


class SlurmToolError(Exception):
    """A SLURM program is missing, failed or did not answer. Never fatal for a run."""


def call(arguments: Sequence[str], *, timeout: float = TIMEOUT) -> str:
    """Runs a program and returns its output. Raises SlurmToolError, whose text is one line."""
    try:
        done = subprocess.run(
            arguments, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=timeout
        )
    except subprocess.TimeoutExpired:
        raise SlurmToolError(f"{arguments[0]} did not answer in {timeout:g} s") from None
    except OSError as error:
        raise SlurmToolError(f"{arguments[0]} cannot be started: {error.strerror}") from None
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())[:300]
        raise SlurmToolError(f"{arguments[0]} failed with code {done.returncode}: {said or 'no message'}")
    return done.stdout
