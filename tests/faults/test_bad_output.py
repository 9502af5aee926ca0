"""An output that cannot be written to is found before the model is loaded: exit 73 with what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A directory seen through a read-only mount."""
    inner, outer = tmp_path / "inner", tmp_path / "outer"
    inner.mkdir()
    outer.mkdir()
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("a bind mount needs root")
    done = subprocess.run(["mount", "--bind", str(inner), str(outer)], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.decode().strip()}")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(outer)], check=True)
        yield outer
    finally:
        subprocess.run(["umount", "-l", str(outer)], check=True)


def test_a_read_only_file_system(make_fire: Any, read_only: Path) -> None:
    done = make_fire(30, output=read_only / "out").run(code=73)
    assert "cannot be set up" in done.stderr
    assert "choose another --output" in done.stderr
    assert "loading" not in done.stderr


def test_an_output_that_became_read_only(make_fire: Any, read_only: Path, tmp_path: Path) -> None:
    fire = make_fire(30, output=read_only / "out")
    inside = make_fire(30, output=tmp_path / "inner" / "out")
    inside.run()
    (inside.output / ".batchjob" / "done.json").unlink()
    inside.parts()[0].unlink()
    done = fire.run(code=73)
    assert "loading" not in done.stderr
    inside.run()
    inside.check_complete()


@pytest.mark.parametrize("place", ["a file/out", "/proc/out", "/dev/null/out"])
def test_a_place_where_no_directory_can_be(make_fire: Any, tmp_path: Path, place: str) -> None:
    (tmp_path / "a file").write_text("")
    done = make_fire(30, output=tmp_path / place).run(code=73)
    assert "loading" not in done.stderr


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A directory that any user can reach, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="batchjob-test-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


def test_a_directory_without_the_right_to_write(make_fire: Any, open_folder: Path) -> None:
    """As another user where this one is root, who may write everywhere."""
    user: dict[str, Any] = {} if os.geteuid() else {"user": 65534, "group": 65534, "extra_groups": []}
    fire = make_fire(30, folder=open_folder, output=open_folder / "closed" / "out")
    options: dict[str, Any] = {"env": fire.environment(), "cwd": "/", "capture_output": True, "text": True}
    try:
        probe = subprocess.run(
            [sys.executable, "-c", "import batchjob.job.run, pyarrow"], **options, **user, check=False
        )
    except PermissionError:
        pytest.skip("another user cannot reach the interpreter")
    if probe.returncode:
        pytest.skip("another user cannot read the packages")
    fire.output.parent.mkdir(mode=0o555)
    done = subprocess.run(fire.command(), **options, **user, check=False)
    assert done.returncode == 73, done.stderr
    assert "Check its permissions" in done.stderr
