"""`--steal`: a process that is done takes chunks of others from the back; claims keep them from doing work twice."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

import batchjob
from batchjob.job.chunk_source import SharedChunks
from batchjob.plan import Chunk
from batchjob.report.progress import ProgressCounts
from batchjob.store import Store, liveness
from batchjob.store.paths import Layout

Write = Callable[[Path, Iterable[Any]], Path]

PROGRAM = """
import sys
import batchjob.engine.fake as fake
from batchjob.store import liveness
seconds = float(sys.argv.pop(1))
liveness.BEAT_SECONDS = 0.2
init = fake.FakeRunner.__init__
fake.FakeRunner.__init__ = lambda self, *a, **k: init(self, *a, **{**k, "step_seconds": seconds})
from batchjob.cli import main
main()
"""


def final_rows(output: Path) -> list[int]:
    paths = sorted((output / "data").iterdir())
    return [row for path in paths for row in pyarrow.parquet.read_table(path)["row_index"].to_pylist()]


@pytest.fixture
def source(tmp_path: Path, write_jsonl: Write) -> Path:
    return write_jsonl(tmp_path / "in.jsonl", [{"prompt": f"row number {i}"} for i in range(400)])


# -- who takes what


class Sharers:
    """Processes that share the chunks of one output; all of them are this process."""

    def __init__(self, source: Path, output: Path, num_shards: int) -> None:
        self.output, self.num_shards = output, num_shards
        spec = batchjob.JobSpec(
            input=(str(source),),
            output=str(output),
            engine="fake",
            progress="none",
            chunk_rows=40,
            num_shards=num_shards,
        )
        from batchjob.job.open import open_job

        open_job(spec, lambda line: None).store.close()
        self.counts: list[ProgressCounts] = []

    def start(self, shard: int) -> SharedChunks:
        store = Store.open(self.output)
        store.start_attempt({})
        chunks = store.plan.chunks
        mine = [chunk for chunk in chunks if chunk.index % self.num_shards == shard]
        counts = ProgressCounts(rows_total=sum(chunk.num_rows for chunk in mine))
        self.counts.append(counts)
        return SharedChunks(store, mine, [chunk for chunk in chunks if chunk not in mine], counts)

    def publish(self, chunk: Chunk) -> None:
        """Makes a chunk look committed."""
        Layout(self.output).part(chunk.index).touch()


@pytest.fixture
def sharers(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sharers:
    monkeypatch.setattr("batchjob.job.chunk_source.SCAN_SECONDS", 0.0)
    monkeypatch.setattr(liveness, "BEAT_SECONDS", 0.1)
    return Sharers(source, tmp_path / "out", 2)


def take(chunks: SharedChunks, count: int) -> list[int]:
    return [chunk.index for _ in range(count) if (chunk := chunks.next()) is not None]


def test_the_owner_takes_from_the_front_and_a_thief_from_the_back(sharers: Sharers) -> None:
    even, odd = sharers.start(0), sharers.start(1)
    assert take(even, 2) == [0, 2]
    assert take(odd, 7) == [1, 3, 5, 7, 9, 8, 6]
    assert take(even, 9) == [4]
    assert take(odd, 9) == []
    assert (even.num_stolen, odd.num_stolen) == (0, 2)
    assert [counts.rows_total for counts in sharers.counts] == [120, 280], "each counts what it has taken"


def test_what_is_committed_is_not_taken(sharers: Sharers) -> None:
    even, odd = sharers.start(0), sharers.start(1)
    plan = Store.open(sharers.output).plan
    for index in (0, 9, 8):
        sharers.publish(plan.chunks[index])
    assert take(even, 9) == [2, 4, 6, 7, 5, 3, 1]
    assert take(odd, 9) == []
    assert sharers.counts[1].rows_total == 0


def test_a_chunk_committed_since_the_last_look_is_not_taken(sharers: Sharers, monkeypatch: pytest.MonkeyPatch) -> None:
    even, odd = sharers.start(0), sharers.start(1)
    assert take(odd, 5) == [1, 3, 5, 7, 9]
    monkeypatch.setattr("batchjob.job.chunk_source.SCAN_SECONDS", 1000.0)
    assert take(even, 5) == [0, 2, 4, 6, 8]
    plan = Store.open(sharers.output).plan
    sharers.publish(plan.chunks[8])
    even.done(plan.chunks[8])
    assert take(odd, 1) == [], "its claim is free again because it is finished"


def test_rows_of_a_chunk_committed_here_out_of_turn_stay_counted(sharers: Sharers) -> None:
    even = sharers.start(0)
    first = even.todo[0]
    assert even.claim(first)
    sharers.publish(first)
    even.done(first)
    assert take(even, 1) == [2]
    assert sharers.counts[0].rows_total == 200


def test_a_thief_does_not_wait_for_the_living(sharers: Sharers) -> None:
    even, odd = sharers.start(0), sharers.start(1)
    take(even, 5)
    take(odd, 9)
    assert odd.wait() is False


def test_what_a_stopped_process_gives_back_is_taken(sharers: Sharers) -> None:
    even, odd = sharers.start(0), sharers.start(1)
    assert take(even, 2) == [0, 2]
    assert take(odd, 9) == [1, 3, 5, 7, 9, 8, 6, 4]
    even.close()
    assert odd.wait() is True
    assert take(odd, 9) == [2, 0]


@pytest.mark.parametrize("alive", [False, None])
def test_claims_of_the_dead_are_taken(sharers: Sharers, alive: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once where it is known; where nothing is known after the counter stood still for two beats."""
    even, odd = sharers.start(0), sharers.start(1)
    take(even, 2)
    monkeypatch.setattr("batchjob.store.liveness.is_alive", lambda record: alive)
    if alive is None:
        take(odd, 5)
    began = time.monotonic()
    found = take(odd, 20)
    while odd.wait():
        assert time.monotonic() - began < 5
        found += take(odd, 20)
    assert sorted({0, 2} & set(found)) == [0, 2]
    assert (time.monotonic() - began > 0.15) == (alive is None)


