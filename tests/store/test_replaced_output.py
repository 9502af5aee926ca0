"""A job's output is deleted or replaced under it, or holds links that lead elsewhere: nothing of it gets there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from batchjob.errors import BatchJobError, OutputCreateError, StorageError
from batchjob.store import FsOps, Store
from batchjob.store.context import StoreContext
from batchjob.store.paths import Layout


def begin(kit: Any, output: Path, plan: Any) -> Store:
    store = Store.create(output, kit.make_manifest(plan), plan, fs=kit.FastFs())
    store.start_attempt({})
    return store


def snapshot(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


ACTS: dict[str, Callable[[Any, Store, Any, Any], object]] = {
    "append to an open log": lambda kit, store, chunk, other: chunk.add(kit.completion(1)),
    "make a log": lambda kit, store, chunk, other: other.add(kit.completion(3)),
    "commit": lambda kit, store, chunk, other: chunk.commit(kit.carried(chunk.chunk)),
    "note": lambda kit, store, chunk, other: store.note_attempt({"beats": 1}),
    "lease": lambda kit, store, chunk, other: store.lease((0, 1)).acquire(),
    "claim": lambda kit, store, chunk, other: store.chunk_claims().take(1),
    "finish": lambda kit, store, chunk, other: store.finish(),
    "start": lambda kit, store, chunk, other: store.start_attempt({}),
}


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("checked", [True, False], ids=["checked", "between check and use"])
def test_a_deleted_job_leaves_nothing_in_the_one_begun_in_its_place(
    kit: Any, output: Path, act: str, checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = kit.make_plan(6, 3)
    old = begin(kit, output, plan)
    chunk, other = old.open_chunk(0), old.open_chunk(1)
    for row in range(3) if act == "commit" else (0,):
        chunk.add(kit.completion(row))
    inode = os.stat(output / ".batchjob").st_ino
    shutil.rmtree(output)
    new = begin(kit, output, plan)
    new.open_chunk(0).add(kit.completion(2))
    before = snapshot(output)
    if not checked:
        monkeypatch.setattr(StoreContext, "check_place", lambda self: None)
    with suppress(BatchJobError):
        ACTS[act](kit, old, chunk, other)
    assert snapshot(output) == before, f"the state directory has inode {inode}, and had"
    monkeypatch.undo()
    new.close()
    kit.Job().run(output, plan)
    kit.check_output(output, plan)


@pytest.mark.parametrize("act", ["make a log", "commit"])
def test_the_old_process_is_told(kit: Any, output: Path, act: str) -> None:
    plan = kit.make_plan(6, 3)
    old = begin(kit, output, plan)
    chunk, other = old.open_chunk(0), old.open_chunk(1)
    for row in range(3):
        chunk.add(kit.completion(row))
    shutil.rmtree(output)
    with pytest.raises(StorageError, match="moved or deleted"):
        ACTS[act](kit, old, chunk, other)
    begin(kit, output, plan)
    with pytest.raises(StorageError, match="replaced by the output of another job"):
        ACTS[act](kit, old, chunk, other)


def test_logs_of_another_job_are_passed_over_with_a_warning(kit: Any, output: Path) -> None:
    plan = kit.make_plan(6, 3)
    store = begin(kit, output, plan)
    store.open_chunk(0).add(kit.completion(0))
    [log] = Layout(output).chunk_wal(0).iterdir()
    log.rename(log.with_name(log.name.replace(store.manifest.job_id, "0" * 32)))
    again = begin(kit, output, plan)
    assert len(again.open_chunk(0).finished) == 0
    assert again.warnings == ["1 logs of chunk 0 are of another job and were passed over."]


def test_logs_without_a_name_of_a_job_are_those_of_earlier_versions(kit: Any, output: Path) -> None:
    plan = kit.make_plan(6, 3)
    store = begin(kit, output, plan)
    store.open_chunk(0).add(kit.completion(0))
    [log] = Layout(output).chunk_wal(0).iterdir()
    log.rename(log.with_name(log.name.replace(f".job-{store.manifest.job_id}", "")))
    assert set(begin(kit, output, plan).open_chunk(0).finished) == {(0, 0)}


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A directory that a planted link leads to."""
    victim = tmp_path / "victim"
    (victim / "inner").mkdir(parents=True)
    (victim / "precious").write_text("kept")
    (victim / "inner" / "part-00000000.parquet").write_text("kept")
    return victim


