"""The tools of the tests that kill and break the program: a job, the program, and the check that every row is there
once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

ROOT = Path(__file__).resolve().parents[2]
HOOKS = Path(__file__).with_name("hooks")


@dataclass
class Fire:
    """One job of `num_rows` short rows, a few of them broken, and ways to run it."""

    source: Path
    output: Path
    num_rows: int
    chunk_rows: int = 25

    def flags(self, *more: str) -> list[str]:
        fixed = ["--engine", "fake", "--input", str(self.source), "--output", str(self.output)]
        free = ["--max-num-seqs", "8", "--max-error-rate", "1"]
        return ["run", *fixed, "--chunk-rows", str(self.chunk_rows), *free, *more]

    def command(self, *more: str) -> list[str]:
        return [sys.executable, "-m", "batchjob", *self.flags(*more)]

    @staticmethod
    def environment(**more: str) -> dict[str, str]:
        path = os.pathsep.join([str(HOOKS), str(ROOT), str(ROOT / "kernels"), os.environ["PYTHONPATH"]])
        return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}

    def start(self, *more: str, step: float = 0.0, **options: Any) -> subprocess.Popen[str]:
        environment = self.environment(FAULTS_STEP=str(step))
        return subprocess.Popen(
            self.command(*more), **{"env": environment, "stderr": subprocess.PIPE, "text": True, **options}
        )

    def run(self, *more: str, step: float = 0.0, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.command(*more),
            env=self.environment(FAULTS_STEP=str(step)),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert code is None or done.returncode == code, f"exit code {done.returncode}\n{done.stderr}"
        return done

    # -- what is there

    def parts(self) -> list[Path]:
        data = self.output / "data"
        return sorted(data.iterdir()) if data.is_dir() else []

    def rows(self) -> list[dict[str, Any]]:
        """The rows of all parts, in the order of their names. Raises if a part is not a whole Parquet file."""
        return [row for path in self.parts() for row in pyarrow.parquet.read_table(path).to_pylist()]

    def finished(self) -> dict[int, str | None]:
        """Row -> answer, from logs and parts. Other processes may be at work: logs first, since their rows move on."""
        found: dict[int, str | None] = {}
        for path in sorted((self.output / ".batchjob" / "wal").glob("*/*.log")):
            try:
                lines = path.read_bytes().split(b"\n")[:-1]
            except FileNotFoundError:
                continue
            for line in lines:
                record = json.loads(line[9:])
                if "text" in record:  # else it is a row that a stop cut off
                    found.setdefault(record["row"], record["text"])
        for row in self.rows():
            found[row["row_index"]] = row["output"]
        return found

    def check_complete(self) -> None:
        """Every row once and in order, with its own columns, and a job that calls itself complete."""
        rows = self.rows()
        assert [row["row_index"] for row in rows] == list(range(self.num_rows))
        for row in rows:
            index = row["row_index"]
            assert row["status"] == ("error" if is_broken(index) else "ok")
            assert row["n"] == (None if is_broken(index) else index)
        done = json.loads((self.output / ".batchjob" / "done.json").read_text())
        assert done["num_rows"] == self.num_rows
        for name in ("wal", "claims", "quarantine"):
            assert os.listdir(self.output / ".batchjob" / name) == []


def is_broken(index: int) -> bool:
    return index % 17 == 5


def write_source(path: Path, num_rows: int) -> Path:
    lines = [
        "not json" if is_broken(index) else json.dumps({"n": index, "prompt": f"row number {index}"})
        for index in range(num_rows)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def make_fire(tmp_path: Path) -> Any:
    def make(
        num_rows: int, *, output: Path | None = None, folder: Path = tmp_path, chunk_rows: int = 25, name: str = "out"
    ) -> Fire:
        source = write_source(folder / f"{name}.jsonl", num_rows)
        return Fire(source, output or folder / name, num_rows, chunk_rows)

    return make


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)
