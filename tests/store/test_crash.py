"""Crash or fail the k-th file operation of a small job, for every k; then run it again.

Every row is there exactly once, and no row that was finished before is computed again. By default the ways to crash or
fail share the operations among them, each tried in one way; `-m long` tries every operation in every way.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from batchjob.errors import BatchJobError
from batchjob.store import Store
from batchjob.store.paths import Layout
from batchjob.store.wal import log_name

ROWS, CHUNK_ROWS = 5, 3
METHODS = ("link", "rename_noreplace", "claim")
STATES = [("kept", "cut"), ("lost", "cut"), ("added-lost", "zeroed"), ("kept", "zeroed")]
ERRORS = [(n, p) for n in (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE) for p in (False, True)]
WHOLE = pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.long)], ids=["share", "whole"])


def operations(is_whole: bool, ways: Sequence[Any], way: Any) -> Iterator[int]:
    """The numbers of the operations to try in this one of the ways."""
    return itertools.count() if is_whole else itertools.count(ways.index(way), len(ways))


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The way in which parts are published. All processes of these tests are this one, so that none looks dead: they
    all are."""
    if request.param != "link":
        monkeypatch.setattr("batchjob.store.creation.probe", lambda *_: request.param)
    monkeypatch.setattr("batchjob.store.context.is_alive", lambda _: False)
    return str(request.param)


def crashes(
    kit: Any, tmp_path: Path, plan: Any, make_fs: Any, numbers: Iterable[int]
) -> Iterator[tuple[int, Path, Any, Any]]:
    """Runs the job once per number, until one is beyond its last operation; yields after each crash."""
    for k in numbers:
        output = tmp_path / f"{k}" / "out"
        fs, job = make_fs(k, tmp_path / f"{k}"), kit.Job()
        try:
            job.run(output, plan, fs=fs)
            assert k > 60, "a job has more file operations than that"
            return
        except kit.Crash:
            pass
        finally:
            fs.release()
        yield k, output, fs, job


def check_data_is_readable(kit: Any, output: Path) -> None:
    """Whatever happened, what is in data/ are complete parts."""
    if (output / "data").exists():
        rows = kit.read_data(output)
        assert rows == [kit.expected_row(row["row_index"], 0) for row in rows]


def resume(kit: Any, output: Path, plan: Any, kept: set[tuple[int, int]]) -> None:
    check_data_is_readable(kit, output)
    again = kit.Job()
    store = again.run(output, plan, seed=1)
    kit.check_output(output, plan)
    assert not kept & set(again.computed), "a finished row was computed again"
    assert store.warnings == []
    layout = Layout(output)
    assert not any(any(path.iterdir()) for path in (layout.wal, layout.tmp, layout.claims, layout.quarantine))
    assert sorted(path.name for path in output.iterdir()) == [".batchjob", "data"]


@WHOLE
def test_a_crash_at_any_file_operation_loses_and_doubles_nothing(
    kit: Any, tmp_path: Path, method: str, is_whole: bool
) -> None:
    plan = kit.make_plan(ROWS, CHUNK_ROWS)
    numbers = operations(is_whole, METHODS, method)
    for _, output, _, job in crashes(kit, tmp_path, plan, lambda k, _: kit.FaultyFs(k), numbers):
        resume(kit, output, plan, job.added)