@pytest.mark.parametrize(
    "place",
    [
        ".batchjob/claims/00000000",
        ".batchjob/claims/00000000.someone",
        ".batchjob/wal/00000000",
        ".batchjob/wal/00000001",
        ".batchjob/tmp/00000000.someone",
        ".batchjob/quarantine/x",
        ".batchjob/leases/0-of-1.json",
        ".batchjob.new-x",
    ],
)
def test_a_planted_link_leads_no_removal_and_no_write_elsewhere(
    kit: Any, output: Path, victim: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchjob.store.context.is_alive", lambda _: False)
    plan = kit.make_plan(6, 3)
    store = begin(kit, output, plan)
    kit.finish_chunk(store, 0)
    store.close()
    (output / place).symlink_to(victim)
    before = snapshot(victim)
    with suppress(StorageError):
        kit.Job().run(output, plan)
    assert snapshot(victim) == before
    (output / place).unlink(missing_ok=True)
    kit.Job().run(output, plan)
    kit.check_output(output, plan)


@pytest.mark.parametrize("name", ["claims", "wal", "tmp", "attempts", "leases", "quarantine", "plan"])
def test_a_state_directory_that_is_a_link_is_refused(kit: Any, output: Path, victim: Path, name: str) -> None:
    plan = kit.make_plan(6, 3)
    begin(kit, output, plan).close()
    shutil.rmtree(output / ".batchjob" / name)
    (output / ".batchjob" / name).symlink_to(victim)
    before = snapshot(victim)
    with pytest.raises((StorageError, OutputCreateError), match=r"symbolic link"):
        kit.Job().run(output, plan)
    assert snapshot(victim) == before


def test_a_state_that_is_a_link_is_refused_and_one_of_the_user_is_not(kit: Any, output: Path, tmp_path: Path) -> None:
    plan = kit.make_plan(6, 3)
    real = tmp_path / "real"
    (real / "parts").mkdir(parents=True)
    (real / "data").symlink_to(real / "parts")
    output.symlink_to(real)
    kit.Job().run(output, plan)
    kit.check_output(output, plan)
    (real / ".batchjob").rename(real / "state")
    (real / ".batchjob").symlink_to(real / "state")
    with pytest.raises(OutputCreateError, match="symbolic link"):
        Store.open(output)


def test_directories_that_a_copy_has_dropped_because_they_were_empty_are_made_again(kit: Any, output: Path) -> None:
    plan = kit.make_plan(6, 3)
    store = begin(kit, output, plan)
    store.open_chunk(1).add(kit.completion(4))
    store.close()
    for path in (*Layout(output).directories, Layout(output).data):
        if not any(path.iterdir()):
            path.rmdir()
    assert not (output / "data").exists()
    kit.Job().run(output, plan)
    kit.check_output(output, plan)


def test_a_tree_is_removed_with_the_links_in_it_and_not_what_they_lead_to(victim: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "link").symlink_to(victim)
    before = snapshot(victim)
    for anchored in (False, True):
        fs = FsOps()
        if anchored:
            fs.anchor(tmp_path)
            tree.mkdir()
            (tree / "link").symlink_to(victim)
        fs.remove_tree(tree)
        assert not tree.exists()
    (tmp_path / "tree").symlink_to(victim)
    FsOps().remove_tree(tmp_path / "tree")
    assert not tree.is_symlink()
    assert snapshot(victim) == before


def test_a_copy_without_empty_directories_of_a_job_that_has_only_its_end_left_is_finished(
    kit: Any, output: Path
) -> None:
    plan = kit.make_plan(3, 3)
    store = begin(kit, output, plan)
    kit.finish_chunk(store, 0)
    store.close()
    for path in Layout(output).directories:
        if not any(path.iterdir()):
            path.rmdir()
    again = Store.open(output)
    again.committed()
    assert again.finish()["num_parts"] == 1
