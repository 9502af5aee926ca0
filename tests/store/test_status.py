"""`status`: what a directory says about its job, while it runs, after a crash and at the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from batchjob.errors import UsageError
from batchjob.store import RowCounts, Store, job_status
from batchjob.store.attempts import attempt_record, is_alive, process_identity
from batchjob.store.paths import Layout


def tree(path: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_a_job_half_way(kit: Any, output: Path) -> None:
    plan = kit.make_plan(10, 4)
    store = Store.create(output, kit.make_manifest(plan, num_samples=2), plan)
    store.start_attempt({"slurm_job_id": "17"})
    kit.finish_chunk(store, 1)
    chunk = store.open_chunk(0)
    for row, sample in ((0, 0), (0, 1), (2, 1), (3, 0)):
        chunk.add(kit.completion(row, sample))
    log = Layout(output).chunk_wal(0) / "zz.log"
    log.write_bytes(b"damaged\ntorn")
    before = tree(output)
    status = job_status(output)
    assert tree(output) == before, "status writes nothing"
    assert (status.num_rows, status.num_chunks, status.num_chunks_committed) == (10, 3, 1)
    assert (status.num_rows_committed, status.num_rows_logged, status.num_rows_open) == (4, 1, 5)
    assert not status.complete
    assert status.counts.num_rows == 8 + 4
    assert status.counts.errors == {"prompt_too_long": 1}
    (attempt,) = status.attempts
    assert (attempt.attempt, attempt.alive, attempt.record["slurm_job_id"]) == (store.attempt, True, "17")
    assert status.warnings == ["1 damaged records in the logs of chunk 0"]
    text = status.render()
    assert "not complete: 5 of 10 rows finished (50.0%)" in text
    assert "11 ok, 1 failed" in text
    assert f"{store.attempt} (process {os.getpid()})" in text
    data = json.loads(json.dumps(status.to_dict()))
    assert data["rows"] == {"total": 10, "committed": 4, "logged": 1, "open": 5}


def test_a_finished_job_and_a_bad_part(kit: Any, output: Path) -> None:
    plan = kit.make_plan(9, 4)
    store = kit.Job().run(output, plan)
    status = job_status(str(output))
    assert status.complete
    assert status.counts == store.counts()
    assert status.render().startswith("complete: 9 of 9 rows finished (100.0%)")
    os.truncate(Layout(output).part(0), 10)
    status = job_status(output)
    assert not status.complete
    assert status.num_rows_open == 4
    assert "is damaged" in status.warnings[0]
    assert Layout(output).part(0).exists()


def test_a_job_without_rows_and_no_job(kit: Any, output: Path, tmp_path: Path) -> None:
    kit.Job().run(output, kit.make_plan(0, 4))
    status = job_status(output)
    assert status.complete
    assert status.counts == RowCounts()
    assert "100.0%" in status.render()
    with pytest.raises(UsageError, match="no output directory"):
        job_status(tmp_path)


def test_whether_a_process_lives_is_told_only_where_it_can_be_known() -> None:
    mine = json.loads(attempt_record({"note": 1}))
    assert mine["note"] == 1
    assert is_alive(mine) is True
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        start = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
        other = {**mine, "pid": child.pid, "pid_start": start}
        assert is_alive(other) is True
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert is_alive(other) is False, "a zombie has done its last write"
    finally:
        child.kill()
        child.wait()
    assert is_alive(other) is False
    assert is_alive({**mine, "pid_start": "1"}) is False, "the number was given to another process since"
    for name in ("host", "boot_id", "pid_namespace"):
        assert is_alive({**mine, name: "other"}) is None
        assert is_alive({key: value for key, value in mine.items() if key != name}) is None
    for name in ("pid", "pid_start"):
        assert is_alive({key: value for key, value in mine.items() if key != name}) is None
    assert is_alive(None) is None
    assert is_alive({}) is None
    assert set(process_identity()) <= set(mine)
