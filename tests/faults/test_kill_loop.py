"""SIGKILL again and again, at random moments, with one writer and with three that all do the same rows.

After every kill each row that was finished before is still there, with its answer; at the end every row is there once.
Some of the writers have a supervisor, whose worker must die with it; some are one process.
"""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest


@dataclass
class Writers:
    """`number` processes on one output. Several of them take no lease: all of them work on every chunk."""

    fire: Any
    number: int
    step: float
    rng: random.Random
    log: Path
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    ends: Counter[int] = field(default_factory=Counter)
    kills: int = 0

    def start(self) -> subprocess.Popen[str]:
        flags = ["--no-lease"] if self.number > 1 else []
        flags += ["--no-supervisor"] if self.rng.random() < 0.5 else []
        with self.log.open("a") as log:
            return self.fire.start(*flags, step=self.step, stderr=log)

    def run(self, num_kills: int) -> None:
        """Kills until it is enough or the job is done, then lets the writers end in peace."""
        self.processes = [self.start() for _ in range(self.number)]
        kept: dict[int, str | None] = {}
        while self.kills < num_kills and not (self.fire.output / ".batchjob" / "done.json").exists():
            time.sleep(self.rng.random() * 3.0 / self.number)
            victim = self.processes[self.rng.randrange(self.number)]
            victim.kill()
            victim.wait()
            self.kills += victim.returncode == -signal.SIGKILL
            self.restart_those_that_ended()
            now = self.fire.finished()
            assert kept.items() <= now.items(), "a finished row was lost or changed"
            kept = now
        for number in range(self.number):
            self.finish(number)
        assert kept.items() <= self.fire.finished().items()

    def restart_those_that_ended(self) -> None:
        for number, process in enumerate(self.processes):
            if process.poll() is not None:
                self.ends[process.returncode] += 1
                self.processes[number] = self.start()

    def finish(self, number: int) -> None:
        """Runs to the end, as a person would: the same command again while it was not the end."""
        for _ in range(4):
            code = self.processes[number].wait(300)
            self.ends[code] += 1
            if code == 0:
                return
            self.processes[number] = self.start()
        raise AssertionError(f"it does not end: {dict(self.ends)}\n{self.log.read_text()[-4000:]}")


def fight(make_fire: Any, tmp_path: Path, *, seed: int, writers: int, kills: int, rows: int, step: float) -> Writers:
    fire = make_fire(rows, name=f"seed{seed}")
    loop = Writers(fire, writers, step, random.Random(seed), tmp_path / f"seed{seed}.log")
    try:
        loop.run(kills)
    finally:
        for process in loop.processes:
            process.kill()
            process.wait()
    fire.check_complete()
    assert set(loop.ends) <= {-signal.SIGKILL, 0}, (dict(loop.ends), loop.log.read_text()[-4000:])
    return loop


@pytest.mark.parametrize(("writers", "kills"), [(1, 4), (3, 8)])
def test_killed_at_random(make_fire: Any, tmp_path: Path, writers: int, kills: int) -> None:
    loop = fight(make_fire, tmp_path, seed=writers, writers=writers, kills=kills, rows=600, step=0.03)
    assert loop.kills >= kills - 2


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("writers", "kills"), [(1, 100), (3, 300)])
def test_killed_hundreds_of_times(
    make_fire: Any, tmp_path: Path, writers: int, kills: int, capsys: pytest.CaptureFixture[str]
) -> None:
    total, first = 0, 1000 * writers + 1
    seed = first
    started = time.monotonic()
    while total < kills:
        loop = fight(make_fire, tmp_path, seed=seed, writers=writers, kills=kills - total, rows=3000, step=0.02)
        total, seed = total + loop.kills, seed + 1
    with capsys.disabled():
        seconds = time.monotonic() - started
        print(f"\n{writers} writers: {total} kills, seeds {first} to {seed - 1}, {seconds:.0f} s")
