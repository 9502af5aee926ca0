"""The store as the job sees it: open, add, flush, commit, resume."""

from __future__ import annotations

import errno
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from batchjob.errors import ConfigMismatchError, InputMissingError, OutputCreateError, StorageError, UsageError
from batchjob.records import Completion
from batchjob.store import FsOps, RowCounts, Store
from batchjob.store.attempts import attempt_record
from batchjob.store.columns import OutputColumns
from batchjob.store.commit import PartTables
from batchjob.store.disk_errors import storage_error
from batchjob.store.parts import BadPartError
from batchjob.store.paths import Layout
from batchjob.store.wal import log_name


def log_of(store: Store) -> str:
    """The name of a store's logs, without number and ending."""
    return log_name(store.attempt, store.manifest.job_id)


def started(kit: Any, output: Path, plan: Any, *, num_samples: int = 1, **options: Any) -> Store:
    options = {"fs": kit.FastFs(), **options}
    store = Store.create(output, kit.make_manifest(plan, num_samples=num_samples), plan, **options)
    store.start_attempt({})
    return store


def test_a_job_from_start_to_end(kit: Any, output: Path) -> None:
    plan = kit.make_plan(23, 5)
    assert not Store.exists(output)
    store = kit.Job().run(output, plan)
    assert Store.exists(output)
    kit.check_output(output, plan)
    assert store.counts() == RowCounts(
        num_ok=20,
        num_error=3,
        num_prompt_tokens=sum(kit.completion(row).num_prompt_tokens for row in range(23)),
        num_output_tokens=60,
        errors={"prompt_too_long": 3},
    )
    again = Store.open(output)
    assert again.done() == store.done()
    assert again.plan == plan
    assert again.manifest == store.manifest
    assert os.listdir(output / ".batchjob" / "wal") == []
    assert os.listdir(output / ".batchjob" / "tmp") == []


def test_nothing_under_the_state_directory_looks_like_data(kit: Any, output: Path) -> None:
    kit.Job().run(output, kit.make_plan(10, 5))
    for _, _, names in os.walk(output / ".batchjob"):
        assert not [name for name in names if name.endswith(".parquet")]


def test_the_first_creator_wins(kit: Any, output: Path) -> None:
    first = Store.create(output, kit.make_manifest(kit.make_plan(10, 5)), kit.make_plan(10, 5))
    other = kit.make_manifest(kit.make_plan(10, 2), fingerprint={"model": "other"})
    second = Store.create(output, other, kit.make_plan(10, 2))
    assert second.manifest == first.manifest
    assert second.plan == first.plan
    assert second.attempt != first.attempt
    assert second.manifest.diff(other) == ['model: "m" → "other"', "sampling.temperature: 0.0 → (not set)"]
    assert sorted(os.listdir(output)) == [".batchjob", "data"]


def test_opening_what_is_no_output_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no output directory"):
        Store.open(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="no output directory"):
        Store.open(tmp_path / "file")
    assert not Store.exists(tmp_path / "file")


def test_an_output_that_cannot_be_made(kit: Any, tmp_path: Path) -> None:
    plan = kit.make_plan(3, 3)
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputCreateError, match="choose another --output"):
        Store.create(tmp_path / "file", kit.make_manifest(plan), plan)
    (tmp_path / "used" / ".batchjob").mkdir(parents=True)
    (tmp_path / "used" / ".batchjob" / "something").write_text("x")
    with pytest.raises(OutputCreateError, match=r"no job\.json"):
        Store.create(tmp_path / "used", kit.make_manifest(plan), plan)
    assert sorted(os.listdir(tmp_path / "used")) == [".batchjob", "data"]


@pytest.mark.parametrize("operation", ["mkdir", "create", "rename"])
def test_a_read_only_file_system_is_told_before_any_work(kit: Any, output: Path, operation: str) -> None:
    plan = kit.make_plan(3, 3)
    fs = kit.FaultyFs(0, error=errno.EROFS, persistent=True, only=[operation])
    with pytest.raises(OutputCreateError, match="Read-only file system"):
        Store.create(output, kit.make_manifest(plan), plan, fs=fs)


def test_a_start_on_a_directory_that_became_read_only(kit: Any, output: Path) -> None:
    plan = kit.make_plan(3, 3)
    Store.create(output, kit.make_manifest(plan), plan)
    store = Store.open(output, fs=kit.FaultyFs(0, error=errno.EROFS, persistent=True, only=["create"]))
    with pytest.raises(OutputCreateError, match="Read-only file system"):
        store.start_attempt({})


