"""A job that is extended: its plan files, races for the next one, damage, and a crash at every file operation."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from batchjob.errors import StorageError
from batchjob.plan import Chunk, InputFile, JobPlan, Segment
from batchjob.store import Store
from batchjob.store.paths import Layout

METHODS = ("link", "rename_noreplace", "claim")


def extension_of(plan: JobPlan, num_rows: int, chunk_rows: int = 3) -> JobPlan:
    first_row, first_chunk, file_index = plan.num_rows, len(plan.chunks), len(plan.files)
    chunks = tuple(
        Chunk(first_chunk + number, first_row + row, size, (Segment(file_index, row, size),))
        for number, row in enumerate(range(0, num_rows, chunk_rows))
        if (size := min(chunk_rows, num_rows - row))
    )
    file = InputFile(f"/data/more-{file_index}.jsonl", "jsonl", "", 12, 34, num_rows, "digest")
    return JobPlan((file,), chunks, plan.columns, plan.arrow_schema)


@pytest.fixture
def plan(kit: Any) -> JobPlan:
    return kit.make_plan(5, 3)


@pytest.fixture
def store(kit: Any, output: Path, plan: JobPlan) -> Store:
    kit.Job().run(output, plan)
    return Store.open(output, fs=kit.FastFs())


def test_the_plan_holds_the_new_files_behind_the_old(kit: Any, output: Path, plan: JobPlan, store: Store) -> None:
    assert store.done() is not None
    new = extension_of(plan, 4)
    assert store.extend(new)
    assert store.plan.files == plan.files + new.files
    assert store.plan.chunks == plan.chunks + new.chunks
    assert (store.plan.num_rows, store.plan.num_extensions) == (9, 1)
    assert store.extend(extension_of(store.plan, 2))
    again = Store.open(output)
    assert again.plan == store.plan
    assert again.done() is None, "the first done.json is not that of the extended job"
    again.start_attempt({})
    for index in (2, 3, 4):
        kit.finish_chunk(again, index)
    again.finish()
    kit.check_output(output, again.plan)
    done = Store.open(output).done()
    assert done is not None
    assert (done["num_parts"], done["num_rows"]) == (5, 11)


def test_the_first_of_two_wins_and_the_other_learns_of_it(kit: Any, output: Path, plan: JobPlan, store: Store) -> None:
    other = Store.open(output, fs=kit.FastFs())
    assert store.extend(extension_of(plan, 4))
    assert not other.extend(extension_of(plan, 2))
    assert other.plan == store.plan


def test_a_race_for_the_name_is_lost_in_peace(kit: Any, output: Path, plan: JobPlan, store: Store) -> None:
    """The other process is faster between our look at the plan and our link."""

    def before(name: str, *args: Any) -> None:
        if name == "link" and str(args[1]).endswith("00001.arrow"):
            fs.before = None
            assert Store.open(output).extend(extension_of(plan, 4))

    fs = kit.FaultyFs(before=before)
    ours = Store.open(output, fs=fs)
    assert not ours.extend(extension_of(plan, 2))
    assert ours.plan == Store.open(output).plan
    assert ours.plan.num_rows == 9


def test_an_extension_that_does_not_follow_is_a_bug_of_the_caller(plan: JobPlan, store: Store) -> None:
    with pytest.raises(ValueError, match="follows row 5"):
        store.extend(extension_of(store.plan.__class__(plan.files, plan.chunks[:1], plan.columns, b""), 2))


@pytest.mark.parametrize("how", ["cut", "flipped", "of another job"])
def test_a_damaged_extension_is_told(
    kit: Any, output: Path, plan: JobPlan, store: Store, how: str, tmp_path: Path
) -> None:
    store.extend(extension_of(plan, 4))
    path = Layout(output).extension(1)
    data = path.read_bytes()
    if how == "cut":
        path.write_bytes(data[:-20])
    elif how == "flipped":
        path.write_bytes(data.replace(b"more-1", b"more-2"))  # Arrow keeps the schema in two places
    else:
        kit.Job().run(tmp_path / "other", kit.make_plan(5, 3, kinds={"question": "string", "extra": "string"}))
        other = Store.open(tmp_path / "other")
        other.extend(extension_of(other.plan, 4))
        path.write_bytes(Layout(tmp_path / "other").extension(1).read_bytes())
    with pytest.raises(StorageError, match=r"00001\.arrow is damaged"):
        Store.open(output)


def test_a_process_that_does_not_know_of_an_extension_is_not_confused(kit: Any, output: Path, plan: JobPlan) -> None:
    kit.Job().run(output, plan)
    old = Store.open(output)
    new = Store.open(output)
    new.extend(extension_of(plan, 2))
    new.start_attempt({})
    kit.finish_chunk(new, 2)
    assert old.committed() == {0, 1}
    old.finish()  # writes what is true of the job that it knows
    assert old.warnings == []
    assert Store.open(output).done() is None
    assert new.finish()["num_rows"] == 7


@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.long)], ids=["share", "whole"])
@pytest.mark.parametrize("method", METHODS)
def test_a_crash_at_any_file_operation_of_an_extension(
    kit: Any, tmp_path: Path, plan: JobPlan, method: str, is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default each operation is tried with one of the methods, in the long form with all of them."""
    if method != "link":
        monkeypatch.setattr("batchjob.store.creation.probe", lambda *_: method)
    monkeypatch.setattr("batchjob.store.context.is_alive", lambda _: False)
    for k in itertools.count() if is_whole else itertools.count(METHODS.index(method), len(METHODS)):
        output = tmp_path / str(k) / "out"
        kit.Job().run(output, plan)
        fs = kit.FaultyFs(k)
        try:
            Store.open(output, fs=fs).extend(extension_of(plan, 4))
            assert k > 15, "it has more file operations than that"
            break
        except kit.Crash:
            pass
        finally:
            fs.release()
        again = Store.open(output)
        if not again.plan.num_extensions:
            assert again.extend(extension_of(again.plan, 4))
        again.start_attempt({})
        for index in (2, 3):
            kit.finish_chunk(again, index)
        again.finish()
        kit.check_output(output, again.plan)
        layout = Layout(output)
        assert not any(any(path.iterdir()) for path in (layout.wal, layout.tmp, layout.quarantine))
