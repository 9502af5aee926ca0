"""An input file that changes while a job runs: exit 66 naming the file, the rows before it kept."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def append(path: Path) -> None:
    with path.open("a") as file:
        file.write('{"prompt": "one more"}\n')


def replace_rows(path: Path) -> None:
    path.write_text(path.read_text().replace("row number", "now number"))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def delete(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("change", [append, replace_rows, truncate, delete])
def test_a_change_during_the_run(make_fire: Any, change: Callable[[Path], None]) -> None:
    fire = make_fire(900)
    saved = fire.source.read_bytes()
    stamp = fire.source.stat()
    process = fire.start(step=0.01)
    deadline = time.monotonic() + 60
    while not fire.parts():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    change(fire.source)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 66, printed
    assert str(fire.source) in printed
    kept = fire.finished()
    assert kept
    again = fire.run(code=66)
    assert str(fire.source) in again.stderr
    fire.source.write_bytes(saved)
    os.utime(fire.source, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 10**9))
    done = fire.run()
    assert "new modification time but the same content" in done.stderr
    fire.check_complete()
    assert kept.items() <= fire.finished().items()


def test_a_touch_during_the_run_is_a_warning(make_fire: Any) -> None:
    fire = make_fire(600)
    process = fire.start(step=0.005)
    time.sleep(1.0)
    os.utime(fire.source)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 0, printed
    fire.check_complete()
