"""What is read of an input is held against what was planned, also where size and times are kept."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchjob.errors import InputMissingError
from batchjob.inputs.planner import PlanResult
from batchjob.inputs.reader import InputReader
from batchjob.inputs.stamps import check_unchanged

PlanOf = Callable[..., PlanResult]


def write_parquet(path: Path, mark: str) -> None:
    table = pa.table({"prompt": [(mark if 400 <= i < 600 else "aaa") + "y" * 300 for i in range(1000)]})
    pq.write_table(table, path, write_statistics=False, use_dictionary=False, compression="none")


def test_lines_that_changed_are_not_handed_on(tmp_path: Path, plan_of: PlanOf) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"a": "row {i:04d} {"x" * 90}"}}\n' for i in range(3000)))
    plan = plan_of(path, chunk_rows=10, limit=2000).plan
    assert plan.files[0].digest.startswith("ends:"), "what --limit leaves out is not read"
    stat = path.stat()
    path.write_text(path.read_text().replace("row 1025 x", "row 1025 y"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    reader = InputReader(plan)
    assert len(list(reader.rows(plan.chunks[0], None))) == 10
    with pytest.raises(InputMissingError, match="rows 1,021 to 1,030"):
        next(reader.rows(plan.chunks[102], None))
    with pytest.raises(InputMissingError, match="rows 1,021 to 1,030"):
        reader.carried(plan.chunks[102])


@pytest.mark.parametrize("chunk_rows", [None, 7])
@pytest.mark.parametrize("limit", [None, 150])
def test_the_digests_of_any_cut_are_those_of_the_lines(
    tmp_path: Path, plan_of: PlanOf, chunk_rows: int | None, limit: int | None
) -> None:
    for name, count in (("a", 100), ("b", 1), ("c", 0), ("d", 99)):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(f'{{"a": "{name}{i}"}}\n\n' for i in range(count)) + "broken\n" * (count > 9)
        )
    plan = plan_of(tmp_path, chunk_rows=chunk_rows, limit=limit).plan
    segments = [segment for chunk in plan.chunks for segment in chunk.segments]
    assert all(len(segment.digest) == 32 for segment in segments)
    assert len({segment.digest for segment in segments}) == len(segments)
    reader = InputReader(plan)
    assert sum(len(list(reader.rows(chunk, None))) for chunk in plan.chunks) == plan.num_rows
    assert sum(reader.carried(chunk).num_rows for chunk in plan.chunks) == plan.num_rows


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
