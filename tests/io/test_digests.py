"""What is read of an input is held against what was planned, also where size and times are kept."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchjob.errors import InputMissingError
from batchjob.io.inputs import check_unchanged
from batchjob.io.planner import PlanResult
from batchjob.io.reader import InputReader

PlanOf = Callable[..., PlanResult]


def write_parquet(path: Path, mark: str) -> None:
    table = pa.table({"prompt": [(mark if 400 <= i < 600 else "aaa") + "y" * 300 for i in range(1000)]})
    pq.write_table(table, path, write_statistics=False, use_dictionary=False, compression="none")


def test_lines_that_changed_are_not_handed_on(tmp_path: Path, plan_of: PlanOf) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"a": {i:03d}9}}\n' for i in range(100)).replace(" 0", " 1"))
    plan = plan_of(path, chunk_rows=10, limit=50).plan
    stat = path.stat()
    path.write_text(path.read_text().replace(" 1259}", " 1258}"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    reader = InputReader(plan)
    assert len(list(reader.rows(plan.chunks[0], None))) == 10
    with pytest.raises(InputMissingError, match="rows 21 to 30"):
        next(reader.rows(plan.chunks[2], None))
    with pytest.raises(InputMissingError, match="rows 21 to 30"):
        reader.carried(plan.chunks[2])


def test_a_parquet_file_that_changed_in_its_middle(tmp_path: Path, plan_of: PlanOf) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, "aaa")
    plan = plan_of(path).plan
    stat = path.stat()
    write_parquet(path, "bbb")
    assert path.stat().st_size == stat.st_size
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(InputMissingError, match="other content"):
        check_unchanged(plan.files[0])
    with pytest.raises(InputMissingError, match="other content"):
        next(InputReader(plan).rows(plan.chunks[0], None))
