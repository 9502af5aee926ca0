"""Jobs that earlier versions of batchjob left half way, one per format: this version reads and resumes them.

Each archive holds `rows.jsonl` (12 rows, one of them broken) and `out`: two samples per row with token ids, a part of
4 rows and a log with 3 complete rows more. It was made at /data, so the test has to point the plan to another place.
"""

from __future__ import annotations

import json
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import batchjob
from batchjob.store import Store, job_status, merge
from batchjob.store.paths import Layout
from batchjob.store.plan_files import checksum, plan_to_bytes

ARCHIVES = sorted(Path(__file__).with_name("golden").glob("*.tar.gz"))


@pytest.fixture(params=ARCHIVES, ids=lambda path: path.name)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def test_there_is_one_for_this_version() -> None:
    assert f"{batchjob.__version__}.tar.gz" in {path.name for path in ARCHIVES}


def test_it_can_be_read(place: Path) -> None:
    status = job_status(place / "out")
    assert (status.num_rows, status.num_rows_committed, status.num_rows_logged) == (12, 4, 3)
    assert status.warnings == []
    assert merge(place / "out", place / "merged.jsonl", partial=True) == 8
    rows = [json.loads(line) for line in (place / "merged.jsonl").read_text().splitlines()]
    assert [(row["id"], row["score"], row["tags"]) for row in rows[::2]] == [
        ("r0", 0.0, ["a", 0]),
        ("r1", 0.25, ["a", 1]),
        ("r2", 0.5, ["a", 2]),
        ("r3", 0.75, ["a", 3]),
    ]


def move_plan(place: Path) -> None:
    """The input lies elsewhere now."""
    layout = Layout(place / "out")
    plan = Store.open(place / "out").plan
    moved = replace(plan.files[0], path=str(place / "rows.jsonl"))
    data = plan_to_bytes(replace(plan, files=(moved,)))
    layout.plan.write_bytes(data)
    manifest = json.loads(layout.manifest.read_text())
    layout.manifest.write_text(json.dumps({**manifest, "plan_digest": checksum(data)}))


def test_it_is_resumed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from inline_feeder import InlineFeeder

    monkeypatch.setattr("batchjob.prompts.feeder.Feeder", InlineFeeder)
    move_plan(place)
    old_part = (place / "out" / "data" / "part-00000000.parquet").read_bytes()
    settings: dict[str, Any] = {
        "engine": "fake",
        "input": (str(place / "rows.jsonl"),),
        "chunk_rows": 4,
        "temperature": 1.0,
        "seed": 7,
        "n": 2,
        "output_token_ids": True,
        "max_error_rate": 1.0,
        "progress": "none",
    }
    result = batchjob.run(batchjob.JobSpec(output=str(place / "out"), **settings), echo=lambda line: None)
    assert (result.rows_reused, result.rows_done, result.job_complete) == (7, 12, True)
    assert (place / "out" / "data" / "part-00000000.parquet").read_bytes() == old_part
    batchjob.run(batchjob.JobSpec(output=str(place / "fresh"), **settings), echo=lambda line: None)
    assert outputs(place / "out") == outputs(place / "fresh"), "what the old version logged is what this one computes"


def outputs(output: Path) -> list[dict[str, Any]]:
    rows = [row for path in sorted((output / "data").iterdir()) for row in pq.read_table(path).to_pylist()]
    for row in rows:  # a message names the place of the input
        row["error_message"] = (row["error_message"] or "").rpartition("/")[2]
    return rows
