"""Several processes on one output, some of them killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from batchjob.store import Store
from batchjob.store.paths import Layout

ROOT = Path(__file__).resolve().parents[2]


def run_kit(kit: Any, *arguments: str, program: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(["-c", program] if program else [str(Path(kit.__file__))]), *arguments]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{Path(kit.__file__).parent}", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
def test_processes_that_are_killed_at_random(kit: Any, output: Path, seed: int) -> None:
    done = run_kit(kit, str(output), str(seed), "3", "2.5", "480")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 10, "kills that hit a process at work"
    plan = kit.make_plan(480, 8)
    kit.check_output(output, plan)
    store = Store.open(output)
    assert store.done() is not None
    # What dead processes left is swept by the next start.
    store.start_attempt({})
    assert os.listdir(Layout(output).wal) == []
    assert os.listdir(Layout(output).tmp) == []
    assert store.warnings == []


CREATE = """
import os, sys, time
from pathlib import Path
import kit
from batchjob.store import Store

output, num_processes = Path(sys.argv[1]), int(sys.argv[2])
kit.carried(kit.make_plan(3, 3).chunks[0])  # the first array is slow to make, and would spread the processes out
start = time.monotonic() + 0.1
children = []
for number in range(num_processes):
    pid = os.fork()
    if pid == 0:
        plan = kit.make_plan(30, 3 + number % 2)
        manifest = kit.make_manifest(plan)
        time.sleep(max(0.0, start - time.monotonic()))
        status = 1
        try:
            store = Store.create(output, manifest, plan, fs=kit.FastFs())
            store.start_attempt({})
            os.write(1, f"{store.manifest.job_id} {len(store.plan.chunks)}\\n".encode())
            status = 0
        finally:
            os._exit(status)
    children.append(pid)
assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * num_processes
"""


def test_eight_processes_make_one_output(kit: Any, tmp_path: Path) -> None:
    for trial in range(3):
        output = tmp_path / str(trial) / "deep" / "out"
        done = run_kit(kit, str(output), "8", program=CREATE)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.split("\n")[:-1]
        assert len(lines) == 8
        assert len(set(lines)) == 1, "all have the job and the plan of one of them"
        store = Store.open(output)
        assert lines[0] == f"{store.manifest.job_id} {len(store.plan.chunks)}"
        assert sorted(os.listdir(output)) == [".batchjob", "data"]