def test_parts_without_their_state_are_not_mixed_with_a_new_job(kit: Any, output: Path) -> None:
    plan = kit.make_plan(4, 2)
    kit.Job().run(output, plan)
    FsOps().remove_tree(output / ".batchjob")
    with pytest.raises(OutputCreateError, match="cannot be resumed"):
        Store.create(output, kit.make_manifest(plan), plan)
    assert len(kit.read_data(output)) == 4


def test_a_newer_format_is_refused(kit: Any, output: Path) -> None:
    plan = kit.make_plan(3, 3)
    Store.create(output, kit.make_manifest(plan), plan)
    path = Layout(output).manifest
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 99}))
    with pytest.raises(ConfigMismatchError, match="format 99"):
        Store.open(output)


def test_damaged_state_is_told_apart(kit: Any, output: Path) -> None:
    plan = kit.make_plan(3, 3)
    Store.create(output, kit.make_manifest(plan), plan)
    layout = Layout(output)
    good = layout.plan.read_bytes()
    layout.plan.write_bytes(good[:-3] + b"xxx")
    with pytest.raises(StorageError, match="checksum"):
        Store.open(output)
    layout.plan.write_bytes(good)
    layout.manifest.write_text('{"format_version": 1}')
    with pytest.raises(StorageError, match="damaged"):
        Store.open(output)


# -- rows


def test_an_added_row_survives_without_flush_or_close(kit: Any, output: Path) -> None:
    plan = kit.make_plan(6, 3)
    store = started(kit, output, plan)
    chunk = store.open_chunk(1)
    assert chunk.add(kit.completion(4))
    assert not chunk.add(kit.completion(4)), "the second is not written"
    assert (4, 0) in chunk.finished
    assert (3, 0) not in chunk.finished
    # Another process, while the first still lives:
    other = started(kit, output, plan).open_chunk(1)
    assert set(other.finished) == {(4, 0)}
    assert (other.num_replayed, other.num_bad, other.num_torn) == (1, 0, 0)
    assert other.complete_rows() == {4}
    assert other.counts == chunk.counts == RowCounts(1, 0, 7, 3)
    assert not other.is_complete()


def test_only_rows_of_the_chunk_are_taken(kit: Any, output: Path) -> None:
    chunk = started(kit, output, kit.make_plan(6, 3)).open_chunk(1)
    for row, sample in ((2, 0), (6, 0), (3, 1), (3, -1)):
        with pytest.raises(ValueError, match="is not one of chunk 1"):
            chunk.add(kit.completion(row, sample))
    with pytest.raises(ValueError, match="0 of 3"):
        chunk.commit(kit.carried(chunk.chunk))


def test_a_row_with_samples_is_complete_after_all_of_them(kit: Any, output: Path) -> None:
    plan = kit.make_plan(2, 2)
    store = started(kit, output, plan, num_samples=2)
    chunk = store.open_chunk(0)
    chunk.expect(1, 3)
    chunk.expect(0, 2)
    chunk.add(kit.completion(1, 2))
    chunk.add(kit.completion(0, 1))
    assert chunk.complete_rows() == set()
    chunk.add(kit.completion(0, 0))
    assert chunk.complete_rows() == {0}
    # After a restart the logs know that row 1 has three samples.
    chunk = started(kit, output, plan, num_samples=2).open_chunk(0)
    assert chunk.complete_rows() == {0}
    with pytest.raises(InputMissingError, match="asks for 1 samples, an earlier run for 3"):
        chunk.expect(1, 1)
    with pytest.raises(InputMissingError, match="asks for 5 samples, an earlier run for 2"):
        chunk.expect(0, 5)
    chunk.expect(1, 3)
    chunk.add(kit.completion(1, 0))
    assert not chunk.is_complete()
    chunk.add(kit.completion(1, 1))
    assert chunk.is_complete()
    chunk.commit(kit.carried(chunk.chunk))
    assert kit.read_data(output) == [
        kit.expected_row(row, sample) for row, sample in ((0, 0), (0, 1), (1, 0), (1, 1), (1, 2))
    ]
    assert kit.read_whole(Layout(output).part(0), store.manifest)[1] == kit.read_data(output)


