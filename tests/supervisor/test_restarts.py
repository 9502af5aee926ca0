"""The real program with workers that die, hang or run out of memory: the job goes on, and no row is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

Write = Callable[[Path, Iterable[Any]], Path]
Start = Callable[..., Any]

HOLD_THE_LOCK = """
import ctypes
def execute(self, plan):
    if faults: ctypes.PyDLL(None).sleep(600)  # native code that keeps the interpreter's lock
    return right(self, plan)
right, fake.FakeRunner.execute = fake.FakeRunner.execute, execute
"""


@pytest.fixture
def poisoned(tmp_path: Path, write_jsonl: Write) -> Path:
    """Two of a thousand rows hold the word that kills the engine."""
    rows = [{"prompt": f"row number {i}"} for i in range(1000)]
    for row in (311, 742):
        rows[row] = {"prompt": f"the poison {row}"}
    return write_jsonl(tmp_path / "poisoned.jsonl", rows)


def test_two_poisoned_rows_among_a_thousand(start: Start, kit: Any, poisoned: Path, output: Path) -> None:
    run = start("--max-num-seqs", "64", source=poisoned, poison_token=kit.poison())
    assert run.wait() == 0, run.text
    rows = kit.rows_of(output)
    assert [row["row_index"] for row in rows] == list(range(1000))
    bad = [row for row in rows if row["status"] != "ok"]
    assert [(row["row_index"], row["error_type"]) for row in bad] == [(311, "engine_crash"), (742, "engine_crash")]
    assert "killed by SIGKILL" in bad[0]["error_message"]
    assert 2 * 3 <= len(run.restarts) <= 2 * 4, run.text
    assert run.text.count("alone, twice") == 2
    assert "failed      2 engine_crash" in run.text
    num_tokens = sum(row["num_output_tokens"] for row in rows)
    assert f"{num_tokens:,} out in" in run.text, "the tokens of all workers are those of the run"
    assert run.text.count("sampling  ") == 1


def test_the_other_rows_come_out_as_without_poison(
    start: Start, kit: Any, poisoned: Path, output: Path, tmp_path: Path, run_cli: Callable[..., Any]
) -> None:
    run = start("--max-num-seqs", "32", "--n", "2", source=poisoned, poison_token=kit.poison())
    assert run.wait() == 0, run.text
    run_cli("run", "--engine", "fake", "--input", poisoned, "--n", "2", "--output", tmp_path / "healthy")
    expected = {(r["row_index"], r["sample_index"]): r["output"] for r in kit.rows_of(tmp_path / "healthy")}
    for row in kit.rows_of(output):
        if row["row_index"] in (311, 742):
            assert row["error_type"] == "engine_crash"
        else:
            assert row["output"] == expected.pop((row["row_index"], row["sample_index"]))
    assert sorted(expected) == [(row, sample) for row in (311, 742) for sample in (0, 1)]


def test_a_worker_killed_from_outside_is_restarted(start: Start, kit: Any, output: Path) -> None:
    run = start("--max-num-seqs", "8", step_seconds=0.01)
    run.wait_for_rows()
    os.kill(run.children()[0], signal.SIGKILL)
    done = kit.finished_rows(output)
    assert run.wait() == 0, run.text
    assert [row["row_index"] for row in kit.rows_of(output) if row["status"] == "ok"] == list(range(1000))
    assert len(run.restarts) == 1
    assert "was killed by SIGKILL" in run.restarts[0]
    assert "ok          1,000\n" in run.text, "rows of the same run are none that were done before"
    assert done


def test_a_step_that_raises_is_a_crash(start: Start, kit: Any, output: Path, tmp_path: Path) -> None:
    run = start("--max-num-seqs", "8", crash_at_step=20, patch=kit.once(tmp_path / "first"))
    assert run.wait() == 0, run.text
    assert len(run.restarts) == 1
    assert "told to crash at step 20" in run.restarts[0]
    assert all(row["status"] == "ok" for row in kit.rows_of(output))
    first, second = kit.attempts(output)
    assert (first["restarts"], second["restarts"], second["num_suspects"]) == (0, 1, 8)
    assert "told to crash" in second["last_end"]


@pytest.mark.parametrize("patch", ["", HOLD_THE_LOCK], ids=["sleeping", "holding the lock"])
def test_a_hang_is_noticed_its_stacks_kept_and_the_worker_restarted(
    start: Start, kit: Any, output: Path, tmp_path: Path, patch: str
) -> None:
    once = kit.once(tmp_path / "first")
    run = start("--max-num-seqs", "8", "--stall-timeout", "1", hang_at_step=1 if patch else 9, patch=once + patch)
    restarted = run.wait_for_line("restart 1: the worker hung")
    stalled = run.wait_for_line("sampling")  # a few milliseconds before the first step
    assert restarted - stalled < 1 + 3
    assert run.wait() == 0, run.text
    assert len(run.restarts) == 1
    assert [row["row_index"] for row in kit.rows_of(output) if row["status"] == "ok"] == list(range(1000))
    (stacks,) = (output / ".batchjob" / "attempts").glob("*.stacks")
    for text in (stacks.read_text(), run.text):
        assert "execute" in text
        assert "loop.py" in text
        assert "orders" in text or "_listen" in text, "all threads are shown"
    assert str(stacks) in run.text


def test_a_model_that_does_not_load_in_time_is_a_hang_too(start: Start, tmp_path: Path) -> None:
    slow = "import time\nfrom batchjob.engine import factory\nfactory.fake_capacity = lambda config: time.sleep(600)"
    run = start("--load-timeout", "0.5", "--stall-timeout", "0.1", patch=slow)
    assert run.wait() == 70
    assert "without loading the model" in run.text
    assert "gave up: 3 attempts in a row came down without finishing a row" in run.text
    assert len(run.restarts) == 2


def test_an_engine_that_always_dies_is_given_up_and_no_row_blamed(start: Start, kit: Any, output: Path) -> None:
    run = start(kill_at_step=1)
    started = time.monotonic()
    assert run.wait() == 70, run.text
    assert time.monotonic() - started < 20
    assert len(run.restarts) == 2
    assert kit.finished_rows(output) == set()
    assert "gave up" in run.text
    assert "Traceback" not in run.text


@pytest.mark.parametrize("error", ["MemoryError", "OutOfMemoryError"])
def test_out_of_memory_halves_the_limits_and_goes_on(start: Start, kit: Any, output: Path, error: str) -> None:
    patch = f"""
