"""Small helpers to write inputs and to read a whole plan back."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from batchjob.inputs.planner import PlanResult, make_plan
from batchjob.inputs.reader import InputReader
from batchjob.records import Record
from batchjob.spec import JobSpec


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, bytes], Path]:
    """`write(name, data)` packs the bytes as the name's ending says and returns the path."""

    def write(name: str, data: bytes) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".gz"):
            data = gzip.compress(data, mtime=0)
        elif name.endswith(".zst"):
            data = zstandard.ZstdCompressor().compress(data)
        path.write_bytes(data)
        return path

    return write


@pytest.fixture
def plan_of() -> Callable[..., PlanResult]:
    """`plan_of(path, ..., chunk_rows=3)`: the plan of these inputs."""

    def plan_of(*paths: Path | str, **spec: Any) -> PlanResult:
        return make_plan(JobSpec(input=tuple(map(str, paths)), **spec))

    return plan_of


@pytest.fixture
def read_all() -> Callable[..., list[Record]]:
    """Every row of a plan, chunk by chunk through one reader."""

    def read_all(result: PlanResult, columns: list[str] | None = None, **options: Any) -> list[Record]:
        reader = InputReader(result.plan, **options)
        records = [record for chunk in result.plan.chunks for record in reader.rows(chunk, columns)]
        reader.close()
        return records

    return read_all


@pytest.fixture
def carried_all() -> Callable[[PlanResult], list[dict[str, Any]]]:
    """The carried columns of every row, as Python values."""

    def carried_all(result: PlanResult) -> list[dict[str, Any]]:
        reader = InputReader(result.plan)
        rows = [row for chunk in result.plan.chunks for row in reader.carried(chunk).to_pylist()]
        reader.close()
        return rows

    return carried_all