def test_records_of_a_log_that_make_no_sense_are_not_taken(kit: Any, output: Path) -> None:
    from batchjob.store.wal import frame

    plan = kit.make_plan(4, 2)
    store = started(kit, output, plan)
    chunk = store.open_chunk(1)
    chunk.add(kit.completion(2))
    good = {"row": 3, "sample": 0, "of": 1, "prompt_tokens": 1, "output_tokens": 1, "finish": "stop", "text": "x"}
    bad = [
        {**good, "row": 1},  # of another chunk
        {**good, "row": 4},
        {**good, "row": "3"},
        {**good, "sample": 1},
        {**good, "of": 0},
        {**good, "row": 2, "sample": 1, "of": 2},  # the row has one sample
        {**good, "text": 5},
        {**good, "error": "no"},
        {**good, "error": ["engine_error", 5]},
        {key: value for key, value in good.items() if key != "finish"},
        {key: value for key, value in good.items() if key != "text"},
    ]
    log = Layout(output).chunk_wal(1) / "z.log"
    log.write_bytes(b"".join(frame(json.dumps(record).encode()) for record in bad) + b"half a rec")
    store = started(kit, output, plan)
    chunk = store.open_chunk(1)
    assert set(chunk.finished) == {(2, 0)}
    assert (chunk.num_bad, chunk.num_torn) == (len(bad), 1)
    assert store.warnings == [
        f"{len(bad)} damaged records in the logs of chunk 1 were passed over; their rows are computed again."
    ]


def test_rows_past_the_memory_cap_are_read_back_from_their_logs(kit: Any, output: Path) -> None:
    plan = kit.make_plan(40, 40)
    store = started(kit, output, plan, memory_limit=400)
    chunk = store.open_chunk(0)
    for row in (30, 2, 17, 5, 39, 8):
        chunk.add(kit.completion(row))
    store.close()
    store = started(kit, output, plan, memory_limit=400)
    chunk = store.open_chunk(0)
    assert chunk.num_replayed == 6
    for row in range(40):
        chunk.add(kit.completion(row))
    chunk.commit(kit.carried(chunk.chunk))
    kit.check_output(output, plan)


def test_a_record_that_changed_on_disk_is_not_committed(kit: Any, output: Path) -> None:
    store = started(kit, output, kit.make_plan(3, 3), memory_limit=0)
    chunk = store.open_chunk(0)
    for row in range(3):
        chunk.add(kit.completion(row))
    (log,) = Layout(output).chunk_wal(0).iterdir()
    log.write_bytes(log.read_bytes().replace(b"answer 1", b"answer 7"))
    with pytest.raises(StorageError, match="is damaged"):
        chunk.commit(kit.carried(chunk.chunk))
    # The next start drops the record and computes the row again.
    assert set(started(kit, output, kit.make_plan(3, 3)).open_chunk(0).finished) == {(0, 0), (2, 0)}


