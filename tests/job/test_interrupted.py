"""The real program stopped in the middle: by SIGKILL at random moments and inside a commit, by SIGTERM, by Ctrl-C.

Whatever happens, the union of rows is exact and in order, and no row that was finished is computed again.
"""

from __future__ import annotations

import json
import os
import random
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

# The program with a slow fake engine; with KILL_AT_LINK=n it dies by SIGKILL inside its n-th commit, just before the
# part gets its name.
PROGRAM = """
import os, signal, sys
import batchjob.engine.fake as fake
import batchjob.store.fsops as fsops
seconds = float(sys.argv.pop(1))
init = fake.FakeRunner.__init__
fake.FakeRunner.__init__ = lambda self, *a, **k: init(self, *a, **{**k, "step_seconds": seconds})
links = int(os.environ.get("KILL_AT_LINK", "0"))
link = fsops.FsOps.link
def counted(self, *paths):
    global links
    if "part-" in str(paths[1]):
        links -= 1
        if links == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    return link(self, *paths)
fsops.FsOps.link = counted
from batchjob.cli import main
main()
"""


def command(source: Path, output: Path, *more: str, step_seconds: float) -> list[str]:
    flags = ["--no-supervisor", "--engine", "fake", "--input", str(source), "--output", str(output)]
    limits = ["--chunk-rows", "50", "--max-num-seqs", "8"]
    return [sys.executable, "-c", PROGRAM, str(step_seconds), "run", *flags, *limits, *more]


def logged_and_committed(output: Path) -> dict[int, str]:
    """Row -> answer, from the parts and the logs as they lie there."""
    found: dict[int, str] = {}
    for path in sorted((output / ".batchjob" / "wal").glob("*/*.log")):
        for line in path.read_bytes().split(b"\n")[:-1]:
            record = json.loads(line[9:])
            found[record["row"]] = record["text"]
    for path in sorted((output / "data").iterdir()):
        for row in pyarrow.parquet.read_table(path, columns=["row_index", "output"]).to_pylist():
            found[row["row_index"]] = row["output"]
    return found


def computed_rows(output: Path) -> list[int]:
    """Rows in the order in which they were written to the logs that still exist."""
    rows = []
    for path in sorted((output / ".batchjob" / "wal").glob("*/*.log")):
        rows += [json.loads(line[9:])["row"] for line in path.read_bytes().split(b"\n")[:-1]]
    return rows


def final_rows(output: Path) -> list[dict[str, Any]]:
    paths = sorted((output / "data").iterdir())
    return [row for path in paths for row in pyarrow.parquet.read_table(path).to_pylist()]


@pytest.fixture
def source(tmp_path: Path, write_jsonl: Write) -> Path:
    return write_jsonl(tmp_path / "in.jsonl", [{"prompt": f"row number {i}"} for i in range(400)])


@pytest.mark.parametrize("seed", [1, 2])
def test_killed_five_times_and_resumed(source: Path, tmp_path: Path, seed: int) -> None:
    output = tmp_path / "out"
    moments = random.Random(seed)
    kept: dict[int, str] = {}
    for kill in range(5):
        in_commit = kill == 2
        environment = {**os.environ, "KILL_AT_LINK": "1"} if in_commit else None
        process = subprocess.Popen(
            command(source, output, step_seconds=0.02),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        if in_commit:
            process.wait(60)
        else:
            time.sleep(moments.uniform(0.4, 0.9))
            process.kill()
            process.wait()
        assert process.returncode == -signal.SIGKILL
        if not (output / "data").is_dir():
            continue
        now = logged_and_committed(output)
        assert kept.items() <= now.items(), "a finished row was lost"
        kept = now
        assert len(computed_rows(output)) == len(set(computed_rows(output))), "a finished row was computed again"
    assert 0 < len(kept) < 400
    done = subprocess.run(command(source, output, step_seconds=0), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = final_rows(output)
    assert [row["row_index"] for row in rows] == list(range(400))
    assert all(rows[row]["output"] == text for row, text in kept.items())


def start(source: Path, output: Path, *more: str, step_seconds: float = 0.02) -> subprocess.Popen[str]:
    """The program, once it has finished a few rows."""
    process = subprocess.Popen(
        command(source, output, *more, step_seconds=step_seconds), stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not list((output / ".batchjob" / "wal").glob("*/*.log")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1], ids=lambda s: s.name)
def test_a_signal_drains_and_exits_75(source: Path, tmp_path: Path, number: signal.Signals) -> None:
    output = tmp_path / "out"
    process = start(source, output)
    process.send_signal(number)
    sent = time.monotonic()
    _, printed = process.communicate(timeout=30)
    assert process.returncode == 75, printed
    assert time.monotonic() - sent < 5
    assert f"stopped early ({number.name})" in printed
    assert "run the same command again" in printed
    kept = logged_and_committed(output)
    done = subprocess.run(command(source, output, step_seconds=0), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"({len(kept):,} done before)" in done.stderr
    assert [row["row_index"] for row in final_rows(output)] == list(range(400))


def test_a_drain_that_runs_out_of_time_keeps_what_is_finished(source: Path, tmp_path: Path) -> None:
    process = start(source, tmp_path / "out", "--drain-timeout", "0", step_seconds=0.2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 75
    assert len(logged_and_committed(tmp_path / "out")) > 0


def test_a_second_interrupt_stops_at_once(source: Path, tmp_path: Path) -> None:
    process = start(source, tmp_path / "out", step_seconds=0.5)
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    sent = time.monotonic()
    assert process.wait(10) == 75
    assert time.monotonic() - sent < 2


def test_eight_processes_at_once_on_an_empty_output(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    processes = [
        subprocess.Popen(
            command(source, output, "--num-shards", "8", "--shard-id", str(i), step_seconds=0.001),
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(8)
    ]
    for process in processes:
        _, printed = process.communicate(timeout=120)
        assert process.returncode == 0, printed
    assert [row["row_index"] for row in final_rows(output)] == list(range(400))
