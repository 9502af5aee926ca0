"""Files under .batchjob that another user wrote or damaged: an error of one line, no traceback, no wrong row."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import batchjob
from batchjob.errors import BatchJobError, ConfigMismatchError, OutputCreateError, StorageError
from batchjob.plan import Segment
from batchjob.store import Store, job_status
from batchjob.store.paths import Layout
from batchjob.store.plan_files import plan_to_bytes
from batchjob.store.wal import frame

Run = Callable[..., Any]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"row {i}"}) + "\n" for i in range(20)))
    return path


@pytest.fixture
def layout(tmp_path: Path, source: Path, run_job: Run) -> Layout:
    """A finished job that calls itself unfinished."""
    run_job(source, chunk_rows=10)
    layout = Layout(tmp_path / "out")
    layout.done.unlink()
    return layout


DEEP = "[" * 100_000
CHANGES: dict[str, Any] = {
    "resolved": [None, [], "x", {}, {"columns": [1]}, {"columns": "prompt"}],
    "fingerprint": [None, 5, {}, {"chunk_rows": "many"}],
    "schema": ["", "AAAA", "not base64", 7, None],
    "num_samples": [0, -1, 1.5, "1", None, True],
    "output_token_ids": [1, "yes", None],
    "job_id": [5, None, []],
    "link_method": ["../../x", "symlink", 3, None],
    "plan_digest": [None, 0, "0" * 64],
    "format_version": ["1", None, 99, [], 1.5],
    "spec": [None, [], "x"],
    "writer": [None, 3],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in CHANGES.items() for value in values])
def test_a_hostile_job_json(layout: Layout, source: Path, run_job: Run, name: str, value: Any) -> None:
    data = json.loads(layout.manifest.read_text())
    layout.manifest.write_text(json.dumps({**data, name: value}))
    with pytest.raises((StorageError, ConfigMismatchError)):
        run_job(source, chunk_rows=10)


@pytest.mark.parametrize(
    "content", ["", "null", "[]", "7", '"x"', "{}", DEEP, '{"format_version": 1, "extra": 1}', "\0" * 100, "{" * 1000]
)
def test_a_job_json_that_is_none(layout: Layout, source: Path, run_job: Run, content: str) -> None:
    layout.manifest.write_text(content)
    with pytest.raises(StorageError, match="damaged"):
        run_job(source, chunk_rows=10)


def test_a_job_json_of_any_size_is_not_read_into_objects(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchjob.store.manifest.MAX_STATE_BYTES", 1000)
    with pytest.raises(StorageError, match="bytes"):
        Store.open(layout.root)


def put_plan(layout: Layout, plan: Any) -> None:
    """A plan whose checksum is right, as the owner of the directory can make it."""
    data = plan if isinstance(plan, bytes) else plan_to_bytes(plan)
    layout.plan.write_bytes(data)
    manifest = json.loads(layout.manifest.read_text())
    layout.manifest.write_text(json.dumps({**manifest, "plan_digest": hashlib.sha256(data).hexdigest()}))


def hostile_plans(plan: Any) -> dict[str, Any]:
    first, second = plan.chunks
    file = plan.files[0]
    return {
        "no plan at all": b"x" * 100,
        "empty": b"",
        "an index that is a path": replace(plan, chunks=(replace(first, index=-1), second)),
        "a gap": replace(plan, chunks=(first, replace(second, row_index=11))),
        "more rows than the file": replace(plan, chunks=(first, replace(second, num_rows=1 << 40))),
        "rows without segments": replace(plan, chunks=(replace(first, segments=()), second)),
        "a file that is not there": replace(plan, chunks=(replace(first, segments=(Segment(5, 0, 10),)), second)),
        "a negative offset": replace(plan, chunks=(replace(first, segments=(Segment(0, 0, 10, -5),)), second)),
        "a relative path": replace(plan, files=(replace(file, path="../../etc/passwd"),)),
        "a number as a path": replace(plan, files=(replace(file, path=7),)),
        "a NUL in a path": replace(plan, files=(replace(file, path="/a\0b"),)),
        "an unknown format": replace(plan, files=(replace(file, format="pickle"),)),
        "rows as text": replace(plan, files=(replace(file, num_rows="20"),)),
        "unknown kinds": replace(plan, columns={"prompt": "object"}),
        "columns without a schema": replace(plan, arrow_schema=b""),
        "a schema that is none": replace(plan, arrow_schema=b"x" * 64),
    }


@pytest.mark.parametrize("what", range(16))
def test_a_hostile_plan(layout: Layout, source: Path, run_job: Run, what: int) -> None:
    plans = hostile_plans(Store.open(layout.root).plan)
    assert len(plans) == 16
    put_plan(layout, list(plans.values())[what])
    with pytest.raises(StorageError, match="damaged"):
        run_job(source, chunk_rows=10)


def test_a_plan_cannot_name_a_file_that_the_user_did_not(
    layout: Layout, tmp_path: Path, source: Path, run_job: Run
) -> None:
    """Whatever a plan says, only what --input names is read: here taken for a file that was moved, and compared."""
    secret = tmp_path / "secret.jsonl"
    secret.write_bytes(source.read_bytes())
    secret.chmod(0)
    plan = Store.open(layout.root).plan
    put_plan(layout, replace(plan, files=(replace(plan.files[0], path=str(secret)),)))
    source.write_bytes(source.read_bytes().replace(b"row", b"sum"))
    with pytest.raises(batchjob.InputMissingError):
        run_job(source, chunk_rows=10)


RECORD = {"row": 10, "sample": 0, "of": 1, "prompt_tokens": 2, "output_tokens": 1, "finish": "stop", "text": "planted"}
BAD_RECORDS: list[dict[str, Any] | str] = [
    {"prompt_tokens": -1},
    {"prompt_tokens": 1 << 31},
    {"output_tokens": 1 << 70},
    {"output_tokens": 1.0},
    {"text": 5},
    {"text": "half \ud800 a pair"},
    {"finish": ["stop"]},
    {"row": -1},
    {"row": 1 << 80},
    {"row": True},
    {"sample": 7},
    {"of": 0},
    {"of": 1 << 60},
    {"error": "engine_error"},
    {"error": ["engine_error", 5]},
    {"error": ["engine_error", "\udfff"]},
    DEEP,
    "[" * 500 + "]" * 500,
    "NaN",
]


@pytest.mark.parametrize("record", BAD_RECORDS, ids=lambda value: str(value)[:30])
def test_a_record_with_a_good_checksum_and_bad_content(
    layout: Layout, source: Path, run_job: Run, record: dict[str, Any] | str
) -> None:
    layout.part(1).unlink()
    payload = record if isinstance(record, str) else json.dumps({**RECORD, **record})
    layout.chunk_wal(1).mkdir()
    (layout.chunk_wal(1) / "planted.log").write_bytes(frame(payload.encode()))
    result, _ = run_job(source, chunk_rows=10)
    assert result.job_complete
    assert result.num_ok == 20
    assert any("1 damaged records" in warning for warning in result.warnings)


def test_attempts_and_done_that_are_nonsense(layout: Layout, source: Path, run_job: Run) -> None:
    for content in ("", DEEP, "[]", '{"pid": 1e400}', '{"pid": "x", "host": []}'):
        (layout.attempts / "planted.json").write_text(content)
        layout.done.write_text(content)
        job_status(layout.root)
        result, _ = run_job(source, chunk_rows=10)
        assert result.job_complete


# -- what lies in the place of a file


def test_a_planted_symbolic_link_is_not_followed(layout: Layout, tmp_path: Path, source: Path, run_job: Run) -> None:
    moved = tmp_path / "theirs.json"
    layout.manifest.rename(moved)
    layout.manifest.symlink_to(moved)
    with pytest.raises(StorageError, match="symbolic link"):
        run_job(source, chunk_rows=10)


def test_a_name_that_is_taken_is_never_written_through(layout: Layout, tmp_path: Path) -> None:
    """A link planted where a log or a part is about to be made: creation is exclusive."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    store = Store.open(layout.root)
    (layout.tmp / f"attempt.{store.attempt}").symlink_to(victim)
    with pytest.raises(BatchJobError):
        store.start_attempt({})
    assert victim.read_text() == "precious"


