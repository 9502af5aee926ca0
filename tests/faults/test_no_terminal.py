"""The terminal is gone: a closed pipe, a full disk under the log, a closed terminal. The job continues."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest


def test_standard_error_that_nobody_reads(make_fire: Any) -> None:
    fire = make_fire(300)
    reading, writing = os.pipe()
    process = fire.start(step=0.005, stderr=writing)
    os.close(writing)
    os.read(reading, 1)
    os.close(reading)
    assert process.wait(60) == 0
    fire.check_complete()


@pytest.mark.parametrize("closed", ["2>&-", ">&- 2>&-", "<&- >&- 2>&-", "2>/dev/full"])
def test_standard_files_that_are_closed_or_full(make_fire: Any, closed: str) -> None:
    """A closed number 2 must not become a log of rows, where any library's message would end up."""
    fire = make_fire(60)
    command = " ".join(f"'{word}'" for word in fire.command())
    done = subprocess.run(["sh", "-c", f"exec {command} {closed}"], env=fire.environment(), timeout=60, check=False)
    assert done.returncode == 0
    fire.check_complete()


def test_a_progress_bar_whose_terminal_is_gone(make_fire: Any) -> None:
    fire = make_fire(300)
    ours, theirs = os.openpty()
    process = fire.start("--progress", "bar", step=0.005, stderr=theirs)
    os.close(theirs)
    os.read(ours, 1)
    os.close(ours)
    assert process.wait(60) == 0
    fire.check_complete()


HANGUP = """
import os, signal
from batchjob.report import console
console.ignore_hangup()
print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)
"""


@pytest.mark.parametrize(("environment", "ignored"), [({"SLURM_JOB_ID": "17"}, True), ({}, False)])
def test_a_hangup_is_ignored_under_a_scheduler(environment: dict[str, str], ignored: bool) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.endswith(("JOB_ID", "JOBID"))}
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    try:
        program = [sys.executable, "-c", HANGUP]
        done = subprocess.run(program, env={**clean, **environment}, capture_output=True, check=True)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert done.stdout.strip() == str(ignored).encode()


def test_a_hangup_does_not_end_a_job_under_nohup(make_fire: Any, tmp_path: Path) -> None:
    fire = make_fire(400)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # what nohup does; it is inherited
    try:
        process = fire.start(step=0.01, stderr=subprocess.DEVNULL)
    finally:
        signal.signal(signal.SIGHUP, before)
    deadline = time.monotonic() + 60
    while not fire.finished():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) == 0
    fire.check_complete()