def test_large_chunks_become_several_row_groups(kit: Any, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchjob.store.rows._GROUP_ROWS", 7)
    plan = kit.make_plan(20, 20)
    store = started(kit, output, plan, num_samples=3)
    kit.finish_chunk(store, 0)
    kit.check_output(output, plan, num_samples=3)
    assert pq.read_metadata(Layout(output).part(0)).num_row_groups == 9


def test_token_ids_are_kept_if_asked_for(kit: Any, output: Path) -> None:
    plan = kit.make_plan(4, 4)
    store = Store.create(output, kit.make_manifest(plan, columns=OutputColumns(["output_token_ids"])), plan)
    store.start_attempt({})
    kit.finish_chunk(store, 0)
    assert [row["output_token_ids"] for row in kit.read_data(output)] == [
        kit.completion(row).token_ids for row in range(4)
    ]
    assert kit.read_whole(Layout(output).part(0), store.manifest)[1] == kit.read_data(output)


def test_text_that_utf8_cannot_hold_does_not_stop_a_commit(kit: Any, output: Path) -> None:
    store = started(kit, output, kit.make_plan(1, 1))
    chunk = store.open_chunk(0)
    chunk.add(Completion(0, 0, 1, [1], "a\ud800b\0c\r\n", "stop"))
    chunk.commit(kit.carried(chunk.chunk))
    assert kit.read_data(output)[0]["output"] == "a\ufffdb\0c\r\n"


# -- parts


def test_a_part_says_what_it_is(kit: Any, output: Path) -> None:
    plan = kit.make_plan(10, 4)
    store = started(kit, output, plan)
    committed = kit.finish_chunk(store, 1)
    assert (committed.chunk_index, committed.num_rows, committed.won) == (1, 4, True)
    assert committed.counts.num_rows == 4
    path = Layout(output).part(1)
    info, _ = kit.read_whole(path, store.manifest)
    assert (info.job_id, info.fingerprint) == (store.manifest.job_id, store.manifest.fingerprint_digest)
    assert (info.chunk_index, info.row_index, info.num_rows) == (1, 4, 4)
    assert info.counts == committed.counts
    assert info.attempt == store.attempt
    assert pq.read_schema(path).remove_metadata() == store.manifest.arrow_schema.remove_metadata()
    assert pq.read_schema(path).field("extra").metadata == {b"batchjob.json": b"true"}
    part = pq.ParquetFile(path, page_checksum_verification=True)
    assert part.read().num_rows == 4


def test_carried_columns_must_be_those_of_the_plan(kit: Any, output: Path) -> None:
    store = started(kit, output, kit.make_plan(3, 3))
    chunk = store.open_chunk(0)
    for row in range(3):
        chunk.add(kit.completion(row))
    table = kit.carried(chunk.chunk)
    with pytest.raises(ValueError, match="has 3 rows, its carried columns 2"):
        chunk.commit(table.slice(1))
    with pytest.raises(ValueError, match="'extra' is of type int64"):
        chunk.commit(table.set_column(1, "extra", pa.array([1, 2, 3])))
    assert chunk.commit(table).won


def test_carried_columns_past_2_gib_are_taken_with_any_number_of_samples(kit: Any) -> None:
    plan = kit.make_plan(40, 40)
    text = pa.array(["x" * (64 << 20)])
    table = pa.table([pa.chunked_array([text] * 40)] * 2, schema=kit.CARRIED)  # 5 GiB, on 64 MiB of memory
    tables = PartTables(kit.make_manifest(plan).arrow_schema, OutputColumns(), plan.chunks[0], table)
    rows = [row for row in range(40) for _ in range(2)]
    column = tables._carried_of(rows)["question"]
    assert len(column) == 80
    assert pc.binary_length(column).unique().to_pylist() == [64 << 20]
    small = kit.carried(plan.chunks[0])
    tables = PartTables(kit.make_manifest(plan).arrow_schema, OutputColumns(), plan.chunks[0], small)
    assert tables._carried_of(rows[3:])["question"].to_pylist() == [f"q{row}" for row in rows[3:]]


def test_the_second_of_two_commits_gives_way(kit: Any, output: Path) -> None:
    plan = kit.make_plan(6, 3)
    first, second = started(kit, output, plan), started(kit, output, plan)
    slow = second.open_chunk(0)
    for row in range(3):
        slow.add(Completion(row, 0, 1, [1, 1], "other text", "stop"))
    assert kit.finish_chunk(first, 0).won
    part = Layout(output).part(0)
    before = (part.read_bytes(), part.stat().st_ino)
    committed = slow.commit(kit.carried(slow.chunk))
    assert not committed.won
    assert committed.counts == first.counts(), "the counts are those of the part that stands"
    assert second.counts() == first.counts()
    assert (part.read_bytes(), part.stat().st_ino) == before
    assert os.listdir(Layout(output).tmp) == []
    assert os.listdir(Layout(output).wal) == []


@pytest.mark.parametrize("method", ["link", "rename_noreplace", "claim"])
def test_losing_at_the_very_last_moment(kit: Any, output: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchjob.store.creation.probe", lambda *_: method)
    plan = kit.make_plan(3, 3)
    first = started(kit, output, plan)
    operation = "rename" if method == "claim" else method

    def overtake(name: str, *args: Any) -> None:
        if name == operation and args[1].parent.name in ("data", "claims"):
            fs.before = None
            assert kit.finish_chunk(first, 0).won

    fs = kit.FaultyFs(before=overtake)
    second = Store.open(output, fs=fs)
    second.start_attempt({})
    assert not kit.finish_chunk(second, 0).won
    assert fs.before is None
    kit.check_output(output, plan)
    assert os.listdir(Layout(output).tmp) == []
    assert os.listdir(Layout(output).claims) == []


def test_a_link_whose_reply_was_lost_counts_as_won(kit: Any, output: Path) -> None:
    plan = kit.make_plan(3, 3)

    class LostReply(FsOps):
        def link(self, source: Path, target: Path) -> None:
            super().link(source, target)
            if target.parent.name == "data":
                raise FileExistsError(errno.EEXIST, "File exists", str(target))

    store = started(kit, output, plan, fs=LostReply())
    assert kit.finish_chunk(store, 0).won
    kit.check_output(output, plan)


def test_a_winner_that_cannot_be_seen_yet_is_waited_for(kit: Any, output: Path) -> None:
    plan = kit.make_plan(3, 3)
    first = started(kit, output, plan)
    hidden = [3]

    class Stale(FsOps):
        """Another machine's caches: the new name is taken, but cannot be opened for a while."""

        def stat(self, path: Path) -> os.stat_result:
            if path.parent.name == "data":
                raise FileNotFoundError(errno.ENOENT, "No such file", str(path))
            return super().stat(path)

        def open_read(self, path: Path) -> Any:
            if path.parent.name == "data" and hidden[0]:
                hidden[0] -= 1
                raise FileNotFoundError(errno.ENOENT, "No such file", str(path))
            return super().open_read(path)

    second = Store.open(output, fs=Stale())
    second.start_attempt({})
    slow = second.open_chunk(0)
    for row in range(3):
        slow.add(kit.completion(row))
    assert kit.finish_chunk(first, 0).won
    assert not slow.commit(kit.carried(slow.chunk)).won
    assert hidden == [0]


def test_a_file_of_another_job_under_the_name_of_a_part_is_an_error(kit: Any, output: Path, tmp_path: Path) -> None:
    plan = kit.make_plan(3, 3)
    kit.Job().run(tmp_path / "other", plan)
    store = started(kit, output, plan)
    chunk = store.open_chunk(0)
    for row in range(3):
        chunk.add(kit.completion(row))
    os.link(Layout(tmp_path / "other").part(0), Layout(output).part(0))
    with pytest.raises(StorageError, match="it belongs to another job"):
        chunk.commit(kit.carried(chunk.chunk))
    # The next start moves the file away and commits the finished rows from the log.
    job = kit.Job()
    job.run(output, plan)
    assert job.computed == []
    kit.check_output(output, plan)


# -- what is found at a start


def damage_truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def damage_empty(path: Path) -> None:
    os.truncate(path, 0)


def damage_footer(path: Path) -> None:
    data = bytearray(path.read_bytes())
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    data[start : start + 40] = bytes(40)
    path.write_bytes(bytes(data))


def damage_rows(path: Path) -> None:
    table = pq.read_table(path)
    pq.write_table(table.slice(1), path)


def damage_foreign(path: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), path)


@pytest.mark.parametrize("damage", [damage_truncate, damage_empty, damage_footer, damage_rows, damage_foreign])
def test_a_bad_part_is_moved_away_and_computed_again(kit: Any, output: Path, damage: Any) -> None:
    plan = kit.make_plan(9, 3)
    kit.Job().run(output, plan)
    part = Layout(output).part(1)
    copy = part.read_bytes()
    part.unlink()
    part.write_bytes(copy)
    damage(part)
    store = started(kit, output, plan)
    assert store.committed() == {0, 2}
    assert len(store.warnings) == 1
    assert str(part) in store.warnings[0]
    assert len(os.listdir(Layout(output).quarantine)) == 1
    job = kit.Job()
    job.run(output, plan)
    assert sorted(job.computed) == [(3, 0), (4, 0), (5, 0)]
    kit.check_output(output, plan)


def test_no_flipped_byte_of_a_part_goes_unnoticed(kit: Any, output: Path) -> None:
    """The footer check or the full read sees it; what neither sees must not have changed a value."""
    plan = kit.make_plan(3, 3)
    store = kit.Job().run(output, plan)
    path = Layout(output).part(0)
    whole = path.read_bytes()
    rows = pq.read_table(path).to_pylist()
    copy = output.parent / "copy"
    seen = 0
    for position in range(0, len(whole), 5):
        damaged = bytearray(whole)
        damaged[position] ^= 0x10
        copy.write_bytes(bytes(damaged))
        try:
            _, found = kit.read_whole(copy, store.manifest)
        except (BadPartError, ConfigMismatchError):
            seen += 1
        else:
            assert found == rows, position
    assert seen > len(whole) / 5 / 2


def test_a_good_part_that_took_a_bad_ones_place_is_put_back(kit: Any, output: Path) -> None:
    """Two processes find the same bad part; the slower one must not move the faster one's new part away for good."""
    plan = kit.make_plan(3, 3)
    kit.Job().run(output, plan)
    part = Layout(output).part(0)
    good = part.read_bytes()
    part.unlink()
    part.write_bytes(b"bad")

    def replace(name: str, *args: Any) -> None:
        if name == "rename" and args[0] == part:
            fs.before = None
            part.write_bytes(good)

    fs = kit.FaultyFs(before=replace)
    store = Store.open(output, fs=fs)
    assert store.committed() == {0}
    assert fs.before is None
    assert store.warnings == []
    kit.check_output(output, plan)


def test_foreign_files_are_reported_and_left_alone(kit: Any, output: Path) -> None:
    plan = kit.make_plan(3, 3)
    kit.Job().run(output, plan)
    for name in ("README.md", "part-1.parquet", "part-00000007.parquet", ".nfs0001"):
        (output / "data" / name).write_text("x")
    store = started(kit, output, plan)
    assert store.committed() == {0}
    assert store.committed() == {0}
    assert len(store.warnings) == 3
    assert store.done() is not None
    assert len(os.listdir(output / "data")) == 5


def test_a_job_is_not_done_while_a_part_is_missing(kit: Any, output: Path) -> None:
    plan = kit.make_plan(6, 3)
    store = kit.Job().run(output, plan)
    Layout(output).part(1).unlink()
    assert store.done() is None
    with pytest.raises(StorageError, match="1 of 2 parts are missing or damaged"):
        store.finish()
    assert store.committed() == {0}


def test_a_plan_without_rows_gives_one_empty_part(kit: Any, output: Path) -> None:
    plan = kit.make_plan(0, 3)
    store = kit.Job().run(output, plan)
    kit.check_output(output, plan)
    table = pq.read_table(output / "data")
    assert (table.num_rows, table.column_names) == (0, store.manifest.arrow_schema.names)
    assert Store.open(output).done() is not None
    assert not store.commit_empty().won


def test_temporary_files_go_only_with_an_attempt_that_is_known_to_be_dead(kit: Any, output: Path) -> None:
    plan = kit.make_plan(3, 3)
    living = started(kit, output, plan)
    layout = Layout(output)
    identity = json.loads(attempt_record({}))
    gone = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True
    )
    others = {
        "dead": {**identity, "pid": int(gone.stdout)},
        "reused": {**identity, "pid_start": "1"},
        "elsewhere": {**identity, "host": "elsewhere", "pid": int(gone.stdout)},
        "otherboot": {**identity, "boot_id": "x", "pid": int(gone.stdout)},
        "container": {**identity, "pid_namespace": "pid:[1]", "pid": int(gone.stdout)},
        "nothing": {},
    }
    for attempt, record in others.items():
        layout.attempt(attempt).write_text(json.dumps(record))
    for attempt in (*others, "unknown", living.attempt):
        layout.part_tmp(0, attempt).write_text("x")
        layout.part_tmp(0, attempt, trial=1).write_text("x")
    started(kit, output, plan)
    left = {name.split(".")[1] for name in os.listdir(layout.tmp)}
    assert left == {"elsewhere", "otherboot", "container", "nothing", "unknown", living.attempt}