def test_rows_of_a_chunk_that_was_stolen_are_found_again(sharers: Sharers) -> None:
    """A restarted thief looks for rows that it had in the engine: their chunk belongs to another shard."""
    even, odd = sharers.start(0), sharers.start(1)
    take(even, 1)
    odd.adopt([0, 81, 90, 325])
    assert sorted(chunk.index for chunk in odd.todo) == [1, 2, 3, 5, 7, 8, 9], "chunk 0 has an owner at work"
    assert sharers.counts[1].rows_total == 280


# -- real processes


def command(source: Path, output: Path, shard: int, num_shards: int, step: float, *more: str) -> list[str]:
    flags = ["--engine", "fake", "--input", str(source), "--output", str(output), "--chunk-rows", "10"]
    flags += [
        "--max-num-seqs",
        "4",
        "--num-shards",
        str(num_shards),
        "--shard-id",
        str(shard),
        "--no-supervisor",
        *more,
    ]
    return [sys.executable, "-c", PROGRAM, str(step), "run", *flags]


def run_all(commands: list[list[str]]) -> tuple[float, list[str]]:
    """Seconds until the last has ended, and what each printed."""
    began = time.monotonic()
    processes = [subprocess.Popen(one, stderr=subprocess.PIPE, text=True) for one in commands]
    printed = []
    for process in processes:
        printed.append(process.communicate(timeout=120)[1])
        assert process.returncode == 0, printed[-1]
    return time.monotonic() - began, printed


def wasted(printed: list[str]) -> int:
    return sum(int(count) for text in printed for count in re.findall(r"twice +(\d+) rows", text))


def test_a_slow_shard_is_helped(source: Path, tmp_path: Path) -> None:
    steps = [0.02, 0.0, 0.0]
    times = {}
    for name, more in (("alone", ()), ("helped", ("--steal",))):
        output = tmp_path / name
        times[name], printed = run_all([command(source, output, i, 3, step, *more) for i, step in enumerate(steps)])
        assert final_rows(output) == list(range(400))
        assert wasted(printed) <= 20, "claims keep work from being done twice"
    assert any("stolen" in text for text in printed)
    assert times["helped"] < times["alone"]
    assert os.listdir(Layout(tmp_path / "helped").claims) == []


def test_a_killed_shard_is_finished_by_the_others(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    victim = subprocess.Popen(command(source, output, 0, 2, 0.05, "--steal"), stderr=subprocess.PIPE, text=True)
    while not list((output / ".batchjob" / "wal").glob("*/*.log")):
        assert victim.poll() is None
        time.sleep(0.02)
    victim.kill()
    victim.communicate()
    _, printed = run_all([command(source, output, 1, 2, 0.0, "--steal")])
    assert final_rows(output) == list(range(400))
    assert json.loads(Layout(output).done.read_text())["num_rows"] == 400
    assert wasted(printed) == 0
    assert os.listdir(Layout(output).claims) == []


@pytest.fixture(autouse=True)
def no_claims_left(tmp_path: Path) -> Iterator[None]:
    yield
    assert not list(tmp_path.glob("*/.batchjob/claims/*.*")), "no claim is left half made"
