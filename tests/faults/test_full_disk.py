"""A disk that is really full: finished rows wait for room; when none comes the run ends with 74, and loses nothing."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from batchjob.job.disk_space import space_warning


def fill(place: Path, *, leave: int) -> Path:
    """A file that takes all room but `leave` bytes."""
    status = os.statvfs(place)
    filler = place / "filler"
    filler.write_bytes(b"\xff" * max(0, status.f_bavail * status.f_frsize - leave))
    return filler


def wait_for_line(process: subprocess.Popen[str], text: str, *, seconds: float = 60) -> None:
    assert process.stderr is not None
    deadline = time.monotonic() + seconds
    for line in process.stderr:
        if text in line:
            return
        assert time.monotonic() < deadline
    raise AssertionError(f"the program ended without {text!r}")


def test_a_full_disk_is_waited_for_and_the_run_goes_on(make_fire: Any, small_disk: Path) -> None:
    fire = make_fire(600, output=small_disk / "out")
    filler = fill(small_disk, leave=120_000)
    process = fire.start("--full-disk-timeout", "120")
    wait_for_line(process, "warning: the disk is full")
    assert process.poll() is None
    filler.unlink()
    wait_for_line(process, "the disk has room again")
    process.communicate(timeout=60)
    assert process.returncode == 0
    fire.check_complete()


def test_a_disk_that_stays_full_ends_with_74_and_nothing_is_lost(make_fire: Any, small_disk: Path) -> None:
    fire = make_fire(600, output=small_disk / "out")
    filler = fill(small_disk, leave=120_000)
    done = fire.run("--full-disk-timeout", "1", code=74)
    assert "disk is full" in done.stderr
    assert "run the same command again" in done.stderr
    kept = fire.finished()
    assert 0 < len(kept) < 600
    assert os.listdir(fire.output / ".batchjob" / "tmp") == [], "half-written parts are removed"
    filler.unlink()
    again = fire.run()
    assert f"({len(kept):,} done before)" in again.stderr
    fire.check_complete()
    now = fire.finished()
    assert all(now[row] == text for row, text in kept.items())


def test_a_disk_too_small_for_a_new_job_is_told_before_any_work(make_fire: Any, small_disk: Path) -> None:
    fire = make_fire(30, output=small_disk / "out")
    fill(small_disk, leave=0)
    done = fire.run("--full-disk-timeout", "0", code=74)
    assert "disk is full" in done.stderr
    assert fire.parts() == []


def test_a_disk_that_will_not_do_is_foretold(tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    free = status.f_bavail * status.f_frsize
    assert space_warning(tmp_path, 1000, 2) is None
    told = space_warning(tmp_path, 100 * free + 1, 2)
    assert told is not None
    assert "MiB free" in told
    assert space_warning(tmp_path / "none", 1 << 60, 2) is None, "what cannot be known is not guessed"


@pytest.mark.parametrize("n", [1, 4])
def test_the_estimate_grows_with_what_is_to_do(n: int) -> None:
    from batchjob.job.disk_space import expected_bytes
    from batchjob.job.settings import resolve_settings
    from batchjob.plan import Chunk, InputFile, JobPlan
    from batchjob.spec import JobSpec

    chunks = tuple(Chunk(i, 100 * i, 100, ()) for i in range(10))
    plan = JobPlan((InputFile("/x", "jsonl", "", 10**6, 0, 1000, ""),), chunks, {"a": "string"}, b"")
    spec = JobSpec(engine="fake", n=n, max_tokens=50)
    settings = resolve_settings(spec)
    all_of_it = expected_bytes(spec, settings, plan, chunks)
    assert 10**5 < all_of_it < 10**7
    assert expected_bytes(spec, settings, plan, chunks[:5]) < all_of_it
    assert expected_bytes(spec, settings, plan, ()) == 0