def test_logs_of_a_committed_chunk_go_only_after_its_name_is_durable(kit: Any, output: Path) -> None:
    """A crash between publishing and cleaning up leaves logs; the name may not be on disk yet."""
    plan = kit.make_plan(6, 3)
    store = started(kit, output, plan, fs=kit.FaultyFs(0, only=["rmdir"]))
    with pytest.raises(kit.Crash):
        kit.finish_chunk(store, 0)
    layout = Layout(output)
    (layout.chunk_wal(0) / "left.log").write_bytes(b"x")
    layout.chunk_wal(1).mkdir()
    fs = kit.FaultyFs()
    store = Store.open(output, fs=fs)
    store.start_attempt({})
    assert not layout.chunk_wal(0).exists()
    assert layout.chunk_wal(1).exists()
    assert fs.log.index(("fsync_dir", layout.data)) < fs.log.index(("unlink", layout.chunk_wal(0) / "left.log"))


def test_attempts_are_noted(kit: Any, output: Path) -> None:
    store = started(kit, output, kit.make_plan(3, 3))
    record = json.loads(Layout(output).attempt(store.attempt).read_text())
    assert record["pid"] == os.getpid()
    store.note_attempt({"exit": "drained"})
    assert json.loads(Layout(output).attempt(store.attempt).read_text())["exit"] == "drained"


