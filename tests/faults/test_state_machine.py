"""Any order of runs, crashes, second writers, stops, damage, other settings and other shard counts, in one process.

`batchjob.run` is the real one, with the fake engine and the file system of the store's tests, which crashes at a chosen
operation. After every step the parts that are there hold exactly the rows they should.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from inline_feeder import InlineFeeder

import batchjob
from batchjob.report.result import RunResult

ROWS, CHUNK_ROWS = 30, 7
SHARDS = st.integers(1, 7)
OPERATION = st.integers(0, 260)  # of the file system; a whole run has fewer


def _load_kit() -> ModuleType:
    path = Path(__file__).parents[1] / "store" / "kit.py"
    spec = importlib.util.spec_from_file_location("store_kit_for_faults", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


KIT = _load_kit()


def run_job(folder: Path, fs: Any, *, others_live: bool = False, **changes: Any) -> RunResult:
    spec = batchjob.JobSpec(
        **{
            "input": (str(folder / "in.jsonl"),),
            "output": str(folder / "out"),
            "engine": "fake",
            "progress": "none",
            "chunk_rows": CHUNK_ROWS,
            "max_error_rate": 1.0,
            "full_disk_timeout": 0.0,
            "temperature": 1.0,
            "lease": False,
            **changes,
        }
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("batchjob.store.store.FsOps", lambda: fs)
        patch.setattr("batchjob.prompts.feeder.Feeder", InlineFeeder)
        patch.setattr("batchjob.store.reread.PAUSES", ())
        # All processes of this test are one, so that none looks dead: they all are, but for two that overlap.
        patch.setattr("batchjob.store.context.is_alive", lambda _: others_live)
        return batchjob.run(spec, echo=lambda line: None)


def write_input(path: Path) -> None:
    rows = [{"n": i, "prompt": f"row number {i}", "params": {"n": 1 + i % 2}} for i in range(ROWS)]
    lines = [json.dumps(row) for row in rows]
    lines[4] = "not json"
    lines[11] = '{"n": 11, "prompt": null}'
    path.write_text("\n".join(lines) + "\n")


def read_part(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    for row in rows:  # messages name the input file, which is another one in every example
        row["error_message"] = (row["error_message"] or "").rpartition("/")[2]
    return rows


class JobMachine(RuleBasedStateMachine):
    """`self.seen` are the parts that have been there, with their bytes: they never change but by damage."""

    expected: dict[str, list[dict[str, Any]]]  # part name -> rows, of a run that nothing disturbed

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="batchjob-machine-"))
        write_input(self.folder / "in.jsonl")
        self.seen: dict[str, bytes] = {}
        self.damaged: set[str] = set()

    def teardown(self) -> None:
        """However it went, one more run completes the job."""
        try:
            result = self.run_shards(1)
            assert result.job_complete
            assert result.exit_code == 0
            assert sorted(self.parts()) == sorted(self.expected)
            for name, path in self.parts().items():
                assert read_part(path) == self.expected[name]
            state = self.folder / "out" / ".batchjob"
            assert not any((state / "wal").iterdir())
        finally:
            shutil.rmtree(self.folder)

    def parts(self) -> dict[str, Path]:
        data = self.folder / "out" / "data"
        return {path.name: path for path in data.iterdir()} if data.is_dir() else {}

    def logs(self) -> list[Path]:
        return sorted((self.folder / "out" / ".batchjob" / "wal").glob("*/*.log"))

    def run_shards(self, num_shards: int) -> RunResult:
        for shard in range(num_shards):
            result = run_job(self.folder, KIT.FastFs(), num_shards=num_shards, shard_id=shard)
        self.damaged.clear()  # the next start finds and repairs it
        return result

    # -- what may happen

    @initialize()
    def nothing_yet(self) -> None:
        assert self.parts() == {}

    @rule(num_shards=SHARDS, data=st.data())
    def run_a_shard(self, num_shards: int, data: st.DataObject) -> None:
        shard = data.draw(st.integers(0, num_shards - 1))
        run_job(self.folder, KIT.FastFs(), num_shards=num_shards, shard_id=shard)
        self.damaged.clear()

    @rule(k=OPERATION, num_shards=SHARDS, data=st.data())
    def crash(self, k: int, num_shards: int, data: st.DataObject) -> None:
        shard = data.draw(st.integers(0, num_shards - 1))
        with crashing(KIT.FaultyFs(k)) as fs:
            run_job(self.folder, fs, num_shards=num_shards, shard_id=shard)

    @rule(k=OPERATION, number=st.sampled_from([5, 28, 116, 122]), persistent=st.booleans())
    def fail(self, k: int, number: int, persistent: bool) -> None:
        """EIO, ENOSPC, ESTALE and EDQUOT (their numbers on Linux)."""
        fs = KIT.FaultyFs(k, error=number, persistent=persistent)
        try:
            run_job(self.folder, fs)
        except (batchjob.StorageError, batchjob.OutputCreateError):
            pass
        finally:
            fs.release()

    @rule(k=OPERATION, dies_at=st.none() | OPERATION)
    def second_writer(self, k: int, dies_at: int | None) -> None:
        """In the middle of a run another one does the same work, and perhaps dies of it."""
        started = False

        def other(name: str, *args: Any) -> None:
            nonlocal started
            if fs.count >= k and not started:
                started = True
                with crashing(KIT.FaultyFs(dies_at)) as second:
                    run_job(self.folder, second, others_live=True)

        fs = KIT.FaultyFs(before=other)
        try:
            run_job(self.folder, fs, others_live=True)
        finally:
            fs.release()

    @rule(steps=st.integers(0, 6))
    def stop(self, steps: int) -> None:
        """A signal comes after some steps of the engine."""
        with pytest.MonkeyPatch.context() as patch:
            signal_after(patch, steps)
            result = run_job(self.folder, KIT.FastFs(), max_num_seqs=3)
        assert result.exit_code == (0 if result.job_complete else 75)
        self.damaged.clear()

    @precondition(lambda self: self.parts())
    @rule(how=st.sampled_from(["cut", "empty", "garbage", "gone", "footer"]), seed=st.integers(0, 99))
    def damage_a_part(self, how: str, seed: int) -> None:
        rng = random.Random(seed)
        name = rng.choice(sorted(self.parts()))
        damage(self.parts()[name], how, rng)
        self.damaged.add(name)
        self.seen.pop(name, None)
        # A job that has noted that it is done looks at the names of its parts alone.
        (self.folder / "out" / ".batchjob" / "done.json").unlink(missing_ok=True)

    @precondition(lambda self: self.logs())
    @rule(how=st.sampled_from(["cut", "empty", "garbage", "gone", "byte"]), seed=st.integers(0, 99))
    def damage_a_log(self, how: str, seed: int) -> None:
        rng = random.Random(seed)
        damage(rng.choice(self.logs()), how, rng)

    @precondition(lambda self: (self.folder / "out" / ".batchjob" / "job.json").exists())
    @rule(
        change=st.sampled_from(
            [{"temperature": 0.5}, {"seed": 9}, {"system": "Be brief."}, {"chunk_rows": 9}, {"n": 3}, {"limit": 5}]
        )
    )
    def change_a_setting(self, change: dict[str, Any]) -> None:
        with pytest.raises(batchjob.ConfigMismatchError):
            run_job(self.folder, KIT.FastFs(), **change)

    @precondition(lambda self: (self.folder / "out" / ".batchjob" / "job.json").exists())
    @rule()
    def change_the_input(self) -> None:
        path = self.folder / "in.jsonl"
        good = path.read_bytes()
        path.write_bytes(good.replace(b"row number 3", b"now number 3"))
        with pytest.raises(batchjob.InputMissingError):
            run_job(self.folder, KIT.FastFs())
        path.write_bytes(good)

    # -- what must hold

    @invariant()
    def parts_are_whole_right_and_never_changed(self) -> None:
        for name, path in self.parts().items():
            if name in self.damaged:
                continue
            content = path.read_bytes()
            assert self.seen.setdefault(name, content) == content, f"{name} was changed"
            assert read_part(path) == self.expected[name]
        gone = self.seen.keys() - self.parts().keys()
        assert not gone, f"{gone} vanished"


@contextlib.contextmanager
def crashing(fs: Any) -> Iterator[Any]:
    try:
        yield fs
    except KIT.Crash:
        pass
    finally:
        fs.release()


def damage(path: Path, how: str, rng: random.Random) -> None:
    content = path.read_bytes()
    if how == "gone":
        path.unlink()
    elif how == "cut":
        path.write_bytes(content[: rng.randrange(len(content))] if content else b"")
    elif how == "footer":
        path.write_bytes(content[:-12] + bytes(12))
    elif how == "byte" and content:
        at = rng.randrange(len(content))
        path.write_bytes(content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :])
    else:
        path.write_bytes(b"" if how == "empty" else rng.randbytes(300))


def signal_after(patch: pytest.MonkeyPatch, steps: int) -> None:
    """A SIGTERM before the given step, by the process to itself."""
    import os
    import signal

    from batchjob.engine.fake import FakeRunner

    execute, number = FakeRunner.execute, 0

    def counted(self: FakeRunner, plan: Any) -> Any:
        nonlocal number
        number += 1
        if number == steps + 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return execute(self, plan)

    patch.setattr(FakeRunner, "execute", counted)


@pytest.fixture(scope="module", autouse=True)
def _expected(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("expected")
    write_input(folder / "in.jsonl")
    assert run_job(folder, KIT.FastFs()).job_complete
    JobMachine.expected = {path.name: read_part(path) for path in (folder / "out" / "data").iterdir()}
    assert len(JobMachine.expected) == 5


def test_any_order_of_events() -> None:
    """Fixed seeds: the same orders each time."""
    run_state_machine_as_test(
        JobMachine,
        settings=settings(
            max_examples=15,
            stateful_step_count=10,
            derandomize=True,
            deadline=None,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_any_order_of_many_events() -> None:
    run_state_machine_as_test(
        JobMachine,
        settings=settings(
            max_examples=400, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
