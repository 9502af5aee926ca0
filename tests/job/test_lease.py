"""Two real processes on one shard: the second is refused, waits for no dead one, and does no harm when told to run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

Write = Callable[[Path, Iterable[Any]], Path]

# The program with a slow fake engine and quick heartbeats. With ELSEWHERE other processes are as if on other machines.
PROGRAM = """
import os, sys
import batchjob.engine.fake as fake
from batchjob.store import liveness
seconds = float(sys.argv.pop(1))
liveness.BEAT_SECONDS = 0.2
if os.environ.get("ELSEWHERE"):
    liveness.is_alive = lambda record: None
init = fake.FakeRunner.__init__
fake.FakeRunner.__init__ = lambda self, *a, **k: init(self, *a, **{**k, "step_seconds": seconds})
from batchjob.cli import main
main()
"""


class Program:
    def __init__(self, source: Path, output: Path) -> None:
        self.source, self.output = source, output
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *more: str, step_seconds: float = 0.0, **environment: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PROGRAM, str(step_seconds), "run", "--engine", "fake", "--no-supervisor"]
        command += ["--input", str(self.source), "--output", str(self.output), "--chunk-rows", "50"]
        process = subprocess.Popen(
            [*command, "--max-num-seqs", "8", *more],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        self.processes.append(process)
        return process

    def run(self, *more: str, **environment: str) -> tuple[int, str]:
        process = self.start(*more, **environment)
        _, printed = process.communicate(timeout=60)
        return process.returncode, printed

    def start_working(self, *more: str, **environment: str) -> subprocess.Popen[str]:
        """A slow process that has finished a few rows."""
        before = set(self.logs())
        process = self.start(*more, step_seconds=0.05, **environment)
        deadline = time.monotonic() + 60
        while not set(self.logs()) - before:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return process

    def logs(self) -> list[Path]:
        return list((self.output / ".batchjob" / "wal").glob("*/*.log"))

    def leases(self) -> list[str]:
        return [json.loads(path.read_text())["attempt"] for path in (self.output / ".batchjob" / "leases").iterdir()]

    def rows(self) -> list[int]:
        paths = sorted((self.output / "data").iterdir())
        return [row for path in paths for row in pyarrow.parquet.read_table(path)["row_index"].to_pylist()]


@pytest.fixture
def program(tmp_path: Path, write_jsonl: Write) -> Iterable[Program]:
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": f"row number {i}"} for i in range(400)])
    found = Program(source, tmp_path / "out")
    yield found
    for process in found.processes:
        if process.poll() is None:
            process.kill()
        process.wait()


def test_a_second_process_on_the_shard_is_refused_with_exit_69(program: Program) -> None:
    first = program.start_working()
    code, printed = program.run()
    assert code == 69, printed
    assert f"process {first.pid} on " in printed
    assert "--no-lease" in printed
    assert "engine    fake" not in printed, "it is refused before the model is loaded"
    assert first.poll() is None
    first.send_signal(signal.SIGTERM)
    assert first.wait(30) == 75
    assert program.leases() == []
    assert program.run()[0] == 0
    assert program.rows() == list(range(400))


def test_after_a_kill_the_same_command_goes_on_at_once(program: Program) -> None:
    for _ in range(3):
        process = program.start_working()
        process.kill()
        process.wait()
        assert len(program.leases()) == 1
    code, printed = program.run()
    assert code == 0, printed
    assert program.rows() == list(range(400))
    assert program.leases() == []


@pytest.mark.parametrize("kill", [False, True])
def test_two_processes_without_the_lease_write_every_row_once(program: Program, kill: bool) -> None:
    first = program.start_working("--no-lease")
    second = program.start_working("--no-lease")
    if kill:
        first.kill()
    for process in (first, second):
        process.wait(60)
    assert second.returncode == 0
    assert program.rows() == list(range(400))
    assert len(list((program.output / "data").iterdir())) == 8


def test_a_holder_on_another_host_is_watched_while_the_model_loads(program: Program) -> None:
    """Its counter stands still, so its shard is taken over. When it comes back all the same, it stops."""
    first = program.start_working()
    first.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    second = program.start(step_seconds=0.01, ELSEWHERE="1")
    deadline = began + 30
    while len(set(program.leases())) != 1 or program.leases()[0].split("-")[-2] != str(second.pid):
        assert time.monotonic() < deadline
        assert second.poll() is None
        time.sleep(0.02)
    first.send_signal(signal.SIGCONT)
    _, printed = first.communicate(timeout=30)
    assert first.returncode == 69, printed
    assert "has taken over" in printed
    _, printed = second.communicate(timeout=60)
    assert second.returncode == 0, printed
    assert program.rows() == list(range(400))


def test_a_holder_on_another_host_that_works_keeps_its_shard(program: Program) -> None:
    first = program.start_working()
    code, printed = program.run(ELSEWHERE="1")
    assert code == 69, printed
    assert "engine    fake" not in printed, "its counter was watched before the work began"
    assert first.poll() is None


def test_a_zombie_of_a_requeued_task_stops_and_spoils_nothing(program: Program) -> None:
    task = {"SLURM_JOB_ID": "77"}
    zombie = program.start_working(**task)
    began = time.monotonic()
    second = program.start(step_seconds=0.01, **task, SLURM_RESTART_COUNT="1", ELSEWHERE="1")
    _, printed = zombie.communicate(timeout=30)
    assert zombie.returncode == 69, printed
    _, printed = second.communicate(timeout=60)
    assert second.returncode == 0, printed
    assert time.monotonic() - began < 30
    assert program.rows() == list(range(400))
    assert program.leases() == []


@pytest.mark.parametrize("num_shards", [1, 3, 7])
def test_a_job_begun_with_four_shards_goes_on_with_another_number(program: Program, num_shards: int) -> None:
    begun = [program.start_working("--num-shards", "4", "--shard-id", str(i)) for i in range(4)]
    for process in begun:
        process.kill()
        process.wait()
    rest = [program.start("--num-shards", str(num_shards), "--shard-id", str(i)) for i in range(num_shards)]
    for process in rest:
        _, printed = process.communicate(timeout=60)
        assert process.returncode == 0, printed
    assert program.rows() == list(range(400))