# -- faults while running


def test_a_full_disk_is_told_with_what_to_do(kit: Any, output: Path) -> None:
    plan = kit.make_plan(3, 3)
    fs = kit.FaultyFs(only=["write"], error=errno.ENOSPC, persistent=True)
    store = started(kit, output, plan, fs=fs)
    chunk = store.open_chunk(0)
    chunk.add(kit.completion(0))
    fs.at = 0
    with pytest.raises(StorageError, match=r"the disk is full: writing .*/00000000/.* MiB free\). Make room") as caught:
        chunk.add(kit.completion(1))
    assert caught.value.exit_code == 74
    assert set(chunk.finished) == {(0, 0)}
    fs.at = None  # there is room again
    assert chunk.add(kit.completion(1))
    assert chunk.add(kit.completion(2))
    fs.at = 0
    with pytest.raises(StorageError, match="the disk is full"):
        chunk.commit(kit.carried(chunk.chunk))
    assert os.listdir(Layout(output).tmp) == []
    fs.at = None
    assert chunk.commit(kit.carried(chunk.chunk)).won
    kit.check_output(output, plan)


def test_a_quota_is_named(kit: Any, output: Path) -> None:
    fs = kit.FaultyFs(only=["write"], error=errno.EDQUOT, persistent=True)
    chunk = started(kit, output, kit.make_plan(3, 3), fs=fs).open_chunk(0)
    fs.at = 0
    with pytest.raises(StorageError, match="the disk quota is used up"):
        chunk.add(kit.completion(1))