class OutOfMemoryError(RuntimeError): pass  # what torch calls it
def execute(self, plan):
    if len(plan.slices) > 16: raise {error}("no room for that many")
    return right(self, plan)
right, fake.FakeRunner.execute = fake.FakeRunner.execute, execute
"""
    run = start("--max-num-seqs", "64", patch=patch)
    assert run.wait() == 0, run.text
    assert all(row["status"] == "ok" for row in kit.rows_of(output))
    assert [record["limits_halved"] for record in kit.attempts(output)] == [0, 1, 2]
    assert "no room for that many" in run.restarts[0]


def test_kills_that_no_row_explains_halve_the_limits_too(start: Start, kit: Any, output: Path) -> None:
    """A machine without room kills like this, where the kernel's counters are out of sight."""
    patch = """
import os, signal
def execute(self, plan):
    if len(plan.slices) > 16: os.kill(os.getpid(), signal.SIGKILL)
    return right(self, plan)
right, fake.FakeRunner.execute = fake.FakeRunner.execute, execute
"""
    run = start("--max-num-seqs", "32", patch=patch)
    assert run.wait() == 0, run.text
    assert [row["row_index"] for row in kit.rows_of(output) if row["status"] == "ok"] == list(range(1000))
    assert kit.attempts(output)[-1]["limits_halved"] == 1
    assert len(run.restarts) <= 8, run.text


def test_a_native_crash_leaves_its_stacks(start: Start, kit: Any, output: Path, tmp_path: Path) -> None:
    crash = "import ctypes\nif faults: fake.FakeRunner.execute = lambda self, plan: ctypes.string_at(0)"
    run = start(patch=kit.once(tmp_path / "first") + "\n" + crash, step_seconds=0.0001)
    assert run.wait() == 0, run.text
    assert "was killed by SIGSEGV" in run.restarts[0]
    (stacks,) = (output / ".batchjob" / "attempts").glob("*.stacks")
    assert "Segmentation fault" in stacks.read_text()


def test_an_error_of_the_job_is_no_reason_to_restart(start: Start, tmp_path: Path) -> None:
    run = start(source=tmp_path / "missing.jsonl")
    assert run.wait() == 66
    assert run.text.startswith("batchjob: ")
    assert run.text.count("missing.jsonl") == 1
    assert not run.restarts


def test_a_bug_is_shown_and_ends_the_run(start: Start) -> None:
    run = start(patch="from batchjob.job.loop import Loop\nLoop._open_chunks = lambda self: 1 / 0")
    assert run.wait() == 1
    assert "ZeroDivisionError" in run.text
    assert not run.restarts


def test_a_finished_job_is_a_matter_of_two_seconds(start: Start, source: Path, output: Path) -> None:
    assert start().wait() == 0
    started = time.monotonic()
    block = "import sys\nassert not {'torch', 'transformers'} & set(sys.modules)\nsys.modules['torch'] = None"
    again = start(patch=block)
    assert again.wait() == 0, again.text
    assert time.monotonic() - started < 2
    assert "nothing to do: 1,000 of 1,000 rows" in again.text


def test_without_a_supervisor_there_is_no_second_process(
    source: Path, output: Path, run_cli: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    flags = ("run", "--engine", "fake", "--input", source, "--output", output, "--no-supervisor")
    done = run_cli(*flags, env={"PATH": "/nowhere"})
    assert "1,000 of 1,000 rows" in done.stderr or "1,000" in done.stderr
