"""The output directory is moved away or replaced while a job runs: no directory is made again, no file gets to another
place."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any


def wait_for_rows(fire: Any, process: Any) -> None:
    deadline = time.monotonic() + 60
    while len(fire.finished()) < 20:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_moved_away_during_the_run(make_fire: Any, tmp_path: Path) -> None:
    fire = make_fire(600)
    process = fire.start(step=0.01)
    wait_for_rows(fire, process)
    fire.output.rename(tmp_path / "elsewhere")
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 74, printed
    assert "moved or deleted" in printed
    assert not fire.output.exists(), "a directory that was moved away is not made again"
    (tmp_path / "elsewhere").rename(fire.output)
    fire.run()
    fire.check_complete()


def test_replaced_by_another_job_during_the_run(make_fire: Any, tmp_path: Path) -> None:
    fire, other = make_fire(600), make_fire(60, name="other")
    other.run()
    process = fire.start(step=0.01)
    wait_for_rows(fire, process)
    fire.output.rename(tmp_path / "elsewhere")
    other.output.rename(fire.output)
    before = {path: path.read_bytes() for path in fire.output.rglob("*") if path.is_file()}
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 74, printed
    after = {path: path.read_bytes() for path in fire.output.rglob("*") if path.is_file()}
    assert after == before, "rows of one job got into the output of another"
