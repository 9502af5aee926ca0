"""The real program, pyarrow's C++ included, with one system call made to fail or to be its last: strace does it.

Only calls on the output's own files are hit (by path), so that a test says which write or fsync it was.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest


@functools.cache
def strace_problem() -> str | None:
    if shutil.which("strace") is None:
        return "strace is not installed"
    probe = ["strace", "-f", "-o", "/dev/null", "-e", "inject=fsync:error=EIO:when=99", "true"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"strace may not trace here: {done.stderr.strip()}"


@pytest.fixture(autouse=True)
def strace_works() -> None:
    if problem := strace_problem():
        pytest.skip(problem)


WAL = f".batchjob/wal/00000000/known.job-{'0' * 32}.log"
# Names are given by their directory's descriptor, so that strace knows calls on names by the directory alone.
WAL_DIR = ".batchjob/wal"
TMP_DIR = ".batchjob/tmp"
PART = ".batchjob/tmp/00000000.known"
MANIFEST = ".batchjob.new-known/job.json"


def struck(fire: Any, inject: str, *paths: str, trace: Path, more: tuple[str, ...] = ()) -> int:
    """Runs the job with an injection; the exit code, or minus the signal."""
    only = [word for path in paths for word in ("-P", str(fire.output / path))]
    command = ["strace", "-f", "--seccomp-bpf", "-qq", "-o", str(trace), "-e", f"inject={inject}", *only]
    done = subprocess.run(
        [*command, *fire.command(*IN_PROCESS, *more)],
        env=fire.environment(FAULTS_ATTEMPT="known"),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return done.returncode


def was_hit(trace: Path) -> bool:
    text = trace.read_text()
    return "(INJECTED)" in text or "killed by SIGKILL" in text


IN_PROCESS: tuple[str, ...] = ("--no-supervisor",)


def check_recovery(fire: Any) -> None:
    kept = fire.finished() if fire.output.exists() else {}
    for row in fire.rows():
        assert row["status"] in ("ok", "error"), "whatever is in data/ can be read"
    fire.run()
    fire.check_complete()
    assert kept.items() <= fire.finished().items(), "a finished row was lost or changed"


@pytest.mark.parametrize(
    ("inject", "paths", "code"),
    [
        # One failed write or fsync is overcome with a new file; one that fails for good ends the run with 74.
        ("write:error=EIO:when=3", (WAL,), 0),
        ("write:error=EIO:when=1", (PART,), 0),
        ("fsync,fdatasync:error=EIO:when=1", (WAL,), 0),
        ("fsync,fdatasync:error=EIO:when=1", (PART,), 0),
        ("write:error=ENOSPC:when=2", (WAL,), 0),
        ("write:error=EDQUOT:when=1", (PART,), 0),
        ("write:error=ESTALE:when=2", (WAL,), 0),
        ("link,linkat:error=EIO:when=1", (TMP_DIR,), 74),
        ("link,linkat:error=ESTALE:when=1", (TMP_DIR,), 75),
        ("mkdir,mkdirat:error=EIO:when=1", (WAL_DIR,), 0),
        ("mkdir,mkdirat:error=EROFS:when=1+", (WAL_DIR,), 74),
        ("write:error=ENOSPC:when=1", (MANIFEST,), 74),
        ("fsync,fdatasync:error=EIO:when=1", (MANIFEST,), 74),
    ],
)
def test_one_call_fails(make_fire: Any, tmp_path: Path, inject: str, paths: tuple[str, ...], code: int) -> None:
    fire = make_fire(40, chunk_rows=20)
    trace = tmp_path / "trace"
    assert struck(fire, inject, *paths, trace=trace) == code
    assert was_hit(trace)
    check_recovery(fire)


@pytest.mark.parametrize(
    ("inject", "paths"),
    [
        ("write:signal=KILL:when=4", (WAL,)),
        ("fsync,fdatasync:signal=KILL:when=1", (PART,)),
        ("link,linkat:signal=KILL:when=1", (TMP_DIR,)),
        ("unlink,unlinkat:signal=KILL:when=1", (TMP_DIR,)),
    ],
)
def test_a_call_is_the_last(make_fire: Any, tmp_path: Path, inject: str, paths: tuple[str, ...]) -> None:
    fire = make_fire(40, chunk_rows=20)
    assert struck(fire, inject, *paths, trace=tmp_path / "trace") in (-signal.SIGKILL, 128 + signal.SIGKILL)
    check_recovery(fire)


def test_a_read_that_the_server_lost_track_of_is_made_again(make_fire: Any, tmp_path: Path) -> None:
    fire = make_fire(40, chunk_rows=20)
    fire.run()
    (fire.output / ".batchjob" / "done.json").unlink()
    for number in range(1, 12):  # the directory is opened some times before the part in it
        trace = tmp_path / f"trace{number}"
        code = struck(fire, f"openat:error=ESTALE:when={number}", "data", trace=trace)
        if any("part-00000000" in line and "(INJECTED)" in line for line in trace.read_text().splitlines()):
            break
        (fire.output / ".batchjob" / "done.json").unlink(missing_ok=True)
    else:
        raise AssertionError("no open of the part was hit")
    assert code == 0
    fire.check_complete()


CALLS = (
    "write",
    "fsync,fdatasync",
    "link,linkat",
    "unlink,unlinkat,rmdir",
    "mkdir,mkdirat",
    "rename,renameat,renameat2",
)


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("calls", CALLS)
def test_every_call_is_the_last(make_fire: Any, tmp_path: Path, calls: str, capsys: pytest.CaptureFixture[str]) -> None:
    """SIGKILL at the N-th call of a kind by any thread, for every N until the program no longer gets that far."""
    number = 0
    while True:
        number += 1
        fire = make_fire(24, chunk_rows=12, name=f"out{number}")
        trace = tmp_path / f"trace{number}"
        code = struck(fire, f"{calls}:signal=KILL:when={number}", trace=trace)
        check_recovery(fire)
        shutil.rmtree(fire.output)
        os.unlink(trace)
        if code == 0:
            break
        assert code in (-signal.SIGKILL, 128 + signal.SIGKILL, 70), code  # 70: the tokeniser's process was hit
    assert number > 1
    with capsys.disabled():
        print(f"\nkilled at every one of {number - 1} calls of {calls}")
