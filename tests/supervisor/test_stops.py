"""Signals and orphans: whatever the worker does, the program ends in time, with 75, and nothing finished is lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Start = Callable[..., Any]

SLOW_LOAD = """
import ctypes
from batchjob.engine import factory
factory.fake_capacity = lambda config: ctypes.PyDLL(None).sleep(600)  # native code that cannot be interrupted
"""
SLOW_COMMIT = """
import time
from batchjob.store.fsops import FsOps
link = FsOps.link
def slow(self, *paths):
    if "part-" in str(paths[1]):
        open({marker!r}, "w").close()
        time.sleep(1.5)
    return link(self, *paths)
FsOps.link = slow
"""


def check_end(run: Any, kit: Any, sent: float, *, within: float, kept: set[int]) -> None:
    """It ended as it should, and the same command goes on."""
    assert run.wait() == 75, run.text
    assert time.monotonic() - sent < within
    assert kept <= kit.finished_rows(run.output), "a finished row was lost"
    assert "run the same command again" in run.text
    assert not run.restarts
    assert_gone(kit, run.pids)


def assert_gone(kit: Any, pids: list[int]) -> None:
    """Within a second."""
    since = time.monotonic()
    while not all(map(kit.is_gone, pids)):
        assert time.monotonic() - since < 1
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1], ids=lambda number: number.name)
def test_a_stop_while_the_model_loads_is_immediate(start: Start, kit: Any, number: signal.Signals) -> None:
    run = start(patch=SLOW_LOAD)
    run.wait_for_line("loading")
    run.pids = run.children()
    sent = time.monotonic()
    run.process.send_signal(number)
    check_end(run, kit, sent, within=3, kept=set())
    assert f"stopped early ({number.name}) while the model was loaded" in run.text


def test_sigterm_in_prefill(start: Start, kit: Any, tmp_path: Path, write_jsonl: Any, output: Path) -> None:
    """Prompts that take many steps each."""
    long = write_jsonl(tmp_path / "long.jsonl", [{"prompt": "word " * 400 + str(i)} for i in range(200)])
    run = start("--max-num-batched-tokens", "64", "--max-num-seqs", "16", source=long, step_seconds=0.1)
    run.wait_for_rows()
    run.pids = run.children()
    kept = kit.finished_rows(output)
    sent = time.monotonic()
    run.process.send_signal(signal.SIGTERM)
    check_end(run, kit, sent, within=20, kept=kept)


def test_sigterm_in_decode_lets_running_rows_finish(start: Start, kit: Any, output: Path) -> None:
    run = start("--max-num-seqs", "16", step_seconds=0.1)
    run.wait_for_rows()
    run.pids = run.children()
    kept = kit.finished_rows(output)
    sent = time.monotonic()
    run.process.send_signal(signal.SIGTERM)
    run.wait_for_line("SIGTERM: running rows may finish within 15 s, nothing new")
    run.process.send_signal(signal.SIGTERM)
    run.process.send_signal(signal.SIGUSR1)
    check_end(run, kit, sent, within=5, kept=kept)
    assert len(kit.finished_rows(output)) > len(kept)
    assert "stopped early (SIGTERM)" in run.text


def test_sigterm_in_a_commit(start: Start, kit: Any, output: Path, tmp_path: Path) -> None:
    marker = tmp_path / "in commit"
    run = start("--max-num-seqs", "16", step_seconds=0.02, patch=SLOW_COMMIT.format(marker=str(marker)))
    run.wait_for(marker.exists)
    run.pids = run.children()
    kept = kit.finished_rows(output)
    assert len(kept) >= 100
    sent = time.monotonic()
    run.process.send_signal(signal.SIGTERM)
    check_end(run, kit, sent, within=6, kept=kept)
    assert (output / "data" / "part-00000000.parquet").exists()


def test_a_worker_that_does_not_hear_is_killed_at_its_deadline(start: Start, kit: Any, output: Path) -> None:
    run = start("--max-num-seqs", "4", "--drain-timeout", "1", hang_at_step=30)
    run.wait_for_rows()
    time.sleep(0.5)
    run.pids = run.children()
    kept = kit.finished_rows(output)
    sent = time.monotonic()
    run.process.send_signal(signal.SIGTERM)
    check_end(run, kit, sent, within=6, kept=kept)
    assert time.monotonic() - sent > 3
    assert "in the middle of its work" in run.text


def test_a_hang_in_a_long_drain_is_noticed(start: Start, kit: Any, output: Path) -> None:
    flags = ("--max-num-seqs", "4", "--drain-timeout", "500", "--stall-timeout", "1", "--min-tokens", "40")
    run = start(*flags, hang_at_step=60, step_seconds=0.02)
    run.wait_for_rows()  # after some 41 steps, and others have begun
    kept = kit.finished_rows(output)
    sent = time.monotonic()
    run.process.send_signal(signal.SIGUSR1)
    assert run.wait() == 75, run.text
    assert time.monotonic() - sent < 6
    assert kept <= kit.finished_rows(output)


def test_a_stopped_terminal_is_no_hang(start: Start, kit: Any, output: Path) -> None:
    """Ctrl-Z stops them all, and when they go on, time has passed that is not the worker's."""
    run = start("--max-num-seqs", "4", "--stall-timeout", "1", step_seconds=0.01)
    run.wait_for_rows()
    pids = [run.process.pid, *run.children()]
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in pids:
            os.kill(pid, number)
        time.sleep(3.0 if number == signal.SIGSTOP else 0)
    assert run.wait() == 0, run.text
    assert not run.restarts