@pytest.mark.timeout(20)
def test_a_pipe_in_the_place_of_a_log_does_not_hang_the_run(layout: Layout, source: Path, run_job: Run) -> None:
    layout.part(1).unlink()
    layout.chunk_wal(1).mkdir()
    os.mkfifo(layout.chunk_wal(1) / "planted.log")
    with pytest.raises(StorageError, match="regular file"):
        run_job(source, chunk_rows=10)


def test_the_state_of_another_user_is_not_trusted(layout: Layout, source: Path, run_job: Run, monkeypatch: Any) -> None:
    owner = layout.state.stat().st_uid
    other = owner + 4321
    monkeypatch.setattr("os.geteuid", lambda: other)
    if owner == 0:  # what root made is trusted: give it to another user
        os.chown(layout.state, other + 1, -1)
    with pytest.raises(OutputCreateError, match="BATCHJOB_TRUST_OUTPUT"):
        run_job(source, chunk_rows=10)
    assert job_status(layout.root).complete, "to look at it is harmless"
    monkeypatch.setenv("BATCHJOB_TRUST_OUTPUT", "1")
    assert run_job(source, chunk_rows=10)[0].job_complete


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("planted", ["log", "directory"])
def test_a_log_of_another_user_is_not_read(
    layout: Layout, source: Path, run_job: Run, monkeypatch: Any, planted: str
) -> None:
    layout.part(1).unlink()
    layout.chunk_wal(1).mkdir()
    log = layout.chunk_wal(1) / "planted.log"
    log.write_bytes(b"")
    os.chown(log if planted == "log" else layout.wal, 4321, -1)
    monkeypatch.setattr("os.geteuid", lambda: 1234)
    with pytest.raises(BatchJobError, match=r"another user.*4321.*BATCHJOB_TRUST_OUTPUT"):
        run_job(source, chunk_rows=10)
    monkeypatch.setenv("BATCHJOB_TRUST_OUTPUT", "1")
    assert run_job(source, chunk_rows=10)[0].job_complete


def test_names_are_made_of_numbers_only(tmp_path: Path, run_job: Run) -> None:
    """Ids such as paths, NULs and four thousand characters are data."""
    ids = ["../../x", "/etc/passwd", "a\0b", "x" * 4000, "con", "..", "\u202e.txt", ""]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"id": name, "prompt": "a"}) + "\n" for name in ids))
    result, _ = run_job(source)
    assert result.num_ok == len(ids)
    made = {path.name for path in tmp_path.rglob("*") if path.is_file()} - {"in.jsonl"}
    attempt = next(Layout(tmp_path / "out").attempts.iterdir()).name
    assert made == {"part-00000000.parquet", "job.json", "00000.arrow", "done.json", attempt}


def test_the_schema_in_job_json_is_plain_arrow(layout: Layout) -> None:
    """Nothing in the state is a pickle: what is not JSON text is Arrow's own format."""
    schema = base64.b64decode(json.loads(layout.manifest.read_text())["schema"])
    for path in layout.state.rglob("*"):
        if path.is_file():
            assert b"\x80\x04\x95" not in path.read_bytes()
    assert b"\x80\x04\x95" not in schema