def test_after_a_failed_write_the_log_is_left_and_all_is_written_anew(kit: Any, output: Path) -> None:
    plan = kit.make_plan(3, 3)
    fs = kit.FaultyFs(only=["write"], error=errno.EIO)
    store = started(kit, output, plan, fs=fs)
    chunk = store.open_chunk(0)
    chunk.add(kit.completion(0))
    fs.at = fs.count
    chunk.add(kit.completion(1))
    names = sorted(os.listdir(Layout(output).chunk_wal(0)))
    assert names == [f"{log_of(store)}.1.log", f"{log_of(store)}.log"]
    # Row 0 was not synced in the file that failed, so the next flush must bring it into the new one.
    store.flush()
    (Layout(output).chunk_wal(0) / f"{log_of(store)}.log").unlink()
    assert set(started(kit, output, plan).open_chunk(0).finished) == {(0, 0), (1, 0)}


@pytest.mark.parametrize("memory_limit", [0, 1 << 20])
def test_a_failed_fsync_is_not_asked_again(kit: Any, output: Path, memory_limit: int) -> None:
    plan = kit.make_plan(3, 3)
    fs = kit.FaultyFs(0, only=["fdatasync"], error=errno.EIO)
    store = started(kit, output, plan, fs=fs, memory_limit=memory_limit)
    chunk = store.open_chunk(0)
    for row in range(2):
        chunk.add(kit.completion(row))
    store.flush()
    (Layout(output).chunk_wal(0) / f"{log_of(store)}.log").unlink()  # what was in it is unknown
    chunk.add(kit.completion(2))
    assert chunk.commit(kit.carried(chunk.chunk)).won
    kit.check_output(output, plan)


def test_fsync_that_fails_again_stops_the_run(kit: Any, output: Path) -> None:
    fs = kit.FaultyFs(0, only=["fdatasync"], error=errno.EIO, persistent=True)
    store = started(kit, output, kit.make_plan(3, 3), fs=fs)
    store.open_chunk(0).add(kit.completion(0))
    with pytest.raises(StorageError, match="Input/output error"):
        store.flush()
    fs.at = None
    store.flush()
    fs.at = fs.count
    store.flush()  # nothing left to sync


@pytest.mark.parametrize("operation", ["write", "fsync"])
def test_a_part_that_fails_is_written_once_more_under_another_name(kit: Any, output: Path, operation: str) -> None:
    plan = kit.make_plan(3, 3)

    def fail(name: str, *args: Any) -> None:
        if name == operation and "/tmp/0" in os.readlink(f"/proc/self/fd/{args[0]}"):
            fs.before = None
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    fs = kit.FaultyFs()
    store = started(kit, output, plan, fs=fs)
    fs.before = fail
    assert kit.finish_chunk(store, 0).won
    assert fs.before is None
    created = [path.name for name, path in fs.log if name == "create" and path.parent.name == "tmp"]
    assert created[-2:] == [f"00000000.{store.attempt}", f"00000000.{store.attempt}.1"]
    kit.check_output(output, plan)
    assert os.listdir(Layout(output).tmp) == []


