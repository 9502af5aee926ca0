"""Several devices as one command: workers of the real program on the fake engine, some of which die, fail or hang."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

Write = Callable[[Path, Iterable[Any]], Path]
Start = Callable[..., Any]

# A patch for `start`: `member` is a worker's place in its team.
WHO = """
import batchjob.supervisor.worker as worker
init_observer = worker.PipeObserver.__init__
member = None
def noted(self, orders, stop):
    global member
    init_observer(self, orders, stop)
    member = orders.team.member
worker.PipeObserver.__init__ = noted
right = fake.FakeRunner.execute
"""
BAD_DEVICE = (
    WHO
    + """
def execute(self, plan):
    if member == {member}: raise RuntimeError("CUDA error: unspecified launch failure")
    return right(self, plan)
fake.FakeRunner.execute = execute
"""
)
SLOW_MEMBER = (
    WHO
    + """
import time
def execute(self, plan):
    if member == {member}: time.sleep(0.3)
    return right(self, plan)
fake.FakeRunner.execute = execute
"""
)


@pytest.fixture
def source(tmp_path: Path, write_jsonl: Write) -> Path:
    return write_jsonl(tmp_path / "in.jsonl", [{"prompt": f"row number {i}"} for i in range(300)])


def check_rows(kit: Any, output: Path, number: int = 300) -> None:
    rows = kit.rows_of(output)
    assert [row["row_index"] for row in rows if row["status"] == "ok"] == list(range(number))


def rows_by_device(run: Any) -> dict[str, int]:
    """From the summary."""
    line = re.search(r"^  devices +(.*) rows$", run.text, re.MULTILINE)
    assert line is not None, run.text
    return {name: int(rows.replace(",", "")) for name, rows in re.findall(r"(\S+) ([\d,]+?)(?:, |$)", line[1])}


def members(kit: Any, output: Path) -> list[int]:
    return sorted(record["team"]["member"] for record in kit.attempts(output))


def pid_of(output: Path, member: int) -> int:
    """Process of the first worker of a member."""
    for path in (output / ".batchjob" / "attempts").glob("*.json"):
        record = json.loads(path.read_text())
        if record.get("team", {}).get("member") == member:
            return int(record["pid"])
    return 0


SLOW = ("--max-num-seqs", "4", "--chunk-rows", "20")


def test_three_devices_share_a_job(start: Start, kit: Any, source: Path, output: Path) -> None:
    run = start("--devices", "cpu,cpu,cpu", *SLOW, "--progress", "lines", source=source, step_seconds=0.01)
    assert run.wait() == 0, run.text
    check_rows(kit, output)
    shares = rows_by_device(run)
    assert sum(shares.values()) == 300
    assert all(shares.values()), "each has done something"
    assert members(kit, output) == [0, 1, 2]
    for once in ("planned 300 rows", "loading the fake engine", "engine  ", "sampling  ", "done: 300 of 300 rows"):
        assert run.text.count(once) == 1, run.text
    assert "devices   3: cpu:0, cpu:1, cpu:2" in run.text
    num_tokens = sum(row["num_output_tokens"] for row in kit.rows_of(output))
    assert f"{num_tokens:,} out in" in run.text
    assert "stolen" not in run.text, "among the devices of one command nothing is stolen"
    record = json.loads((output / ".batchjob" / "job.json").read_text())["spec"]
    assert (record["devices"], record["device"], record["num_shards"], record["steal"]) == (
        "cpu,cpu,cpu",
        "auto",
        1,
        False,
    )
    again = start("--devices", "cpu,cpu", *SLOW, source=source)
    assert again.wait() == 0, again.text
    assert "nothing to do: 300 of 300 rows" in again.text
    assert "loading" not in again.text


def test_a_fast_device_takes_chunks_of_a_slow_one(start: Start, kit: Any, source: Path, output: Path) -> None:
    run = start("--devices", "cpu,cpu", *SLOW, source=source, patch=SLOW_MEMBER.format(member=0), step_seconds=0.002)
    assert run.wait() == 0, run.text
    check_rows(kit, output)
    shares = rows_by_device(run)
    assert shares["cpu:1"] > 200 > shares["cpu:0"], shares


def test_one_worker_killed_while_the_others_go_on(start: Start, kit: Any, source: Path, output: Path) -> None:
    run = start("--devices", "cpu,cpu,cpu", *SLOW, source=source, step_seconds=0.02)
    run.wait_for(lambda: kit.finished_rows(output) and all(pid_of(output, member) for member in range(3)))
    others = [pid_of(output, member) for member in (0, 2)]
    os.kill(pid_of(output, 1), signal.SIGKILL)
    run.wait_for(lambda: "cpu:1: restart 1: the worker was killed by SIGKILL" in run.text)
    assert not any(map(kit.is_gone, others))
    assert run.wait() == 0, run.text
    check_rows(kit, output)
    assert members(kit, output) == [0, 1, 1, 2]
    assert sum(rows_by_device(run).values()) == 300, "no row is computed twice, and each counts once"
    assert "ok          300\n" in run.text, "rows of the same command are none that were done before"


def test_a_poisoned_row_brings_down_one_device_only(
    start: Start, kit: Any, output: Path, tmp_path: Path, write_jsonl: Write
) -> None:
    rows = [{"prompt": "the poison" if i == 47 else f"row number {i}"} for i in range(200)]
    poisoned = write_jsonl(tmp_path / "poisoned.jsonl", rows)
    run = start("--devices", "cpu,cpu", *SLOW, source=poisoned, poison_token=kit.poison(), step_seconds=0.005)
    assert run.wait() == 0, run.text
    bad = [row["row_index"] for row in kit.rows_of(output) if row["status"] != "ok"]
    assert bad == [47]
    assert len(kit.rows_of(output)) == 200
    restarted = {line.split(":")[1] for line in run.text.splitlines() if ": restart " in line}
    assert len(restarted) == 1, run.text


def test_a_bad_device_does_not_stop_the_others(start: Start, kit: Any, source: Path, output: Path) -> None:
    run = start("--devices", "cpu,cpu", *SLOW, source=source, patch=BAD_DEVICE.format(member=1), step_seconds=0.02)
    assert run.wait() == 0, run.text
    check_rows(kit, output)
    assert "cpu:1: the device failed 2 times in a row" in run.text
    assert "cpu:1: 1 of 2 devices go on without it" in run.text
    assert rows_by_device(run) == {"cpu:0": 300, "cpu:1": 0}
    assert "cpu:1 failed: the device failed" in run.text


@pytest.mark.long
def test_the_first_device_may_be_the_bad_one(start: Start, kit: Any, source: Path, output: Path) -> None:
    run = start("--devices", "cpu,cpu", *SLOW, source=source, patch=BAD_DEVICE.format(member=0), step_seconds=0.01)
    assert run.wait() == 0, run.text
    check_rows(kit, output)
    assert rows_by_device(run)["cpu:0"] == 0
    assert run.text.count("sampling  ") == 1


def test_when_all_devices_fail_another_machine_may_do_better(
    start: Start, kit: Any, source: Path, output: Path
) -> None:
    patch = "def execute(self, plan): raise RuntimeError('CUDA error: ECC')\nfake.FakeRunner.execute = execute"
    run = start("--devices", "cpu,cpu", *SLOW, source=source, patch=patch)
    assert run.wait() == 75, run.text
    assert "stopped early (device): all 2 devices failed" in run.text
    assert kit.finished_rows(output) == set()


NO_ROOM_FOR_PARTS = """
from batchjob.errors import DiskFullError
from batchjob.store.chunk import OpenChunk
def commit(self, carried): raise DiskFullError("no space left for a part.")
OpenChunk.commit = commit
"""


def test_rows_without_their_parts_are_not_done(
    start: Start, kit: Any, output: Path, tmp_path: Path, write_jsonl: Write
) -> None:
    source = write_jsonl(tmp_path / "few.jsonl", [{"prompt": f"row number {i}"} for i in range(40)])
    flags = ("--devices", "cpu,cpu", *SLOW, "--full-disk-timeout", "1")
    run = start(*flags, source=source, patch=NO_ROOM_FOR_PARTS, step_seconds=0.02)
    assert run.wait() == 74, run.text
    assert kit.rows_of(output) == []
    assert kit.finished_rows(output) == set(range(40))
    assert "done: 40" not in run.text
    assert start("--devices", "cpu,cpu", *SLOW, source=source).wait() == 0
    check_rows(kit, output, 40)


@pytest.mark.long
def test_an_engine_that_always_dies_everywhere_is_given_up(start: Start, source: Path) -> None:
    run = start("--devices", "cpu,cpu", *SLOW, source=source, kill_at_step=1)
    assert run.wait() == 70, run.text
    assert "gave up: none of 2 devices goes on" in run.text
    assert "Traceback" not in run.text


def test_a_stop_is_for_all_and_another_number_of_devices_goes_on(
    start: Start, kit: Any, source: Path, output: Path
) -> None:
    run = start("--devices", "cpu,cpu,cpu", *SLOW, source=source, step_seconds=0.05)
    run.wait_for(lambda: len(kit.finished_rows(output)) > 20)
    run.wait_for(lambda: pid_of(output, 2))
    pids = run.children()
    kept = kit.finished_rows(output)
    sent = time.monotonic()
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 75, run.text
    assert time.monotonic() - sent < 10
    assert run.text.count("SIGTERM: running rows may finish within") == 1
    finished = kit.finished_rows(output)
    assert kept <= finished
    stopped = re.search(r"stopped early \(SIGTERM\): (\d+) of 300 rows are done and safe", run.text)
    assert stopped is not None, run.text
    assert int(stopped[1]) == len(finished)
    assert f"ok          {len(finished)}\n" in run.text
    assert all(map(kit.is_gone, pids))
    again = start("--devices", "cpu,cpu", *SLOW, source=source)
    assert again.wait() == 0, again.text
    check_rows(kit, output)
    assert f"ok          300 ({len(finished)} done before)" in again.text
    assert sum(rows_by_device(again).values()) == 300 - len(finished)


@pytest.mark.parametrize("announced_by", ["SIGUSR1", "time limit"])
def test_an_announced_stop_requeues_the_task_once(
    start: Start,
    source: Path,
    output: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    announced_by: str,
) -> None:
    calls = tmp_path / "calls"
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{scontrol.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    limit = "3s" if announced_by == "time limit" else "none"
    flags = ("--devices", "cpu,cpu", *SLOW, "--requeue", "scontrol", "--time-limit", limit)
    run = start(*flags, source=source, step_seconds=0.2)
    if announced_by == "SIGUSR1":
        run.wait_for(lambda: pid_of(output, 1))
        run.process.send_signal(signal.SIGUSR1)
    assert run.wait() == 75, run.text
    assert f"stopped early ({announced_by})" in run.text
    assert calls.read_text() == "requeue 77\n"
    assert run.text.count("task 77 is back in the queue") == 1


def test_workers_are_gone_with_their_supervisor(start: Start, kit: Any, source: Path, output: Path) -> None:
    run = start("--devices", "cpu,cpu", *SLOW, source=source, step_seconds=0.05)
    run.wait_for(lambda: pid_of(output, 1))
    pids = run.children()
    assert len(pids) >= 2
    run.process.kill()
    run.wait()
    since = time.monotonic()
    while not all(map(kit.is_gone, pids)):
        assert time.monotonic() - since < 2
        time.sleep(0.02)


def test_a_second_command_on_the_same_shard_is_refused(start: Start, kit: Any, source: Path, output: Path) -> None:
    first = start("--devices", "cpu,cpu", *SLOW, source=source, step_seconds=0.3)
    first.wait_for_rows()
    first.wait_for(lambda: pid_of(output, 1))
    for devices in ("cpu", "cpu,cpu,cpu"):
        second = start("--devices", devices, *SLOW, source=source)
        assert second.wait() == 69, second.text
        assert "Wait for it, or stop it" in second.text
    first.process.send_signal(signal.SIGTERM)
    assert first.wait() == 75


def test_shards_of_an_array_stay_apart(start: Start, kit: Any, source: Path, output: Path) -> None:
    """Tasks with different numbers of devices, of which neither steals, have each their own shard's chunks."""
    shards = ("--num-shards", "2", "--shard-id")
    first = start("--devices", "cpu,cpu", *shards, "1", *SLOW, source=source, step_seconds=0.005)
    assert first.wait() == 0, first.text
    rows = {row["row_index"] for row in kit.rows_of(output)}
    assert rows == {row for row in range(300) if row // 20 % 2 == 1}
    assert "done: 140 of 140 rows" in first.text
    assert "other shards of this job still have rows" in first.text
    second = start("--devices", "cpu,cpu,cpu", *shards, "0", *SLOW, source=source)
    assert second.wait() == 0, second.text
    check_rows(kit, output)


def test_errors_before_there_is_a_job_are_told_once(start: Start, tmp_path: Path) -> None:
    run = start("--devices", "cpu,cpu", source=tmp_path / "missing.jsonl")
    assert run.wait() == 66
    assert run.text.count("missing.jsonl") == 1
    assert run.text.startswith("batchjob: ")


@pytest.mark.long
def test_failed_rows_count_over_all_devices(
    start: Start, kit: Any, output: Path, tmp_path: Path, write_jsonl: Write
) -> None:
    rows: list[Any] = [{"prompt": f"row number {i}"} for i in range(100)]
    for row in (5, 55, 95):
        rows[row] = {"prompt": None}
    source = write_jsonl(tmp_path / "bad.jsonl", rows)
    run = start("--devices", "cpu,cpu", *SLOW, source=source, step_seconds=0.005)
    assert run.wait() == 65, run.text
    assert "3 of 100 rows failed" in run.text
    assert len(kit.rows_of(output)) == 100


def test_without_a_supervisor_only_the_first_is_used(
    source: Path, output: Path, run_cli: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    flags = (
        "run",
        "--engine",
        "fake",
        "--input",
        source,
        "--output",
        output,
        "--devices",
        "cpu,cpu",
        "--no-supervisor",
    )
    done = run_cli(*flags)
    assert "warning: one process runs on one device: cpu is used, not all of cpu:0, cpu:1" in done.stderr
    assert "done: 300 of 300 rows" in done.stderr