@WHOLE
@pytest.mark.parametrize("state", STATES, ids=" ".join)
def test_a_power_loss_at_any_file_operation_loses_nothing_that_was_flushed(
    kit: Any, tmp_path: Path, state: tuple[str, str], is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchjob.store.context.is_alive", lambda _: False)
    plan = kit.make_plan(ROWS, CHUNK_ROWS)
    names, data = state
    numbers = operations(is_whole, STATES, state)
    for k, output, fs, job in crashes(kit, tmp_path, plan, lambda k, path: kit.PowerFs(k, path / "graveyard"), numbers):
        output.parent.mkdir(exist_ok=True)
        fs.lose_power(names=names, data=data)
        check_data_is_readable(kit, output)
        again = kit.Job()
        again.run(output, plan, seed=1)
        kit.check_output(output, plan)
        assert not job.flushed & set(again.computed), (k, "a flushed row was computed again")


def test_crashes_of_the_resumed_run_do_no_harm_either(kit: Any, tmp_path: Path, method: str) -> None:
    plan = kit.make_plan(ROWS, CHUNK_ROWS)
    for first in range(5, 150, 13):
        output = tmp_path / str(first) / "out"
        added: set[tuple[int, int]] = set()
        for at in (first, 7 + first // 3, 30):
            fs, job = kit.FaultyFs(at), kit.Job()
            try:
                job.run(output, plan, fs=fs, seed=at)
            except kit.Crash:
                pass
            finally:
                fs.release()
            assert not added & set(job.computed)
            added |= job.added
        resume(kit, output, plan, added)


@WHOLE
@pytest.mark.parametrize(("number", "persistent"), ERRORS)
def test_an_error_at_any_file_operation_is_reported_or_overcome(
    kit: Any, tmp_path: Path, number: int, persistent: bool, is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchjob.store.reread.PAUSES", ())
    plan = kit.make_plan(ROWS, CHUNK_ROWS)
    for k in operations(is_whole, ERRORS, (number, persistent)):
        output = tmp_path / str(k) / "out"
        fs, job = kit.FaultyFs(k, error=number, persistent=persistent), kit.Job()
        failure: BatchJobError | None = None
        try:
            job.run(output, plan, fs=fs)
        except BatchJobError as error:
            failure = error
        finally:
            fs.release()
        if failure is not None:
            assert failure.exit_code in ((73, 75) if number == errno.ESTALE else (73, 74))
            assert str(tmp_path) in str(failure), "the message names the path"
        if fs.count <= k:
            break
        check_data_is_readable(kit, output)
        again = kit.Job()
        again.run(output, plan, seed=1)
        kit.check_output(output, plan)
        assert not job.added & set(again.computed)


def test_a_short_write_at_any_place_is_finished(kit: Any, tmp_path: Path) -> None:
    plan = kit.make_plan(ROWS, CHUNK_ROWS)

    class ShortFs(kit.FastFs):  # type: ignore[name-defined, misc]
        num_writes = 0

        def write(self, fd: int, data: bytes | memoryview) -> int:
            self.num_writes += 1
            is_short = self.num_writes == k + 1
            return super().write(fd, bytes(data)[: len(data) // 3] if is_short else data)

    for k in itertools.count():
        fs, job = ShortFs(), kit.Job()
        job.run(tmp_path / str(k), plan, fs=fs)
        kit.check_output(tmp_path / str(k), plan)
        if fs.num_writes <= k:
            assert k > 10
            return


def test_a_crash_while_logs_are_over_the_memory_cap(kit: Any, tmp_path: Path) -> None:
    plan = kit.make_plan(ROWS, CHUNK_ROWS)
    for k in range(40, 160, 7):
        output = tmp_path / str(k) / "out"
        fs, job = kit.FaultyFs(k), kit.Job()
        try:
            job.run(output, plan, fs=fs, memory_limit=0, num_samples=2)
        except kit.Crash:
            pass
        finally:
            fs.release()
        again = kit.Job()
        again.run(output, plan, seed=1, memory_limit=0, num_samples=2)
        kit.check_output(output, plan, num_samples=2)
        assert not job.added & set(again.computed)


def test_a_torn_last_record_costs_that_row_only(kit: Any, tmp_path: Path) -> None:
    """A log cut at every byte of its last record, then resumed twice: rows before it are kept, nothing is glued on."""
    plan = kit.make_plan(4, 4)
    source = tmp_path / "source"
    store = Store.create(source, kit.make_manifest(plan), plan)
    store.start_attempt({})
    chunk = store.open_chunk(0)
    for row in range(3):
        chunk.add(kit.completion(row))
    (log,) = Layout(source).chunk_wal(0).iterdir()
    whole = log.read_bytes()
    start = whole.rindex(b"\n", 0, len(whole) - 1) + 1
    for cut in range(start, len(whole), 3):
        for tail in (b"", b"\0" * 40):
            log.write_bytes(whole[:cut] + tail)
            second = Store.open(source)
            second.start_attempt({})
            chunk = second.open_chunk(0)
            assert set(chunk.finished) == {(0, 0), (1, 0)}
            assert chunk.num_bad == 0
            chunk.add(kit.completion(3))
            second.close()
            third = Store.open(source)
            third.start_attempt({})
            assert set(third.open_chunk(0).finished) == {(0, 0), (1, 0), (3, 0)}
            assert log.read_bytes() == whole[:cut] + tail, "nothing is appended to another attempt's log"
            (Layout(source).chunk_wal(0) / f"{log_name(second.attempt, second.manifest.job_id)}.log").unlink()