def test_ctrl_c_once_drains_and_twice_stops(start: Start, kit: Any, output: Path) -> None:
    run = start("--max-num-seqs", "8", step_seconds=0.7)
    run.wait_for_rows()
    run.pids = run.children()
    run.process.send_signal(signal.SIGINT)
    run.wait_for_line("SIGINT: running rows may finish within 15 s, nothing new; press Ctrl-C again to stop now")
    kept = kit.finished_rows(output)
    sent = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    check_end(run, kit, sent, within=3, kept=kept)
    assert "stopping now" in run.text


def test_a_stop_between_two_workers_starts_no_other(start: Start, kit: Any, output: Path) -> None:
    """The worker dies while it drains."""
    run = start("--max-num-seqs", "8", step_seconds=0.5)
    run.wait_for_rows()
    run.pids = run.children()
    kept = kit.finished_rows(output)
    sent = time.monotonic()
    run.process.send_signal(signal.SIGTERM)
    run.wait_for_line("SIGTERM: ")
    os.kill(run.pids[0], signal.SIGKILL)
    check_end(run, kit, sent, within=3, kept=kept)


@pytest.mark.parametrize("doing", ["working", "loading", "hanging"])
def test_worker_and_feeder_are_gone_a_second_after_their_supervisor(start: Start, kit: Any, doing: str) -> None:
    if doing == "loading":
        run = start(patch=SLOW_LOAD)
        run.wait_for_line("loading")
    else:
        run = start("--max-num-seqs", "4", step_seconds=0.05, hang_at_step=30 if doing == "hanging" else None)
        run.wait_for_rows()
        time.sleep(2.0 if doing == "hanging" else 0.0)
    pids = run.children()
    assert len(pids) == 2
    run.process.kill()
    assert_gone(kit, pids)


def test_a_signal_to_the_whole_group_reaches_the_supervisor_alone(start: Start, kit: Any, output: Path) -> None:
    """A terminal and some schedulers send it to every process."""
    run = start("--max-num-seqs", "8", step_seconds=0.1)
    run.wait_for_rows()
    run.pids = run.children()
    kept = kit.finished_rows(output)
    sent = time.monotonic()
    for pid in [*run.pids, run.process.pid]:
        os.kill(pid, signal.SIGINT)
    check_end(run, kit, sent, within=5, kept=kept)