def test_short_writes_are_finished(kit: Any, output: Path) -> None:
    class Short(FsOps):
        def write(self, fd: int, data: bytes | memoryview) -> int:
            return super().write(fd, bytes(data)[: max(1, len(data) // 3)])

    plan = kit.make_plan(7, 3)
    kit.Job().run(output, plan, fs=Short())
    kit.check_output(output, plan)
    plan = kit.make_plan(3, 3)
    store = started(kit, output.parent / "second", plan, fs=Short())
    store.open_chunk(0).add(kit.completion(0))
    assert set(started(kit, output.parent / "second", plan).open_chunk(0).finished) == {(0, 0)}


def test_an_output_that_is_moved_away_is_not_made_again(kit: Any, output: Path) -> None:
    plan = kit.make_plan(6, 3)
    store = started(kit, output, plan)
    chunk = store.open_chunk(0)
    for row in range(3):
        chunk.add(kit.completion(row))
    output.rename(output.parent / "moved")
    with pytest.raises(StorageError, match="moved or deleted"):
        chunk.commit(kit.carried(chunk.chunk))
    with pytest.raises(StorageError, match="moved or deleted"):
        store.open_chunk(1).add(kit.completion(3))
    assert not output.exists()
    (output.parent / "moved").rename(output)
    kit.Job().run(output, plan)
    kit.check_output(output, plan)


def test_descriptors_and_memory_are_given_back(kit: Any, output: Path) -> None:
    plan = kit.make_plan(60, 3)
    gc.collect()  # stores of other tests that were not closed
    before = len(os.listdir("/proc/self/fd"))
    store = kit.Job().run(output, plan)
    assert len(os.listdir("/proc/self/fd")) == before
    assert store._context.memory.used == 0


# -- mounts, and files that no process needs any more


def test_data_on_another_file_system_is_told_at_the_start(kit: Any, output: Path) -> None:
    class TwoMounts(FsOps):
        def rename(self, source: Path, target: Path) -> None:
            if source.parent.name == "tmp" and target.parent.name == "data":
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(source))
            super().rename(source, target)

    plan = kit.make_plan(6, 3)
    store = Store.create(output, kit.make_manifest(plan), plan, fs=TwoMounts())
    with pytest.raises(OutputCreateError, match="on two file systems"):
        store.start_attempt({})
    assert not os.listdir(output / "data")


def test_a_finished_job_keeps_no_file_of_a_loser_that_nobody_knows(kit: Any, output: Path) -> None:
    plan = kit.make_plan(6, 3)
    store = started(kit, output, plan)
    kit.finish_chunk(store, 0)
    left = [Layout(output).part_tmp(index, "20260101T000000-elsewhere-7-abcdef01", trial=index) for index in (0, 1)]
    for path in left:
        path.write_bytes(b"PAR1")
    kit.finish_chunk(store, 1)
    assert all(path.exists() for path in left)
    store.finish()
    assert not os.listdir(Layout(output).tmp)


def test_a_loser_whose_file_was_swept_gives_way(kit: Any, output: Path) -> None:
    plan = kit.make_plan(3, 3)
    first = started(kit, output, plan)

    class Swept(FsOps):
        def link(self, source: Path, target: Path) -> None:
            if not target.exists():
                kit.finish_chunk(first, 0)
                first.finish()
            super().link(source, target)

    second = Store.open(output, fs=Swept())
    second.start_attempt({})
    assert not kit.finish_chunk(second, 0).won


@pytest.mark.parametrize(
    ("number", "words", "code"),
    [
        (errno.EROFS, "mounted read-only", 74),
        (errno.ESTALE, "a new mount", 75),
        (errno.ENOTCONN, "its mount has gone", 75),
        (errno.EXDEV, "on one file system", 74),
    ],
)
def test_a_mount_that_fails_is_named(number: int, words: str, code: int) -> None:
    error = storage_error(OSError(number, os.strerror(number)), "writing", Path("/out/.batchjob/wal"))
    assert words in str(error)
    assert error.exit_code == code
